"""transformers 5.x: find the modules that use its attention interface, and route their calls through methods.

Each fitted module gets its own copy of the config, which names our implementation; the model's config, which other
models may share, is never changed.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

from torch import Tensor, nn

from headwise.attend import projections
from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Site
from headwise.attend.hosts.layers.branch_walk import last_before_sum
from headwise.attend.hosts.layers.declared import (
    Candidate,
    calls,
    is_cross,
    names_used,
    normalises,
    other_positions,
    shifts_windows,
)
from headwise.attend.hosts.layers.hooks import Hooks
from headwise.attend.hosts.transformers.call import KEY, PLACE, routed
from headwise.attend.hosts.transformers.masks import PLAIN, packing_of, seeing_themselves
from headwise.attend.projections.leaves import Leaf
from headwise.attend.projections.names import COMPARED_DIM, HALVES_HEADS, HEADS, HIDDEN, PROJECTIONS, first_number
from headwise.attend.projections.sizes import sizes
from headwise.borders import attention_kind, has_attention_kind, set_attention_kind
from headwise.files.errors import LOAD_SDPA, SET_SDPA

INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def find(model: nn.Module, taken: set[nn.Module]) -> list[Candidate]:
    """Return the modules whose forward computes attention through transformers' attention interface."""
    if "transformers" not in sys.modules:
        return []
    uses_interface: dict[type, bool] = {}
    candidates: list[Candidate] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        cls = type(module)
        if cls not in uses_interface:
            uses_interface[cls] = calls(cls, INTERFACE, depth=1)
        if uses_interface[cls] and module not in taken:
            site = describe(name, module, modules)
            reason = unreachable(module)
            if not reason and not is_plain(cls, kind := implementation_of(module) or "eager"):
                site.kernel = kind
            candidates.append(Candidate(site, None, reason) if reason else Candidate(site, TransformersAdapter(site)))
    return candidates


def unreachable(module: nn.Module) -> str:
    """Return why a module that uses the interface cannot be routed, or an empty string."""
    if not has_attention_kind(config_of(module)):
        return (
            "it asks transformers' attention interface but keeps no config to route by: set module.config to its "
            "model's config before regularize()"
        )
    kind = implementation_of(module)
    if kind is None or (kind != KEY and not kind.startswith(f"{KEY}|")):
        return ""
    return f"its attention implementation is {kind!r}, which regularize() alone sets: {LOAD_SDPA}, or {SET_SDPA}"


def config_of(module: nn.Module) -> Any:
    """Return the config that a module shares with its model, or None if it has none."""
    adapter = module.__dict__.get(PLACE)
    return getattr(module, "config", None) if adapter is None else adapter.config


def implementation_of(module: nn.Module) -> str | None:
    """Return the attention implementation in the config of a module's model."""
    return attention_kind(config_of(module))


class KeyAndHostName(str):
    """Our key as a string that also equals the name of the host's implementation.

    It serves modules that compare the implementation with "eager" or "sdpa" to prepare their masks: they prepare the
    masks of the host's implementation, and the interface still finds ours.
    """

    host: str

    def __new__(cls, host: str) -> KeyAndHostName:
        key = super().__new__(cls, KEY)
        key.host = host
        return key

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.host

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[KeyAndHostName], tuple[str]]:
        return KeyAndHostName, (self.host,)


