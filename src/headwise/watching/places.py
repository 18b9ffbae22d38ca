"""The sites that are watched: those of a regularized model as they are, the others fitted with nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwise.regularizing.fitted_site import Fitted
from headwise.regularizing.handle import handle
from headwise.regularizing.plan import Where, _selection
from headwise.statistics import STATISTICS

if TYPE_CHECKING:
    from headwise.regularizing.handle import Regularized


def unwrapped(model: nn.Module) -> nn.Module:
    """Give the model inside torch.compile's or distributed training's wrappers."""
    inner: Any = model
    while True:
        wrapped = inner._modules.get("_orig_mod") or (
            inner._modules.get("module")
            if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel)
            else None
        )
        if wrapped is None:
            return inner
        inner = wrapped


class Places:
    """Stands at the chosen sites of a model and leaves them as they were."""

    def __init__(self, model: nn.Module, where: Where) -> None:
        self._own: Regularized | None = None
        self._added: list[tuple[Any, Fitted]] = []
        inner = unwrapped(model)
        try:
            self.handle = handle(inner)
        except ValueError:
            # The package's name is the function, whatever was imported before; the module of that name would hide it.
            from headwise.regularizing.handle import regularize

            self.handle = self._own = regularize(inner, where=where, allow_none=True)
            self.fitted = list(self._own.fitted)
            return
        self.fitted = self._beside(where)

    def _beside(self, where: Where) -> list[Fitted]:
        """Take the sites that have methods as they are, and stand at the chosen others too."""
        found = self.handle.found
        wanted, named = _selection(where, found)
        lost = [
            f"{f.site.name} cannot be reached: {f.reason}" for f in found if f.adapter is None and f.site.name in named
        ]
        if lost:
            raise ValueError("\n".join(lost))
        known = {fitted.site: fitted for fitted in self.handle.fitted}
        taken = []
        for one in found:
            if one.adapter is None or not wanted(one.site):
                continue
            fitted = known.get(one.site)
            if fitted is None:
                fitted = Fitted(one.site, [], self.handle)
                one.adapter.attach(fitted)
                self._added.append((one.adapter, fitted))
            if fitted.observer is not None:
                raise ValueError(f"{one.site.name} is watched already: call remove() on the other watch first")
            taken.append(fitted)
        if not taken:
            raise ValueError("where= leaves no attention layer to watch")
        return taken

    @property
    def device(self) -> torch.device:
        """Give the device that collectives of this model run on."""
        first = next(self.handle.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def layout(self, names: list[str], seen: dict[int, int]) -> dict[int, dict[str, tuple[int, ...]]]:
        """Give the shape of every figure that may be read, from heads alone: the same on all ranks.

        Args:
            seen: the heads that calls showed, by the site's index; else what the module declares counts.
        """
        places = {(f.site.stack, f.site.is_cross, f.site.depth): f.site for f in self.fitted}
        heads = {place: seen.get(site.index, site.heads or 0) for place, site in places.items()}
        return {
            site.index: {name: STATISTICS[name]().shape(heads[s, c, d], heads.get((s, c, d - 1), 0)) for name in names}
            for (s, c, d), site in places.items()
        }

    def leave(self) -> None:
        """Take away what was added; a handle that the user removed before took its own sites along."""
        for adapter, fitted in self._added:
            fitted.alive = False
            adapter.detach()
        if self._own is not None and not self._own.removed:
            self._own.remove()
        self._added, self.fitted = [], []
