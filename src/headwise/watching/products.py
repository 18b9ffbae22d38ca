"""The size of W_QᵀW_K per head while a model trains, read where reading it cannot disturb the training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..call import Call
from ..projections import ProjectionError, Projections
from ..site import Site
from ..statistics.floor import largest_eigenvalue

NAME = "entropy_floor_spectral"


class Products:
    """Finds the query and key weights of the sites once, and their spectral norms at each reading."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._found: dict[Site, Projections | str] = {}

    def look(self, site: Site) -> None:
        """Find the weights of a site by name, or keep the reason why they were not found."""
        if not self.wanted or site.rope or site.qk_norm:
            return
        try:
            self._found[site] = site.projections()
        except (ProjectionError, RuntimeError, ValueError, TypeError) as error:
            self._found[site] = str(error).splitlines()[0]

    def of(self, call: Call) -> Tensor | str | None:
        """Give the spectral norms (H,) of a call's site, or why there are none."""
        found = self._found.get(call.site)
        if found is None or isinstance(found, str):
            return found
        q, k = found.q, found.k
        if q is None or k is None:
            return "; ".join(found.missing.values()) or "the query and key weights were not found"
        for block in (q, k):
            if parametrize.is_parametrized(block.module, block.name):
                return f"{block.where} is reparametrized, and reading it in training would run the reparametrization again"
            if block.bias() is not None or block.along:
                return "a bias is added to queries or keys"
        return spectral_norms(q.by_head(), k.by_head())


def spectral_norms(queries: Tensor, keys: Tensor) -> Tensor:
    """Give ‖W_KᵀW_Q‖₂ of each query head from (H, d, C) and (Hkv, d, C), with d×d matrices alone."""
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        queries, keys = queries.detach(), keys.detach()
        keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
        grams = [queries @ queries.mT, keys @ keys.mT]
        finite = torch.stack([gram.isfinite().all(-1).all(-1) for gram in grams]).all(0)
        query, key = (torch.where(finite[:, None, None], gram, 0.0) for gram in grams)
        values, vectors = torch.linalg.eigh(query)
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        return torch.where(finite, largest_eigenvalue(root.mT @ key @ root).clamp_min(0).sqrt(), torch.nan)
