"""SigmaReparam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headwise.attend.core import Method, MethodState, Site
from headwise.attend.methods.reparametrization import LAYERS, put_on, refusal, spectrals, take_off
from headwise.attend.projections.spectral import Spectral, iterate_all
from headwise.attend.projections.spectral_group import computed_together
from headwise.attend.projections.together import WeightsOfForward, begin


class SigmaReparam(Method):
    """Replaces each q, k, v and o weight W by gamma / sigma(W)·W with a learned gamma.

    Zhai et al. 2023, arXiv 2303.06296.

    In training and evaluation. sigma is the largest singular value, estimated by one power iteration per optimizer step
    from the right singular vector, as in the authors' code; the q, k and v blocks of a fused matrix each have their own
    sigma and gamma. `init="current"` starts at gamma = sigma(W), so that nothing changes at first (the authors' PyTorch
    code; it suits trained models); `init="one"` starts at gamma = 1 (the paper). `layers="all"` also reparametrizes
    every other linear layer and convolution of the model, including MLP, patch embedding and head, as in the paper;
    attention layers left out by `where` stay plain, and so does a head that shares its matrix with the embedding.
    `layers="qk"` reparametrizes only the query and key weights, whose spectral norms bound the entropy. Folds into
    plain weights, bit for bit. gamma gets no weight decay and is in fp32 or wider.
    """

    init: str = "current"
    layers: str = "attention"

    neutral = {"init": "current"}
    strong = {"init": "one"}
    acts = "both"
    learns = True
    shapes = ()

    def check(self) -> None:
        self.choose("init", "current", "one")
        self.choose("layers", *LAYERS, "qk")

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "SigmaReparam")

    def build(self, site: Site, state: MethodState) -> None:
        put_on(site, state, "SigmaReparam", self.layers, lambda weight, blocks: Spectral(weight, blocks, self.init))

    def unbuild(self, site: Site, state: MethodState) -> None:
        take_off(state, folded=False)

    def fold(self, site: Site, state: MethodState) -> None:
        take_off(state, folded=True)

    def after_step(self, site: Site, state: MethodState) -> None:
        self.after_steps([(site, state)])

    def after_steps(self, fits: Sequence[tuple[Site, MethodState]]) -> None:
        iterate_all(spectrals(state for _, state in fits))

    def forward_begins(self, fits: Sequence[tuple[Site, MethodState]]) -> Callable[[], None]:
        members = spectrals(state for _, state in fits)
        return begin(WeightsOfForward(members, partial(computed_together, members)))