def prepares_by_name(cls: type) -> bool:
    """Return whether a module's forward compares its implementation with ("eager", "sdpa") to prepare its mask."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)  # type: ignore[attr-defined]
    # `x in ("eager", "sdpa")` is compiled to one constant, a tuple or a frozenset.
    return code is not None and any(isinstance(c, tuple | frozenset) and set(c) == set(PLAIN) for c in code.co_consts)


class TransformersAdapter:
    """Routes one attention module by giving it its own config, which names our implementation."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.fitted: FittedLayer | None = None
        self.config: Any = None
        self.asked = ""
        self.cache: Any = None
        self.verified = ""
        self.handles: list[Any] = []

    @property
    def implementation(self) -> str:
        """Return the name of the host's own implementation, from the shared config as it is now."""
        return attention_kind(self.config) or "eager"

    @property
    def plain(self) -> bool:
        """Return whether that is transformers' own eager or sdpa attention, which headwise computes itself."""
        return is_plain(type(self.site.module), self.implementation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled, perhaps in a process whose transformers does not know our implementation yet.
        self.__dict__.update(state)
        register()
        if self.asked:
            register_beside(self.asked)

    def attach(self, fitted: FittedLayer) -> None:
        """Route the module's attention through `fitted`."""
        register()
        module = self.site.module
        self.fitted, self.config = fitted, module.config
        # Modules choose their attention by their config, which the whole model shares, as do other models built from
        # it: changing it would route them all. The copy is shallow: only the choice differs, and what the user sets
        # later on a part of the config (its text_config, say) must reach the module as before. The model itself, which
        # makes the masks, keeps the shared config, so that masks are those of the host's own implementation.
        own = copy.copy(self.config)
        kind = self.implementation
        if not self.plain:
            # Our name contains the host's, for modules that test whether it names a flash kernel.
            set_attention_kind(own, register_beside(kind))
        else:
            set_attention_kind(own, KeyAndHostName(kind) if prepares_by_name(type(module)) else KEY)
        self.asked = kind
        module.config = own
        # The interface passes only the module to our function, which finds the adapter here.
        module.__dict__[PLACE] = self
        hooks = Hooks(fitted)
        self.handles = [
            module.register_forward_pre_hook(self.look, with_kwargs=True),
            module.register_forward_pre_hook(hooks.before, with_kwargs=True),
        ]
        if fitted.needs_own_tokens():
            self.handles.append(module.register_forward_pre_hook(self.remember, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self.forget))
        if fitted.needs("branch"):
            output = projections.output(self.site, "what acts on the branch").module
            self.handles += hooks.follow(output, last_before_sum(self.site))

    def look(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record how the rows of this call pack several sequences, and which of its tokens are real."""
        assert self.fitted is not None
        packing = None
        x = next((x for x in (*kwargs.values(), *args) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if x is not None and x.dim() == 3 and not self.site.is_cross:
            packing = packing_of(
                self.site.name, self.implementation, kwargs, (x.shape[0], x.shape[1]), self.fitted.running()
            )
        self.fitted.packing.put(packing)
        real = None
        if packing is None and x is not None and self.fitted.needs("hidden"):
            real = seeing_themselves(kwargs.get("attention_mask"), x.shape[1])
        self.fitted.real.put(real)

    def remember(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the cache that the module was called with until its attention is computed."""
        self.cache = next((x for x in (*kwargs.values(), *args) if is_cache(x)), None)

    def forget(self, module: nn.Module, args: Any, output: Any) -> None:
        """Release the cache: copies of the model must not copy it."""
        self.cache = None

    def detach(self) -> None:
        """Restore the module's shared config and remove the hooks."""
        self.site.module.config = self.config
        self.site.module.__dict__.pop(PLACE, None)
        for handle in self.handles:
            handle.remove()
        self.fitted, self.cache, self.handles = None, None, []

    def original(self) -> Any:
        """Return the host's own attention function, from the interface or from the module's file."""
        # Looked up in each call: the user may have set another implementation since.
        cls = type(self.site.module)
        functions = interface_of(cls)
        if self.implementation != "eager":
            return functions.get_interface(self.implementation, routed)
        return functions.get("eager") or eager_function(cls)


def interface_of(cls: type) -> Any:
    """Return the attention interface of a module class: transformers' own, or one defined in its file (Doge)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    return forward.__globals__.get(INTERFACE, ALL_ATTENTION_FUNCTIONS)


def is_plain(cls: type, implementation: str) -> bool:
    """Return whether a name means transformers' own eager or sdpa attention; users may register others under these
    names."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    own = {"eager": None, "sdpa": sdpa_attention_forward}
    return implementation in own and interface_of(cls).get(implementation) is own[implementation]


def is_cache(x: Any) -> bool:
    """Return whether an argument is a cache; it is named past_key_values, past_key_value or layer_past."""
    return callable(getattr(x, "update", None)) and callable(getattr(x, "get_seq_length", None))


def eager_function(cls: type) -> Any:
    """Return the eager attention function of a module class: the one in its file that its forward names."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    names = [n for n in forward.__code__.co_names if "eager" in n and n in forward.__globals__]
    return forward.__globals__[names[0] if names else "eager_attention_forward"]


def register() -> None:
    """Register the attention function and, under the same key, the mask function, without which padding is ignored."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(KEY, routed)
    AttentionMaskInterface.register(KEY, sdpa_mask)


def register_beside(kind: str) -> str:
    """Register our function under a name for one of the host's kernels, with its mask function; return the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"{KEY}|{kind}"
    AttentionInterface.register(name, routed)
    if kind in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    return name


CAUSAL_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
WINDOWS = ("window_size", "num_windows")


def describe(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> Site:
    """Return the site of an attention module; `modules` are all modules of the model by qualified name."""
    config = getattr(module, "config", None)
    site = Site(name, module, host="transformers", is_cross=is_cross(name, module))
    around = ancestors(name, modules)
    q, into = _leaves(module)
    site.heads = first_number(module, HEADS) or first_number(config, (*HEADS, *HALVES_HEADS))
    site.head_dim = first_number(module, COMPARED_DIM)
    if site.heads is None and q is not None and site.head_dim is not None:
        site.heads = q.rows // site.head_dim
    if site.head_dim is None and q is not None and site.heads is not None:
        site.head_dim = q.rows // site.heads
    site.hidden = into.columns if into is not None else first_number(config, HIDDEN)
    if site.head_dim is None and site.heads is not None and site.hidden is not None:
        site.head_dim = site.hidden // site.heads
    found = sizes(module, site.heads, site.head_dim)
    # Without any sign of groups, every query head has its own keys.
    site.kv_heads = found.kv_heads or _kv_heads(module, site)
    site.value_dim = found.value_dim
    site.qk_norm = normalises(module)
    site.rope = _rope(module)
    site.causal = False if site.is_cross else _causal(module, around)
    site.windowed = any(_cuts_windows(parent) for parent in (module, *around[:2]))
    site.shifted = site.windowed and shifts_windows((module, *around[:2]))
    return site


def ancestors(name: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the parents of a module, the nearest first, without containers."""
    parents = []
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict | nn.Sequential):
            parents.append(modules[name])
    return parents


def _leaves(module: nn.Module) -> tuple[Leaf | None, Leaf | None]:
    """Return the leaf of the queries, and one that takes the layer's input."""
    direct = {leaf.name: leaf for leaf in Leaf.below(module, "") if leaf.weight.dim() == 2}
    q = next((leaf for name, leaf in direct.items() if name.lower() in PROJECTIONS["q"]), None)
    into = q or next((leaf for name, leaf in direct.items() if name.lower() not in PROJECTIONS["o"]), None)
    return q, into


def _kv_heads(module: nn.Module, site: Site) -> int | None:
    groups = first_number(module, ("num_key_value_groups",)) or 1
    return None if site.heads is None else site.heads // groups


def _rope(module: nn.Module) -> bool:
    # SmolLM3 and Llama 4 copy use_rope from a list of 0 and 1 in the config.
    if getattr(module, "use_rope", True) in (False, 0) or other_positions(module):
        return False
    names = [n for n in names_used(type(module).forward) if "rotary" in n or "rope" in n.lower()]
    # An attribute of the module with such a name counts only if it is set.
    return any(getattr(module, n, True) not in (None, False) for n in names if n != "use_rope")


def _causal(module: nn.Module, around: list[nn.Module]) -> bool | None:
    declared = getattr(module, "is_causal", None)
    if declared is True:
        return True
    for parent in around:
        masks = {n for n in names_used(type(parent).forward) if n.startswith("create_") and n.endswith("_mask")}
        if masks:
            # Some, such as CLIP's text model, pass causality with each call and declare none.
            causal = masks <= CAUSAL_MASKS or (
                getattr(module, "is_decoder", False) is True and bool(masks & CAUSAL_MASKS)
            )
            return True if causal else declared
        if hasattr(parent, "get_input_embeddings"):
            break
    return declared if isinstance(declared, bool) else None


def _cuts_windows(module: nn.Module) -> bool:
    """Return whether a module cuts its input into windows: it has a window size and calls a partition function."""
    size = next((x for x in (getattr(module, n, None) for n in WINDOWS) if x is not None), 0)
    if not (any(size) if isinstance(size, tuple | list) else isinstance(size, int) and size > 0):
        return False
    return any("window" in n and ("partition" in n or "unpartition" in n) for n in names_used(type(module).forward))
