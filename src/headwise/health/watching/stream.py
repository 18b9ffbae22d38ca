"""Residual stream around a layer: a block's input, what attention and the MLP add to it, and the last output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from headwise.attend import Call, Entered, FittedLayer, Site
from headwise.attend.hosts import branch_ends
from headwise.attend.projections import ProjectionError

FINAL = ("final_cosine", "final_high_frequency")
# Read together with the stream, by other hooks.
WRITES = ("attention_write", "mlp_write")
NAMES = ("stream_cosine", "stream_high_frequency", "massive_activations", *FINAL, *WRITES)
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NOT_LAST = "it is read after the last block of a stack only: the output of this block is the input of the next"
CROSS = "the stream of a block is read at its self attention"
NO_BLOCK = "the layer is in no list of blocks, so the stream that it adds to is unknown"


class Stream:
    """Hooks on a site's block that keep its input until the site's call is read, and pass on the last block's output.

    Attributes:
        obstacle: the reason why the stream cannot be read at this site; empty if it can.
        final: whether the output of the block is read too.
    """

    def __init__(self, place: FittedLayer, model: nn.Module, left: Callable[[Tensor], None]) -> None:
        self.place: FittedLayer | None = place
        self._left = left
        block, self.obstacle = block_of(place.site, model)
        self.final = block is not None and place.site.depth == place.site.layers - 1
        self._entered = Entered()
        self._handles: list[Any] = []
        if block is not None:
            self._handles.append(block.register_forward_pre_hook(self.before, with_kwargs=True))
        if block is not None and self.final:
            self._handles.append(block.register_forward_hook(self.after))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        # A copy of a watched model is not watched: its hooks remain and do nothing.
        copy = object.__new__(Stream)
        copy.__dict__.update(self.__dict__, place=None, _left=None, _entered=Entered(), _handles=[])
        return copy

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the input of the block: its first floating-point tensor."""
        if self.place is not None and self.place.armed:
            self._entered.put(first_tensor((*args, *kwargs.values())))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Pass on the output of the block: its first floating-point tensor."""
        if self.place is not None and self.place.armed:
            tensor = first_tensor(output if isinstance(output, tuple | list) else (output,))
            if tensor is not None:
                self._left(tensor.detach())

    def take(self) -> Tensor | None:
        """Return the input of the block, and forget it; None without one."""
        tensor = self._entered.take()
        return None if tensor is None else tensor.detach()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor among values, or None."""
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)


def block_of(site: Site, model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the block around a site and an empty string, or None and the reason why it is unknown.

    The block is the nearest enclosing member of a list of modules of one class, which excludes T5's list of the parts
    of a block. If no such list has one class, as in models that alternate kinds of layers, it is the nearest enclosing
    member of any list.
    """
    if site.is_cross:
        return None, CROSS
    parts = site.name.split(".")
    nearest: tuple[nn.Module | None, str] = None, NO_BLOCK
    for length in range(len(parts) - 1, 0, -1):
        holder = model.get_submodule(".".join(parts[: length - 1]))
        if not isinstance(holder, LISTS):
            continue
        block = holder.get_submodule(parts[length - 1])
        several = _self_attentions(block, site)
        if len({type(member) for member in holder.children()}) == 1:
            return (None, several) if several else (block, "")
        if nearest[0] is None and not several:
            nearest = block, ""
    return nearest


def _self_attentions(block: nn.Module, site: Site) -> str:
    """Return why a block with several self attentions has no stream for one of them; empty if it has only one."""
    same_class = sum(type(module) is type(site.module) for module in block.modules())
    if same_class < 2 or site.model is None:
        return ""
    from headwise.attend import hosts

    inside = set(block.modules())
    sites = [f.site for f in hosts.find(site.model) if f.site.module in inside and not f.site.is_cross]
    return (
        f"its block has {len(sites)} self attentions, which add to the stream one after the other"
        if len(sites) > 1
        else ""
    )


def tokens_of(call: Call, stream: Tensor | None) -> tuple[Tensor | None, str]:
    """Return the stream as tokens (B, T, C) in the order of the call's, or None and the reason why it cannot be."""
    if stream is None:
        return None, "the block was called without a tensor"
    site, hidden = call.site, call.hidden
    if site.windowed:
        tokens = stream.flatten(1, -2) if stream.dim() > 3 else stream
        return (tokens, "") if tokens.dim() == 3 else (None, _not_tokens(stream))
    batch_second = site.host == "torch" and not getattr(site.module, "batch_first", True)
    if stream.dim() == 2:
        stream = stream[None]
    elif stream.dim() == 3 and batch_second:
        stream = stream.transpose(0, 1)
    wanted = (call.batch, call.queries) if hidden is None or hidden.dim() != 3 else tuple(hidden.shape[:2])
    choices = [stream] if stream.dim() == 3 else [stream.flatten(1, -2), stream.flatten(2).transpose(1, 2)]
    width = None if hidden is None else hidden.shape[-1]
    for tokens in choices:
        if tuple(tokens.shape[:2]) == wanted and (len(choices) == 1 or tokens.shape[-1] == width):
            return tokens, ""
    return None, _not_tokens(stream)


def _not_tokens(stream: Tensor) -> str:
    return f"the block takes or returns a tensor of shape {tuple(stream.shape)}, which is not the layer's tokens"


class Writes:
    """Hooks on the last modules of a block's branches, which pass on what these add to the residual stream.

    Attributes:
        obstacles: the reasons why a branch cannot be read, by the name of its statistic.
    """

    def __init__(
        self, place: FittedLayer, model: nn.Module, names: Sequence[str], wrote: Callable[[str, Tensor], None]
    ) -> None:
        self.place: FittedLayer | None = place
        self._wrote, self._handles = wrote, list[Any]()
        self.obstacles: dict[str, str] = {}
        block, reason = block_of(place.site, model)
        for name in names:
            try:
                if block is None:
                    raise ProjectionError(reason)
                of_attention = name == WRITES[0]
                ends = branch_ends.attention(place.site) if of_attention else branch_ends.mlp(place.site, block)
                self._handles += self._follow(name, *ends)
            except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self.obstacles[name] = str(error).splitlines()[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Writes:
        # A copy of a watched model is not watched: its hooks remain and do nothing.
        copy = object.__new__(Writes)
        copy.__dict__.update(self.__dict__, place=None, _wrote=None, _handles=[])
        return copy

    def _follow(self, name: str, start: nn.Module, last: nn.Module | None) -> list[Any]:
        # A block may call one dropout in several places: its first call after the branch is the one to read.
        ran = Entered()

        def begin(module: nn.Module, args: Any, output: Any) -> None:
            ran.put(True)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self.place is not None and self.place.armed and (last is None or ran.take()):
                tensor = first_tensor(output if isinstance(output, tuple | list) else (output,))
                if tensor is not None:
                    self._wrote(name, tensor.detach())

        if last is None:
            return [start.register_forward_hook(end)]
        return [start.register_forward_hook(begin), last.register_forward_hook(end)]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
