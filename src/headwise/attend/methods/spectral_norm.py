"""SpectralNorm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headwise.attend.core import Method, MethodState, Site
from headwise.attend.methods.qk_clip import clipped
from headwise.attend.methods.reparametrization import LAYERS, put_on, refusal, spectrals, take_off
from headwise.attend.projections.spectral import Spectral, iterate_all
from headwise.attend.projections.spectral_group import computed_together
from headwise.attend.projections.together import WeightsOfForward, begin


class SpectralNorm(Method):
    """Replaces each q, k, v and o weight W by W / sigma(W).

    Miyato et al. 2018, arXiv 1802.05957; a baseline of Zhai et al. 2023, arXiv 2303.06296.

    In training and evaluation. sigma is the largest singular value, estimated by one power iteration per optimizer
    step; the q, k and v blocks of a fused matrix each have their own. Like `SigmaReparam` without its learned gain:
    every block has spectral norm 1 throughout. It cannot be combined with QKClip, which shrinks the weights of heads.
    `layers="all"` also reparametrizes every other linear layer and convolution of the model. Folds into plain weights,
    bit for bit.
    """

    layers: str = "attention"

    no_neutral = "a weight keeps its size only where its spectral norm is 1 already"
    acts = "both"
    learns = True
    shapes = ()

    def check(self) -> None:
        self.choose("layers", *LAYERS)

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "SpectralNorm")

    def build(self, site: Site, state: MethodState) -> None:
        if clipped(site):
            raise ValueError(
                f"SpectralNorm fixes the size of the weights at {site.name}, and QKClip shrinks it: use one of them"
            )
        put_on(site, state, "SpectralNorm", self.layers, lambda weight, blocks: Spectral(weight, blocks, None))

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
