"""Modules that call `F.scaled_dot_product_attention` or `flex_attention`: timm, nanoGPT, torchtitan, users' own."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from headwise.attend import projections
from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Site
from headwise.attend.hosts.layers.branch_walk import last_before_sum
from headwise.attend.hosts.layers.declared import (
    Candidate,
    attends_across,
    calls,
    looks_like_attention,
    normalises,
    other_positions,
    over_channels,
    passes_true,
    shifts_windows,
    uses,
)
from headwise.attend.hosts.layers.hooks import Hooks
from headwise.attend.hosts.sdpa import call, flex, open_sites
from headwise.attend.hosts.sdpa.shape import SAMPLE_MAJOR, Limits
from headwise.attend.projections.names import HEADS, first_number
from headwise.attend.projections.sizes import sizes
from headwise.borders import hook_first, own_buffers, own_modules
from headwise.files.errors import LEAVE_OUT

# Class and function names that show attention in windows, cut by the module itself or by its block.
CLASSES = re.compile(
    r"window|partition|locallygrouped|maskunit|localattention|neighborhood|blockattention", re.IGNORECASE
)
CUTS = r"window_partition|grid_partition|window_unpartition|window_reverse|blockify"
SIZES = ("window_size", "partition_size", "win_size", "ws", "window")


def declared(model: nn.Module, site: Site) -> None:
    """Set on the site whether its module or block declares attention in windows, and whether the module pools."""
    block = model.get_submodule(site.name.rpartition(".")[0]) if "." in site.name else None
    around = [site.module, *([block] if block is not None and block is not model else [])]
    site.windowed = any(_cuts_windows(module) for module in around)
    site.shifted = site.windowed and shifts_windows(around)
    site.pooled = not site.is_cross and pools(site.module)
    # All layouts of timm are sample-major, which a test checks. Others are determined from an example.
    if site.windowed and type(site.module).__module__.startswith("timm."):
        site.row_order = SAMPLE_MAJOR


def pools(module: nn.Module) -> bool:
    """Return whether a module declares that it pools its queries or keys, as PVT, Twins and Hiera do."""
    ratios = [getattr(module, name, 1) for name in ("sr_ratio", "q_stride", "kv_stride", "reduction_ratio")]
    reducer = getattr(module, "sr", None)
    unchanged = reducer is None or isinstance(reducer, nn.Identity) or not isinstance(reducer, nn.Module)
    return not unchanged or any(_positive(ratio) and ratio not in (1, (1, 1)) for ratio in ratios)


def _cuts_windows(module: nn.Module) -> bool:
    if getattr(module, "use_mask_unit_attn", True) is False:
        return False
    sizes = [getattr(module, name) for name in SIZES if hasattr(module, name)]
    if sizes and not any(_positive(size) for size in sizes):
        return False
    name = type(module).__name__
    # A window size alone proves nothing: BEiT stores the size of the whole grid under that name.
    return CLASSES.search(name) is not None or uses(module, CUTS) or (bool(sizes) and "TinyVit" in name)


def _positive(size: Any) -> bool:
    values = size if isinstance(size, tuple | list) else [size]
    return all(isinstance(value, int) and value > 0 for value in values) and bool(values)


NAME = "scaled_dot_product_attention"
OFF = (
    "its fused attention is switched off (fused_attn=False), so that it computes an explicit softmax: switch it on, "
    "for timm with timm.layers.set_fused_attn(True, experimental=True) before the model is made"
)


class Tokens(Protocol):
    """A source of the tokens of a call that are not the layer's own, such as a text's."""

    def hooks(self) -> list[Any]:
        """Hook the layer and return the handles."""
        ...

    def at(self, queries: int, keys: int) -> tuple[slice | None, bool, bool]:
        """Return the slice of the text tokens, whether the text was passed separately, and whether the keys are tokens
        other than the queries."""
        ...


class SdpaAdapter:
    """Marks the module's forward as open while it runs, so that attention calls inside it belong to this site."""

    limits: Limits
    # whether the adapter was unpickled and its module has not run since
    asleep = False

    def __init__(
        self,
        site: Site,
        tokens: Tokens | None = None,
        stand_in: Callable[[nn.Module], None] | None = None,
        step_aside: Callable[[], None] | None = None,
    ) -> None:
        """Create the adapter of a site, whose further tokens `tokens` gives.

        `stand_in` replaces another attention function of the host in the code of a layer, and `step_aside` restores it
        when no fitted site is left.
        """
        self.site, self.tokens = site, tokens
        self.stand_in, self.step_aside = stand_in, step_aside
        # The number that the module declares: the site's number may come from an example instead.
        self.heads = site.heads
        self.fitted: FittedLayer | None = None
        self.hooks: Hooks | None = None
        self.handles: list[Any] = []
        # The calls recorded while the model runs on an example; None otherwise.
        self.record: list[tuple[Tensor, Tensor, Tensor, int]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SdpaAdapter:
        # Skips __init__, as deepcopy does by default; the copy needs its own finalizer.
        twin = object.__new__(SdpaAdapter)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        _restore_with(twin)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The function may not be replaced in this process; the module is not complete yet.
        self.__dict__.update(state)
        self.asleep = True
        call.stand_in()
        _restore_with(self)

    def attach(self, fitted: FittedLayer) -> None:
        """Hook the module and, for the first fitted site, replace the attention function."""
        output = projections.output(fitted.site, "what acts on the branch").module if fitted.needs("branch") else None
        self.fitted, self.limits = fitted, Limits(fitted)
        module = self.site.module
        # The branch is complete only after the last dropout or norm before the residual.
        last = output if output is None else last_before_sum(self.site) or output
        self.hooks = Hooks(fitted, inside=last is not None and any(m is last for m in module.modules()))
        self.handles = [
            module.register_forward_pre_hook(self.hooks.before, with_kwargs=True),
            # Runs before all other hooks, so that their calls belong to this site; `leave` runs even after an error.
            hook_first(module, self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        ]
        if output is not None:
            self.handles += self.hooks.follow(output, None if last is output else last)
        if self.tokens is not None:
            self.handles += self.tokens.hooks()
        self._stand_in(module)
        _restore_with(self)

    def _stand_in(self, module: nn.Module) -> None:
        call.stand_in()
        flex.stand_in(module)
        if self.stand_in is not None:
            self.stand_in(module)

    def other_tokens(self, queries: int, keys: int) -> tuple[slice | None, bool, bool]:
        """Return the slice of the text tokens, whether the text was passed separately, and whether the keys are tokens
        other than the queries."""
        return (None, False, False) if self.tokens is None else self.tokens.at(queries, keys)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Mark the site as open: attention calls from now on belong to it."""
        if self.asleep:
            self.asleep = False
            self._stand_in(module)
        open_sites.enter(self, module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Mark the site as closed.

        Raises:
            RuntimeError: if the forward made no attention call, so that methods that act on it were bypassed.
        """
        called = open_sites.leave(self)
        # None: the forward raised, and its error is the one to show.
        if output is None or self.hooks is None:
            return
        if not called:
            self._refuse_bypass(module)
        self.hooks.check_output()

    def _refuse_bypass(self, module: nn.Module) -> None:
        assert self.fitted is not None
        passed_by = [repr(m) for m in self.fitted.active(module.training) if m.touches_call()]
        passed_by += ["an ablation"] if self.fitted.gate is not None else []
        if passed_by:
            raise RuntimeError(
                f"{self.site.name} computed its attention in this call without {NAME} in torch.nn.functional, so that "
                f"{' + '.join(passed_by)} would do nothing there: call the model without output_attentions=True, write "
                f"F.{NAME} where the function was imported by name, or {LEAVE_OUT}"
            )

    def detach(self) -> None:
        """Remove the hooks; the last fitted site restores the function."""
        for handle in self.handles:
            handle.remove()
        open_sites.leave(self)
        self.fitted, self.hooks, self.handles = None, None, []
        _step_aside(self.step_aside)


def _restore_with(adapter: SdpaAdapter) -> None:
    # A fitted model may be deleted without remove(). Not at exit: the interpreter has freed modules by then. The layer
    # and its adapter may be freed one after the other, and only the last one finds no site left.
    for owner in (adapter, adapter.fitted):
        if owner is not None:
            weakref.finalize(owner, _step_aside, adapter.step_aside).atexit = False


def _step_aside(restore: Callable[[], None] | None) -> None:
    call.step_aside()
    flex.step_aside()
    if restore is not None:
        restore()


def find(model: nn.Module, taken: set[nn.Module]) -> list[Candidate]:
    """Return the modules whose forward, or a function that it calls by name, calls fused or flex attention."""
    candidates: dict[nn.Module, Candidate] = {}
    names = {name: module for name, module in model.named_modules() if module not in taken}
    calling = [
        n
        for n, m in names.items()
        if not _container(m) and (calls(m, NAME, depth=2 if looks_like_attention(m) else 1) or flex.calls_flex(m))
    ]
    for name in calling:
        layer = _owner(name, names, calling)
        candidates.setdefault(names[layer], _candidate(model, layer, names[layer]))
    return list(candidates.values())


def _container(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention | nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _owner(name: str, names: dict[str, nn.Module], calling: list[str]) -> str:
    """Return the name of the site for a calling module: its layer if the module itself holds no weights."""
    layer = name
    while layer and next(names[layer].parameters(), None) is None:
        layer = layer.rpartition(".")[0]
        while layer and _container(names[layer]):
            layer = layer.rpartition(".")[0]
    inside = [n for n in calling if n != layer and (not layer or n.startswith(f"{layer}."))]
    # A layer with several such modules is not an attention layer: each of them is a site.
    return layer if layer in names and inside in ([], [name]) else name


def _candidate(model: nn.Module, name: str, module: nn.Module) -> Candidate:
    site = Site(name, module, host="fused", is_cross=attends_across(name, module))
    site.heads = first_number(module, HEADS)
    site.head_dim, site.kv_heads, site.value_dim = sizes(module, site.heads)
    site.qk_norm = normalises(module)
    rotary = uses(module, "rot|rope") and not other_positions(module)
    site.rope = rotary and any(_has_rope(m) for m in model.modules())
    if passes_true(module, "is_causal") or True in (
        getattr(module, "is_causal", None),
        getattr(module, "causal", None),
    ):
        site.causal = True
    declared(model, site)
    reason = over_channels(module) or (OFF if getattr(module, "fused_attn", True) is False else "")
    return Candidate(site, None if reason else SdpaAdapter(site), reason)


def _has_rope(module: nn.Module) -> bool:
    # A flag does not count: timm's EVA without rotary positions has rope_mixed = False.
    attributes = (*module.__dict__.items(), *own_modules(module).items(), *own_buffers(module).items())
    return any(
        ("rope" in name or "rotary" in name) and value is not None and value is not False for name, value in attributes
    )
