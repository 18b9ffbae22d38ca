"""QKClip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headwise.attend import projections
from headwise.attend.attention.largest_logits import largest_logits
from headwise.attend.core import Call, Method, MethodState, RowReadings, Site
from headwise.attend.projections import ProjectionError
from headwise.attend.projections.adapted import base_of
from headwise.attend.projections.block import Block
from headwise.attend.projections.spectral import Spectral

# The key in a module's `__dict__` under which the states of all sites that use its weights are stored.
SHARING = "_headwise_qk_clip"


class QKClip(Method):
    """Shrinks the query and key weights of heads whose largest logit passed a threshold in the step.

    Kimi K2, Moonshot AI 2025, arXiv 2507.20534.

    After the optimizer step: eta = min(1, threshold / S_max) per head, W_q *= eta^balance, W_k *= eta^(1 - balance),
    including biases. S_max is the exact maximum of the scaled logits q·k over allowed keys in the training forwards of
    the step, on all processes, without position biases and before a soft-cap; padded queries and keys do not count, nor
    do forwards in which it is not finite, and those of several that no backward went through, such as a skipped batch.
    Under grouped queries it is the maximum of the group. In latent attention (DeepSeek) W_UQ and W_UK of a head are
    scaled like W_q and W_k, its rotary W_QR *= eta, and W_KR, which all heads share, stays. In joint attention the
    weights for image and text tokens are scaled by the same factors. Hosts that normalise queries and keys are refused:
    their logits do not depend on the size of these weights.
    """

    threshold: float = 100.0
    balance: float = 0.5

    neutral = {"threshold": 1e30}
    strong = {"threshold": 0.01}
    rowwise = True
    maxima = ("largest",)

    def check(self) -> None:
        self.require(self.threshold > 0, f"threshold must be above 0, got {self.threshold}")
        self.require(0 <= self.balance <= 1, f"balance must lie in [0, 1], got {self.balance}")

    def refuse(self, site: Site) -> str | None:
        if site.qk_norm:
            return "would change nothing: the host normalises queries and keys itself"
        try:
            scaled = [block for block, power in _powers(site, self.balance) if power > 0]
        except ProjectionError as error:
            return str(error)
        frozen = next((block.frozen() for block in scaled if block.frozen()), "")
        if frozen:
            keys_alone = self.balance > 0 and not any(b.frozen() for b, power in _powers(site, 0.0) if power > 0)
            alternative = " QKClip(balance=0.0) writes keys alone." if keys_alone else ""
            return (
                f"would rewrite {frozen}, which is frozen (requires_grad=False), and an adapter alone cannot take the "
                f"factor: train it, or bound the logits with QKNorm, SoftCap or Temperature.{alternative}"
            )
        return None

    def build(self, site: Site, state: MethodState) -> None:
        powers = _powers(site, self.balance)
        for module in _modules(powers):
            for chain in getattr(module, "parametrizations", {}).values():
                if any(isinstance(part, Spectral) and part.gamma is None for part in chain):
                    raise ValueError(
                        f"QKClip shrinks the weights at {site.name}, whose size SpectralNorm fixes: use one of them"
                    )
        state.fill("largest", powers[0][0].heads, float("-inf"), written=True)
        for states in _sharing(powers):
            states.append(state)

    def unbuild(self, site: Site, state: MethodState) -> None:
        modules = _modules(_powers(site, self.balance))
        for module in modules:
            states = module.__dict__[SHARING]
            states[:] = [other for other in states if other is not state]
        for module in modules:
            if not module.__dict__[SHARING]:
                del module.__dict__[SHARING]

    def read_free(self, rows: RowReadings, call: Call) -> None:
        # The logits of the weights, without edits by other methods and without position biases, which scaling the
        # weights does not shrink.
        plain = call.query_block is None and (call.mask is None or call.mask.dtype == torch.bool)
        mask, causal = (call.mask, call.causal) if plain else (call.allowed(), False)
        largest = call.state(self).writable("largest")
        real = call.real_queries_at_hand()
        # Up to the threshold only that it was not passed counts, which the norms of queries and keys often show alone.
        now = largest_logits(call.q, call.k, mask, causal, call.scale, real, enough=self.threshold).amax(0)
        # A batch that overflows measures nothing, and a loop skips it: NaN would hide the other forwards' maxima, and
        # infinity would clip weights to 0.
        now = now.to(largest).nan_to_num(nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))
        # A maximum is correct for recomputed layers and for the passes of an accumulated step.
        largest.copy_(torch.maximum(largest, now))

    @classmethod
    def exchange(cls, states: Sequence[MethodState]) -> None:
        """Reduce the maxima of all layers over all processes, packed into one tensor."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        maxima = [state.tensor("largest") for state in states]
        packed = torch.cat([largest.float() for largest in maxima])
        torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX)
        for largest, reduced in zip(maxima, packed.split([x.numel() for x in maxima]), strict=True):
            largest.copy_(reduced)

    def after_step(self, site: Site, state: MethodState) -> None:
        # Layers that share these weights have a common maximum, and the first of them clips for all.
        powers = _powers(site, self.balance)
        sharers = list({id(other): other for states in _sharing(powers) for other in states}.values())
        largest = torch.stack([other.tensor("largest") for other in sharers]).amax(0).float()
        groups = largest.view(projections.of(site).kv_heads, -1).amax(1)
        eta = torch.where(groups > self.threshold, self.threshold / groups, torch.ones_like(groups))
        for block, power in powers:
            if power > 0:
                block.scale_(eta.repeat_interleave(block.heads // len(eta)) ** power)
        for other in sharers:
            other.tensor("largest").fill_(float("-inf"))


def clipped(site: Site) -> bool:
    """Return whether QKClip shrinks the weights of a site."""
    try:
        modules = _modules(_powers(site, 0.5))
    except ProjectionError:
        # QKClip refuses such a layer, unless it became one since
        modules = list(site.module.modules())
    return any(SHARING in module.__dict__ for module in modules)


def _powers(site: Site, balance: float) -> list[tuple[Block, float]]:
    """Return the blocks to be scaled, queries first, each with its power of a head's factor."""
    layer = projections.of(site)
    if not layer.latent:
        pairs = [stream.need("qk", "QKClip", of="rows") for stream in layer.streams()]
        return [part for query, key in pairs for part in ((query, balance), (key, 1 - balance))]
    powers = {"up_q": balance, "up_k": 1 - balance, "rotary_q": 1.0}
    parts = [(layer.latent[kind], power) for kind, power in powers.items() if kind in layer.latent]
    for block, _ in parts:
        if reason := block.unreadable():
            raise ProjectionError(f"QKClip needs the factors of latent attention; {block.where} {reason}")
    return parts


def _modules(powers: list[tuple[Block, float]]) -> list[nn.Module]:
    """Return the modules that compute a site's queries and keys, which are the blocks, without duplicates."""
    bases = [base_of(block.module) for block, _ in powers]
    return list({id(base): base for base in bases}.values())


def _sharing(powers: list[tuple[Block, float]]) -> list[list[MethodState]]:
    """Return, for each of these modules, the list of the states of all sites that use it."""
    return [module.__dict__.setdefault(SHARING, []) for module in _modules(powers)]
