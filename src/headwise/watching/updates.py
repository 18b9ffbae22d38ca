"""Updates: what the gradient and the optimizer's step do to each group of parameters, and to each head's queries and
keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.core.site import Site
from headwise.projections import ProjectionError
from headwise.projections import of as projections_of
from headwise.watching.figures import Figures
from headwise.watching.losses import LOSS_SPIKE, WHOLE, Spikes
from headwise.watching.stream import block_of
from headwise.watching.weights import OUTSIDE, still


def update_spectrum(q: Tensor, k: Tensor, q_after: Tensor, k_after: Tensor) -> Tensor:
    """Return the singular values (H, r), r = min(2d, C), of ΔW_qᵀW_k + W_qᵀΔW_k of each head, largest first.

    That is the first order of the change of W_qᵀW_k, with W_q and W_k as (d, C), head by head. It has rank 2d at most
    and is never formed: [ΔW_qᵀ W_qᵀ][W_kᵀ ΔW_kᵀ]ᵀ has the singular values of R_q R_kᵀ, the triangles of the QR factors
    of both.

    Args:
        q: queries' weights before the step, (H, d, C).
        k: keys' weights before the step, (G, d, C); G divides H.
        q_after: queries' weights after it.
        k_after: keys' weights after it.
    """
    repeat = q.shape[0] // k.shape[0]
    wide = torch.cat([q_after - q, q], 1).mT
    tall = torch.cat([k, k_after - k], 1).mT
    finite = wide.isfinite().all(-1).all(-1) & tall.isfinite().all(-1).all(-1).repeat_interleave(repeat)
    left = torch.linalg.qr(wide.nan_to_num(0.0, 0.0, 0.0), mode="r")[1]
    right = torch.linalg.qr(tall.nan_to_num(0.0, 0.0, 0.0), mode="r")[1].repeat_interleave(repeat, 0)
    values = torch.linalg.svdvals(left @ right.mT)
    return torch.where(finite[:, None], values, torch.nan)


def spectral_entropy(values: Tensor) -> Tensor:
    """Return −Σ p log p of p = σ/Σσ over the last dimension, in nats: 0 for rank one, log r where all r are equal.

    Roy and Vetterli 2007, whose effective rank is e to this power. NaN where all values are zero: nothing moved.
    """
    share = values / values.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)


GRADIENT_NORM, UPDATE_RATIO, UPDATE_ENTROPY = "gradient_norm", "update_ratio", "update_entropy"
GRADIENT_SPIKE = "gradient_spike"
OF_STEP = (GRADIENT_NORM, UPDATE_RATIO, UPDATE_ENTROPY, GRADIENT_SPIKE, LOSS_SPIKE)
# The site of a figure of the parameters that stand in no block.
REST = "outside"
SHARDED = "some of its parameters are sharded over processes, of which each holds a part"
STILL = "its parameters are zero, or did not move"
# Stands for nothing divided by nothing, which is no sign of a divergence as NaN is: no norm and no entropy is negative.
NOTHING = -1.0


@dataclass
class Group:
    """The trained parameters of one attention layer, of the rest of its block, or of what stands in no block."""

    name: str
    depth: int
    parameters: list[nn.Parameter] = field(default_factory=list)

    def sharded(self) -> bool:
        """Return whether this process holds a part of it alone."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.parameters)


def groups(model: nn.Module, sites: list[Site]) -> list[Group]:
    """Return the groups of a model's trained parameters: each attention layer, the rest of each block, and
    "outside"."""
    names = {module: name for name, module in model.named_modules()}
    made = [Group(site.name, site.depth) for site in sites]
    for site in sites:
        block = block_of(site, model)[0]
        if block is not None and all(names[block] != one.name for one in made):
            made.append(Group(names[block], site.depth))
    # the longest name first: an attention layer before the block it stands in
    ordered, rest = sorted(made, key=lambda one: -len(one.name)), Group(REST, OUTSIDE)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = next((one for one in ordered if name.startswith(f"{one.name}.") or not one.name), rest)
            own.parameters.append(parameter)
    return [one for one in [*made, rest] if one.parameters]


