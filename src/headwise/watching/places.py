"""Places: the sites that are watched, those that carry methods as they are and the others bare."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise import hosts
from headwise.attention.fitted_layer import FittedLayer, bare_layers, live_layers
from headwise.core.shared_state import SharedState
from headwise.core.site import Site
from headwise.hosts.layers.candidate import Candidate
from headwise.regularizing.handle import Regularized, handle
from headwise.regularizing.plan import Where, no_site, selection
from headwise.statistics import STATISTICS


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's or distributed training's wrappers."""
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
    """Stands at the chosen sites of a model, and leaves them as they were.

    Raises:
        ValueError: where a site asked for cannot be reached or is watched already, or none is left; nothing was changed
            then.
    """

    def __init__(self, model: nn.Module, where: Where) -> None:
        self.model = unwrapped(model)
        self.regularized = regularized = _handle(self.model)
        found = hosts.find(self.model) if regularized is None else regularized.found
        chosen = _chosen(self.model, found, where)
        # whatever `where` leaves out belongs to the whole model
        self.all_sites = [one.site for one in found if one.adapter is not None]
        carrying = {} if regularized is None else {fitted.site.module: fitted for fitted in regularized.fitted}
        known = bare_layers(self.model) | carrying
        for one in chosen:
            if (site := known.get(one.site.module)) is not None and site.observer is not None:
                raise ValueError(f"{one.site.name} is watched already: call remove() on the other watch first")
        _refuse_other_handles(self.model, chosen, carrying)
        self.sites: list[FittedLayer] = []
        try:
            self._stand(chosen, carrying)
        except BaseException:
            self.leave()
            raise

    def _stand(self, chosen: list[Candidate], carrying: dict[nn.Module, FittedLayer]) -> None:
        # A copy of a watched model carries bare layers that nobody reads: they give way.
        for bare in bare_layers(self.model).values():
            if bare.observer is None:
                bare.detach()
        shared = SharedState(bare=True)
        # A layer with methods follows the forwards through its handle.
        if any(one.site.module not in carrying for one in chosen):
            shared.follow(self.model)
        for one in chosen:
            layer = carrying.get(one.site.module)
            if layer is None:
                layer = FittedLayer(one.site, [], shared, one.adapter)
                layer.attach()
            self.sites.append(layer)

    @property
    def device(self) -> torch.device:
        """Return the device that collectives of this model run on."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def layout(self, names: list[str], seen: dict[int, int]) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return the shape of every figure that may be read, from heads alone: the same on all ranks.

        Args:
            seen: the heads that calls showed, by the site's index; else what the module declares counts.
        """
        places: dict[tuple[str, bool, int], Site] = {
            (one.site.stack, one.site.is_cross, one.site.depth): one.site for one in self.sites
        }
        heads = {place: seen.get(site.index, site.heads or 0) for place, site in places.items()}
        return {
            site.index: {name: STATISTICS[name]().shape(heads[s, c, d], heads.get((s, c, d - 1), 0)) for name in names}
            for (s, c, d), site in places.items()
        }

    def leave(self) -> None:
        """Take away what was added; methods stay, and a handle that was removed before took its own sites along."""
        for one in self.sites:
            one.armed, one.observer = False, None
            if one.shared.bare:
                one.detach()
        self.sites = []


def _refuse_other_handles(model: nn.Module, chosen: list[Candidate], carrying: dict[nn.Module, FittedLayer]) -> None:
    """Raise ValueError where a layer carries the methods of a part of the model, or of a whole around it."""
    # A copy that failed half-way leaves layers without a module until it is collected.
    others = {vars(layer.site).get("module") for layer in live_layers() if not layer.shared.bare} - carrying.keys()
    if lost := [one.site.name for one in chosen if one.site.module in others]:
        raise ValueError(
            f"{', '.join(lost)} {'carries' if len(lost) == 1 else 'carry'} methods, and this {type(model).__name__} is "
            "not what was regularized: watch what headwise.regularize was given, or give it this model (where= "
            "chooses layers)"
        )


def _handle(model: nn.Module) -> Regularized | None:
    try:
        return handle(model)
    except ValueError:
        return None


def _chosen(model: nn.Module, found: list[Candidate], where: Where) -> list[Candidate]:
    if all(one.adapter is None for one in found):
        raise ValueError(no_site(model, found))
    wanted, named = selection(where, found)
    lost = [f"{f.site.name} cannot be reached: {f.reason}" for f in found if f.adapter is None and f.site.name in named]
    if lost:
        raise ValueError("\n".join(lost))
    taken = [one for one in found if one.adapter is not None and wanted(one.site)]
    if not taken:
        raise ValueError("where= leaves no attention layer to watch")
    return taken
