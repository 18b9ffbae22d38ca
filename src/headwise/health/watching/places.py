"""Fitted layers at the watched sites of a model, whether the sites have methods or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.attend import FittedLayer, Regularized, Site, Where, handle, hosts, watchable
from headwise.attend.core import SharedState
from headwise.attend.hosts import Candidate
from headwise.borders import COMPILED_INSIDE, own_modules
from headwise.health.statistics import STATISTICS


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, DistributedDataParallel and DataParallel."""
    inner: Any = model
    while True:
        wrapped = own_modules(inner).get(COMPILED_INSIDE) or (
            own_modules(inner).get("module")
            if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel)
            else None
        )
        if wrapped is None:
            return inner
        inner = wrapped


class Places:
    """Fitted layers at the chosen sites of a model, which `leave` restores.

    Raises:
        ValueError: if a requested site cannot be reached or is watched already, or if no site remains. The model is
            unchanged then.
    """

    def __init__(self, model: nn.Module, where: Where) -> None:
        self.model = unwrapped(model)
        self.regularized = regularized = handle_of(self.model)
        candidates = hosts.find(self.model) if regularized is None else regularized.found
        chosen = watchable(self.model, candidates, where)
        # Figures of the whole model also cover the sites that `where` excludes.
        self.all_sites = [candidate.site for candidate in candidates if candidate.adapter is not None]
        with_methods = {} if regularized is None else {fitted.site.module: fitted for fitted in regularized.fitted}
        attached = FittedLayer.bare_in(self.model) | with_methods
        # Layers of which only heads are ablated are watched as those with methods are.
        with_methods |= {
            module: bare for module, bare in FittedLayer.bare_in(self.model).items() if bare.gate is not None
        }
        for candidate in chosen:
            if (layer := attached.get(candidate.site.module)) is not None and layer.observer is not None:
                raise ValueError(f"{candidate.site.name} is watched already: call remove() on the other watch first")
        _refuse_other_handles(self.model, chosen, with_methods)
        self.sites: list[FittedLayer] = []
        try:
            self._attach(chosen, with_methods)
        except BaseException:
            self.leave()
            raise

    def _attach(self, chosen: list[Candidate], with_methods: dict[nn.Module, FittedLayer]) -> None:
        # A copy of a watched model has bare layers without an observer; they are replaced.
        for bare in FittedLayer.bare_in(self.model).values():
            if bare.observer is None and bare.gate is None:
                bare.detach()
        shared = SharedState(bare=True)
        # The handle of a regularized model already follows the forwards of the layers with methods.
        if any(candidate.site.module not in with_methods for candidate in chosen):
            shared.follow(self.model)
        for candidate in chosen:
            layer = with_methods.get(candidate.site.module)
            if layer is None:
                layer = FittedLayer(candidate.site, [], shared, candidate.adapter)
                layer.attach()
            self.sites.append(layer)

    @property
    def device(self) -> torch.device:
        """Return the device for collectives: that of the first parameter, or the CPU without parameters."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def layout(self, names: list[str], seen: dict[int, int]) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the shape of every possible figure, by site index and statistic.

        Shapes depend on the numbers of heads alone, so that all ranks have the same ones.

        Args:
            seen: the number of heads in the calls so far, by site index; a site without an entry has the number that
                its module declares.
        """
        places: dict[tuple[str, bool, int], Site] = {
            (layer.site.stack, layer.site.is_cross, layer.site.depth): layer.site for layer in self.sites
        }
        heads = {place: seen.get(site.index, site.heads or 0) for place, site in places.items()}
        return {
            site.index: {name: STATISTICS[name]().shape(heads[s, c, d], heads.get((s, c, d - 1), 0)) for name in names}
            for (s, c, d), site in places.items()
        }

    def leave(self) -> None:
        """Detach the bare layers and all observers; methods stay on the layers that have them."""
        for layer in self.sites:
            layer.armed, layer.observer = False, None
            if layer.shared.bare and layer.gate is None:
                layer.detach()
        self.sites = []


def _refuse_other_handles(
    model: nn.Module, chosen: list[Candidate], with_methods: dict[nn.Module, FittedLayer]
) -> None:
    """Raise ValueError if a chosen layer was regularized as part of another model, inside or around this one."""
    # A failed copy leaves layers without a module until they are garbage collected.
    others = {
        vars(layer.site).get("module") for layer in FittedLayer.live() if not layer.shared.bare
    } - with_methods.keys()
    if names := [candidate.site.name for candidate in chosen if candidate.site.module in others]:
        raise ValueError(
            f"{', '.join(names)} {'carries' if len(names) == 1 else 'carry'} methods, but this {type(model).__name__} "
            "is not the model that was regularized: watch the model that was passed to headwise.regularize, or "
            "regularize this one (where= chooses layers)"
        )


def handle_of(model: nn.Module) -> Regularized | None:
    """Return the handle of a model, or None if it was not regularized."""
    try:
        return handle(model)
    except ValueError:
        return None