class Updates:
    """Reads gradients and parameters around a step of the optimizer; nothing waits for a device before `take`.

    Gradients are those that the optimizer gets: after accumulation, after a scaler's division, after clipping.

    Args:
        names: of these figures.
    """

    def __init__(self, model: nn.Module, sites: list[Site], names: Sequence[str]) -> None:
        self.names = [name for name in names if name in OF_STEP]
        self.missing: dict[str, str] = {}
        self._groups = groups(model, sites) if self.names else []
        self._blocks = self._query_key_blocks(model, sites)
        self._norms: dict[str, Tensor] = {}
        self._before: list[list[Tensor]] = []
        self._factors: dict[Site, tuple[Tensor, Tensor]] = {}
        self._ratios: dict[str, Tensor] = {}
        self._entropies: dict[Site, Tensor] = {}
        self._each: list[Tensor] = []
        self._spikes = Spikes()

    @property
    def every_step(self) -> bool:
        """Return whether gradients are looked at in every step."""
        return GRADIENT_SPIKE in self.names

    def _query_key_blocks(self, model: nn.Module, sites: list[Site]) -> list[Site]:
        found = []
        for site in sites if UPDATE_ENTROPY in self.names else ():
            try:
                with still(model):
                    q, k = projections_of(site).need("qk", "update_entropy", of="patches")
                if q.width != k.width:
                    raise ProjectionError("queries and keys are made of tokens of different widths")
                found.append(site)
            except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self.missing[f"{UPDATE_ENTROPY} of {site.name}"] = str(error).splitlines()[0]
        return found

    @torch.no_grad()
    def before(self, optimizer: Optimizer, armed: bool) -> None:
        """Look at the gradients, and where the step is read keep the parameters as they are before it."""
        if armed or self.every_step:
            norms = {one.name: norm for one in self._groups if (norm := self._gradient(one, optimizer)) is not None}
            self._norms = norms if armed and GRADIENT_NORM in self.names else {}
            if norms:
                device = next(iter(norms.values())).device
                whole = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms.values()]))
                if self._norms:
                    self._norms = {WHOLE: whole, **self._norms}
                if self.every_step:
                    self._each.append(whole)
        if armed and UPDATE_RATIO in self.names:
            self._before = [
                [] if one.sharded() else [p.detach().clone() for p in one.parameters] for one in self._groups
            ]
        if armed:
            self._factors = {site: self._query_key(site) for site in self._blocks}

    def _gradient(self, group: Group, optimizer: Optimizer) -> Tensor | None:
        if group.sharded():
            self.missing[f"{GRADIENT_NORM} of {group.name}"] = SHARDED
            return None
        found = [p.grad for p in group.parameters if p.grad is not None]
        if not found:
            return None
        norm = _norm([one.coalesce().values() if one.is_sparse else one for one in found])
        # a fused optimizer divides by the scaler's factor itself
        scale = getattr(optimizer, "grad_scale", None)
        return norm if scale is None else norm / scale

    @staticmethod
    def _query_key(site: Site) -> tuple[Tensor, Tensor]:
        found = projections_of(site)
        assert found.q is not None and found.k is not None
        with still(found.q.module, found.k.module):
            q, k = found.q.by_head(), found.k.by_head()
        return q.detach().clone(), k.detach().clone()

    @torch.no_grad()
    def waiting(self) -> list[Tensor]:
        """Return the numbers of the step that was read, where they lie, and forget the parameters that were kept."""
        self._entropies = {site: self._entropy(site, *factors) for site, factors in self._factors.items()}
        self._ratios = {}
        for group, before in zip(self._groups, self._before, strict=False):
            if not before:
                self.missing[f"{UPDATE_RATIO} of {group.name}"] = SHARDED
                continue
            moved = [p.detach().float() - old.float() for p, old in zip(group.parameters, before, strict=True)]
            size = _norm(before)
            self._ratios[group.name] = torch.where(size == 0, NOTHING, _norm(moved) / size)
        self._before, self._factors = [], {}
        return [*self._norms.values(), *self._ratios.values(), *self._entropies.values(), *self._each]

    def take(self, step: int, numbers: Iterator[Tensor]) -> list[Figures]:
        """Return the figures of the step that was read from what was `waiting`, brought to the CPU."""
        depth = {one.name: one.depth for one in self._groups} | {WHOLE: OUTSIDE}
        figures = [
            _figure(name, depth[name], step, statistic, next(numbers))
            for statistic, found in ((GRADIENT_NORM, self._norms), (UPDATE_RATIO, self._ratios))
            for name in found
        ]
        for site in self._entropies:
            figures.append(_figure(site.name, site.depth, step, UPDATE_ENTROPY, next(numbers), "head"))
        self._norms, self._ratios, self._entropies = {}, {}, {}
        told = [one for one in figures if len(one.missing) < len(one.values)]
        self.missing |= {f"{one.statistic} of {one.site}": STILL for one in figures if one not in told}
        return [*told, *self._spiked(step, [float(next(numbers)) for _ in self._each])]

    def _entropy(self, site: Site, q: Tensor, k: Tensor) -> Tensor:
        values = update_spectrum(q, k, *self._query_key(site))
        return torch.where(values.sum(-1) == 0, NOTHING, spectral_entropy(values))

    def _spiked(self, step: int, norms: list[float]) -> list[Figures]:
        """Return the largest deviation of the gradients' norms of the steps since the last that was read."""
        found = [one for one in self._spikes.add(norms) if one is not None]
        self._each.clear()
        if not found:
            return []
        largest = next((one for one in found if one != one), max(found))
        return [Figures(WHOLE, OUTSIDE, step, GRADIENT_SPIKE, "layer", array("d", [largest]), None, False)]


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all numbers of all tensors, summed in fp32 or better."""
    device = tensors[0].device
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.linalg.vector_norm(torch.stack([one.to(device) for one in torch._foreach_norm(tensors, 2, wide)]))


def _figure(site: str, depth: int, step: int, name: str, values: Tensor, per: str = "layer") -> Figures:
    numbers = array("d", values.double().flatten().tolist())
    missing = frozenset(place for place, one in enumerate(numbers) if one == NOTHING)
    return Figures(site, depth, step, name, per, numbers, None, False, missing)
