"""Figures of the gradients and updates of each group of parameters and of each head's queries and keys."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.attend import Site
from headwise.attend.projections import ProjectionError, still
from headwise.attend.projections import of as projections_of
from headwise.borders import norms_of
from headwise.health.watching.figures import Figures
from headwise.health.watching.losses import LOSS_SPIKE, WHOLE, Spikes
from headwise.health.watching.stream import block_of
from headwise.health.watching.weights import OUTSIDE


def update_spectrum(q: Tensor, k: Tensor, q_after: Tensor, k_after: Tensor) -> Tensor:
    """Return the singular values (H, r), r = min(2d, C), of ΔW_qᵀW_k + W_qᵀΔW_k of each head, largest first.

    This is the first-order change of W_qᵀW_k of a head, for W_q (H, d, C) and W_k (G, d, C) before and after a step; G
    divides H. Its rank is at most 2d, and it is never formed: [ΔW_qᵀ W_qᵀ][W_kᵀ ΔW_kᵀ]ᵀ has the singular values of R_q
    R_kᵀ, with the triangular QR factors R_q and R_k of its two factors.
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
    """Return −Σ p log p of p = σ/Σσ over the last dimension, in nats: 0 for rank one, log r for r equal values.

    It is NaN if all values are zero. The effective rank of Roy and Vetterli 2007 is e to the power of this entropy.
    """
    share = values / values.sum(-1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(-1)


def stable_rank(values: Tensor) -> Tensor:
    """Return Σσ² / σ₁² over the last dimension, with the largest value first: 1 for rank one, r for r equal values.

    It is NaN if all values are zero. Rudelson and Vershynin 2007, arXiv math/0503442.
    """
    return (values / values[..., :1]).square().sum(-1)


GRADIENT_NORM, UPDATE_RATIO, UPDATE_ENTROPY = "gradient_norm", "update_ratio", "update_entropy"
GRADIENT_SPIKE, UPDATE_NORM, UPDATE_RANK = "gradient_spike", "update_norm", "update_rank"
OF_STEP = (GRADIENT_NORM, UPDATE_RATIO, UPDATE_ENTROPY, UPDATE_NORM, UPDATE_RANK, GRADIENT_SPIKE, LOSS_SPIKE)
# What is read of the singular values (H, r) of each head's change of W_qᵀW_k.
OF_SPECTRUM: dict[str, Callable[[Tensor], Tensor]] = {
    UPDATE_ENTROPY: spectral_entropy,
    UPDATE_NORM: lambda values: values[:, 0],
    UPDATE_RANK: stable_rank,
}
# The site of a figure of the parameters outside all blocks.
REST = "outside"
SHARDED = "some of its parameters are sharded over processes, and each process has only a part of them"
STILL = "its parameters are zero, or did not change"
# Replaces the result of 0/0, because NaN means a divergence; no norm and no entropy is negative.
NOTHING = -1.0


@dataclass
class TrainedPart:
    """Trained parameters of one attention layer, of the rest of its block, or of everything outside the blocks."""

    name: str
    depth: int
    parameters: list[nn.Parameter] = field(default_factory=list)

    def sharded(self) -> bool:
        """Return whether this process has only a part of some parameter."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.parameters)


def groups(model: nn.Module, sites: list[Site]) -> list[TrainedPart]:
    """Return the groups of a model's trained parameters: each attention layer, the rest of each block, and "outside".

    Groups without trained parameters are left out.
    """
    names = {module: name for name, module in model.named_modules()}
    enclosed = [TrainedPart(site.name, site.depth) for site in sites]
    for site in sites:
        block = block_of(site, model)[0]
        if block is not None and all(names[block] != group.name for group in enclosed):
            enclosed.append(TrainedPart(names[block], site.depth))
    # Longest names first, so that an attention layer comes before its block.
    ordered, rest = sorted(enclosed, key=lambda group: -len(group.name)), TrainedPart(REST, OUTSIDE)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner = next((group for group in ordered if name.startswith(f"{group.name}.") or not group.name), rest)
            owner.parameters.append(parameter)
    return [group for group in [*enclosed, rest] if group.parameters]


class Updates:
    """Reader of gradients and parameters around an optimizer's step; nothing waits for a device before `take`.

    Gradients are those that the optimizer uses: after accumulation, unscaling and clipping.
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
        self._of_heads: list[tuple[Site, str, Tensor]] = []
        self._each: list[Tensor] = []
        self._spikes = Spikes()

    @property
    def every_step(self) -> bool:
        """Return whether gradients are read at every step."""
        return GRADIENT_SPIKE in self.names

    @property
    def _spectral(self) -> list[str]:
        return [name for name in OF_SPECTRUM if name in self.names]

    def _not_read(self, site: Site, reason: str) -> None:
        self.missing |= {f"{name} of {site.name}": reason for name in self._spectral}

    def _query_key_blocks(self, model: nn.Module, sites: list[Site]) -> list[Site]:
        blocks = []
        for site in sites if self._spectral else ():
            try:
                with still(model):
                    q, k = projections_of(site).need("qk", self._spectral[0], of="patches")
                if q.width != k.width:
                    raise ProjectionError("queries and keys are projections of tokens of different widths")
                blocks.append(site)
            except (ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self._not_read(site, str(error).splitlines()[0])
        return blocks

    @torch.no_grad()
    def before(self, optimizer: Optimizer, armed: bool) -> None:
        """Read the gradients and, if the step is `armed` for a reading, copy the parameters before it."""
        if armed or self.every_step:
            norms = {g.name: norm for g in self._groups if (norm := self._gradient_norm(g, optimizer)) is not None}
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
                [] if group.sharded() else [p.detach().clone() for p in group.parameters] for group in self._groups
            ]
        if armed:
            self._factors = {}
            for site in self._blocks:
                try:
                    self._factors[site] = self._query_key(site)
                except ProjectionError as error:
                    self._not_read(site, str(error))

    def _gradient_norm(self, group: TrainedPart, optimizer: Optimizer) -> Tensor | None:
        if group.sharded():
            self.missing[f"{GRADIENT_NORM} of {group.name}"] = SHARDED
            return None
        gradients = [p.grad for p in group.parameters if p.grad is not None]
        if not gradients:
            return None
        norm = _norm([gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients])
        # A fused optimizer divides by the scaler's factor itself.
        scale = getattr(optimizer, "grad_scale", None)
        return norm if scale is None else norm / scale

    @staticmethod
    def _query_key(site: Site) -> tuple[Tensor, Tensor]:
        parts = projections_of(site)
        assert parts.q is not None and parts.k is not None
        with still(parts.q.module, parts.k.module):
            q, k = parts.q.by_head(), parts.k.by_head()
        return q.detach().clone(), k.detach().clone()

    @torch.no_grad()
    def waiting(self) -> list[Tensor]:
        """Return the values of the step that was read, on their devices, and release the copied parameters."""
        self._of_heads = [found for site, factors in self._factors.items() for found in self._spectrum(site, *factors)]
        self._ratios = {}
        for group, before in zip(self._groups, self._before, strict=False):
            if not before:
                self.missing[f"{UPDATE_RATIO} of {group.name}"] = SHARDED
                continue
            moved = [p.detach().float() - old.float() for p, old in zip(group.parameters, before, strict=True)]
            size = _norm(before)
            self._ratios[group.name] = torch.where(size == 0, NOTHING, _norm(moved) / size)
        self._before, self._factors = [], {}
        of_heads = (values for _, _, values in self._of_heads)
        return [*self._norms.values(), *self._ratios.values(), *of_heads, *self._each]

    def take(self, step: int, numbers: Iterator[Tensor]) -> list[Figures]:
        """Return the figures of the step that was read, from the tensors that `waiting` returned, on the CPU."""
        depth = {group.name: group.depth for group in self._groups} | {WHOLE: OUTSIDE}
        figures = [
            _figure(name, depth[name], step, statistic, next(numbers))
            for statistic, by_group in ((GRADIENT_NORM, self._norms), (UPDATE_RATIO, self._ratios))
            for name in by_group
        ]
        for site, name, _ in self._of_heads:
            figures.append(_figure(site.name, site.depth, step, name, next(numbers), "head"))
        self._norms, self._ratios, self._of_heads = {}, {}, []
        complete = [figure for figure in figures if len(figure.missing) < len(figure.values)]
        self.missing |= {f"{figure.statistic} of {figure.site}": STILL for figure in figures if figure not in complete}
        return [*complete, *self._largest_spike(step, [float(next(numbers)) for _ in self._each])]

    def _spectrum(self, site: Site, q: Tensor, k: Tensor) -> list[tuple[Site, str, Tensor]]:
        """Return the figures (H,) of the change of each head's W_qᵀW_k, by name."""
        values = update_spectrum(q, k, *self._query_key(site))
        still_stands = values.sum(-1) == 0
        return [(site, name, torch.where(still_stands, NOTHING, OF_SPECTRUM[name](values))) for name in self._spectral]

    def _largest_spike(self, step: int, norms: list[float]) -> list[Figures]:
        """Return the largest deviation of the gradient norms of all steps since the last reading."""
        deviations = [deviation for deviation in self._spikes.add(norms) if deviation is not None]
        self._each.clear()
        return Figures.largest(WHOLE, OUTSIDE, step, GRADIENT_SPIKE, deviations)


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all elements of all tensors, computed in fp32 or fp64."""
    device = tensors[0].device
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms_of(tensors, wide)]))


def _figure(site: str, depth: int, step: int, name: str, values: Tensor, per: str = "layer") -> Figures:
    numbers = array("d", values.double().flatten().tolist())
    missing = frozenset(head for head, number in enumerate(numbers) if number == NOTHING)
    return Figures(site, depth, step, name, per, numbers, None, False, missing)
