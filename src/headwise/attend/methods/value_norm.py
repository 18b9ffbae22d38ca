"""ValueNorm."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.attention.head_rows import normalised_values
from headwise.attend.core import Call, Method, Site

# As in the configurations of Gemma 3n and Gemma 4.
EPS = 1e-6
# What hosts call a norm of their values.
NORMS = ("v_norm", "value_norm", "norm_v")


class ValueNorm(Method):
    """Normalises each head's values to unit root mean square, without a gain.

    Gemma 3n (Google 2025).

    v / √(mean(v²) + 1e-6) for each token and head, in training and evaluation: no token can write more than another,
    nor hide by a value near zero. Matrix-free: it edits the values. Hosts that normalise their values themselves are
    refused.
    """

    no_neutral = "normalised values differ from plain ones, and there is no gain"
    acts = "both"

    def refuse(self, site: Site) -> str | None:
        own = any(getattr(site.module, name, None) is not None for name in NORMS)
        return "would act twice: the host normalises values itself" if own else None

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, normalised_values(v, EPS)
