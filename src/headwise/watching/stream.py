"""Stream: the residual stream around a layer, read where it enters the layer's block and where it leaves the last
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.call import Call
from headwise.core.forward import Entered
from headwise.core.site import Site

FINAL = ("final_cosine", "final_high_frequency")
NAMES = ("stream_cosine", "stream_high_frequency", "massive_activations", *FINAL)
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NOT_LAST = "it is read behind the last block of a stack: what leaves this one enters the next"
CROSS = "the stream of a block is read at its self attention"
NO_BLOCK = "it lies in no list of blocks, so that the stream it adds to cannot be told"


class Stream:
    """Keeps what enters a site's block until the site's call is read, and shows what leaves the last block.

    Attributes:
        obstacle: why the stream cannot be read at this site, empty where it can.
        final: whether what leaves the block is read too.
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
        # A copy of a watched model is not watched: its hooks stay, and do nothing.
        twin = object.__new__(Stream)
        twin.__dict__.update(self.__dict__, place=None, _left=None, _entered=Entered(), _handles=[])
        return twin

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what enters the block: its first tensor of numbers."""
        if self.place is not None and self.place.armed:
            self._entered.put(_first((*args, *kwargs.values())))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Show what leaves the block."""
        if self.place is not None and self.place.armed:
            tensor = _first(output if isinstance(output, tuple | list) else (output,))
            if tensor is not None:
                self._left(tensor.detach())

    def take(self) -> Tensor | None:
        """Return what entered the block, once."""
        tensor = self._entered.take()
        return None if tensor is None else tensor.detach()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _first(values: Any) -> Tensor | None:
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)


def block_of(site: Site, model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the block around a site, or None and why it cannot be told.

    A block is the nearest member of a list of modules of one class; T5's list of parts within a block is none. Where no
    list is of one class, as in models that alternate kinds of layers, it is the nearest member of any list.
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
    """Say why a block that holds several self attentions tells no stream of one of them; empty where it holds one."""
    like = sum(type(module) is type(site.module) for module in block.modules())
    if like < 2 or site.model is None:
        return ""
    from headwise import hosts

    inside = set(block.modules())
    own = [f.site for f in hosts.find(site.model) if f.site.module in inside and not f.site.is_cross]
    return (
        f"its block holds {len(own)} self attentions, which add to the stream one after the other"
        if len(own) > 1
        else ""
    )


def tokens_of(call: Call, stream: Tensor | None) -> tuple[Tensor | None, str]:
    """Return the stream as tokens (B, T, C) in the order of the call's, or None and why it cannot be laid out so."""
    if stream is None:
        return None, "the block was called without a tensor"
    site, hidden = call.site, call.hidden
    if site.windowed:
        laid = stream.flatten(1, -2) if stream.dim() > 3 else stream
        return (laid, "") if laid.dim() == 3 else (None, _other(stream))
    batch_second = site.host == "torch" and not getattr(site.module, "batch_first", True)
    if stream.dim() == 2:
        stream = stream[None]
    elif stream.dim() == 3 and batch_second:
        stream = stream.transpose(0, 1)
    wanted = (call.batch, call.queries) if hidden is None or hidden.dim() != 3 else tuple(hidden.shape[:2])
    choices = [stream] if stream.dim() == 3 else [stream.flatten(1, -2), stream.flatten(2).transpose(1, 2)]
    width = None if hidden is None else hidden.shape[-1]
    for laid in choices:
        if tuple(laid.shape[:2]) == wanted and (len(choices) == 1 or laid.shape[-1] == width):
            return laid, ""
    return None, _other(stream)


def _other(stream: Tensor) -> str:
    return f"the block takes or gives a tensor of shape {tuple(stream.shape)}, which is not the layer's tokens"
