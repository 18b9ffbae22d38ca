"""What the branches of a block write: hooks where attention and the MLP enter the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from headwise.attend import Entered, FittedLayer
from headwise.attend.hosts import branch_ends
from headwise.attend.projections import ProjectionError
from headwise.health.watching.stream import WRITES, block_of, first_tensor


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
