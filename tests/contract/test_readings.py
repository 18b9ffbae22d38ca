"""What a method reads of the attention is what acts: beside every other stage, sinks, biases and blocks of queries."""

from __future__ import annotations

import pytest
import torch
from grids import part_of_grid
from torch import Tensor

from headwise.attend.attention import computation
from headwise.attend.core import RowReadings
from headwise.attend.core.method import REGISTRY, Method
from headwise.attend.methods.text import parse
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

B, H, T, D = 2, 4, 12, 8
SCALE, CAP = 0.4, 1.5
SINKS = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
ORDER = torch.ones(T, T, dtype=torch.bool).tril()
PADDED = (torch.arange(T) < torch.tensor([T, T - 4])[:, None])[:, None, None]
NEVER = -torch.inf


class ReadsRows(Method):
    """Penalises every figure of rows at once: the next reading that has no other form."""

    neutral = {}
    penalizes = True
    rowwise = True

    def read_free(self, rows: RowReadings, call) -> None:
        seen = rows.attend(torch.linspace(-1, 1, T, dtype=call.q.dtype)[:, None].expand(B, H, T, 8).contiguous())
        figures = rows.lse().square() + rows.entropy() + 3 * rows.sum_of_squares() + 5 * seen[..., 0].square()
        call.penalize(self, figures)


def wanted_of(name: str, s: Tensor, a: Tensor, real: Tensor) -> Tensor:
    """Return the penalty of a reader from the logits (B, H, T, N) that act and the weights they make."""
    lse, squares = s.logsumexp(-1), a.square().sum(-1)
    entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)
    mean_of_real = lambda x: (x.mean(1) * real).sum() / real.sum()
    if name == "ZLoss":
        return 0.5 * mean_of_real(lse.square())
    if name == "EntropyPenalty":
        return -2.0 * mean_of_real(entropy)
    if name == "AttentionNormPenalty":
        counts = real.sum(1)
        norms = (squares * real[:, None]).sum(2).sqrt() / (counts * counts)[:, None]
        return 100.0 * norms.mean()
    seen = a @ torch.linspace(-1, 1, T, dtype=a.dtype)
    return mean_of_real(lse.square() + entropy + 3 * squares + 5 * seen.square())


READERS = [
    "ZLoss(strength=0.5)",
    "EntropyPenalty(strength=2.0)",
    "AttentionNormPenalty(strength=100.0, per_map=True)",
    "ReadsRows()",
]

# Every kind of call: mask, causality, soft-cap, sinks.
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"mask": PADDED},
    "learned bias": {"bias": True},
    "sinks": {"sinks": SINKS, "causal": True},
    "padded sinks": {"sinks": SINKS, "mask": PADDED},
    "soft-cap": {"softcap": CAP},
    "soft-cap, sinks and learned bias": {"softcap": CAP, "sinks": SINKS, "bias": True},
}


def features(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def rescaled(s: Tensor, scaled: Tensor) -> Tensor:
    """Return masked logits s with other numbers where a key may be seen."""
    return torch.where(s == NEVER, s, scaled)


# What stands beside the reader, as dense formulas: of q and k, or of the masked logits.
OF_INPUTS = {
    "LSA()": lambda q, k, seen: (q / 1.7, k),
    "SSMax(scale=0.8)": lambda q, k, seen: (q * 0.8 * seen.sum(-1, keepdim=True).double().log(), k),
    'SymmetricAttention(keep="keys")': lambda q, k, seen: (k, k),
}
OF_LOGITS = {
    "Temperature(value=0.5)": lambda s, q, k: rescaled(s, s / 0.5),
    "SoftCap(cap=0.7)": lambda s, q, k: rescaled(s, 0.7 * (s / 0.7).tanh()),
    "LSA()": lambda s, q, k: s.masked_fill(
        torch.eye(T, dtype=torch.bool) & ((s > NEVER).sum(-1, keepdim=True) > 1), NEVER
    ),
    "LinearAttention()": lambda s, q, k: rescaled(s, (features(q) @ features(k).mT).log()),
}
OF_WEIGHTS = [
    "DropAttention(p=0.4)",
    "RelaxedAttention(gamma=0.3)",
    "DropHead(p=0.5)",
    "GFSA()",
    "ReAttention()",
    "NeuTRENO()",
    "XSA()",
    "LASER()",
]
DRAWN = ['DropKey(p=0.4, unit="column")', 'DropKey(p=0.4, unit="element")']
SINK = "AttentionSink(logit=2.0)"
NEIGHBOURS = ["", *dict.fromkeys([*OF_INPUTS, *OF_LOGITS, *OF_WEIGHTS, *DRAWN]), SINK]


def build(text: str) -> Method:
    return parse(text)[0]


def refused(kind: str, beside: str) -> bool:
    given = CALLS[kind]
    if beside == "LinearAttention()" and ("sinks" in given or "softcap" in given):
        return True
    return beside in (SINK, "LASER()") and "sinks" in given


def test_every_stage_of_a_call_stands_beside_the_readers() -> None:
    from headwise.attend.core.method import CALL_STAGES

    covered = {s for text in [*NEIGHBOURS[1:], *READERS] for s in CALL_STAGES if build(text).overrides(s)}
    assert covered == set(CALL_STAGES)


class Case:
    """One call with a reader and what stands beside it: fp64 tensors, the methods fitted, and the keys that a draw
    left."""

    def __init__(self, reader: str, beside: str, kind: str) -> None:
        self.reader, self.beside = reader, beside
        self.methods = [build(reader), *([build(beside)] if beside else [])]
        g = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(B, H, T, D, generator=g, dtype=torch.float64) for _ in range(3))
        self.given = dict(CALLS[kind])
        self.leaves = {"q": q, "k": k, "v": v}
        if self.given.pop("bias", False):
            self.leaves["bias"] = torch.randn(1, H, T, T, generator=g, dtype=torch.float64)
        for x in self.leaves.values():
            x.requires_grad_()
        site = standalone_site(q, k)
        self.fitted = fit_standalone(self.methods, site, first_values=torch.randn(B, H, T, D, generator=g).double())
        if beside == "LSA()":
            with torch.no_grad():
                self.fitted.states[1].tensor("temperature").fill_(1.7)

    def run(self, form: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the output, the penalty and the penalty's gradients."""
        x = self.leaves
        mask = x.get("bias", self.given.get("mask"))
        given = {key: value for key, value in self.given.items() if key != "mask"}
        out, penalty = attend_with(
            self.methods, x["q"], x["k"], x["v"], form=form, fitted=self.fitted, mask=mask, scale=SCALE, **given
        )
        grads = torch.autograd.grad(penalty, list(x.values()), allow_unused=True, retain_graph=True)
        return out.detach(), penalty.detach(), self.named(grads)

    def named(self, grads: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
        return {
            n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(self.leaves.items(), grads, strict=True)
        }

    def kept(self) -> Tensor | None:
        """Return the keys that the neighbour's draw left, asked for as the method itself asks."""
        if self.beside not in DRAWN:
            return None
        from headwise.attend.core.call import Call

        self.fitted.passes.recount(0)
        call = Call(self.fitted, *(self.leaves[n].detach() for n in "qkv"), mask=self.given.get("mask"), training=True,
                    causal=self.given.get("causal", False))  # fmt: skip
        return self.methods[1].logits(torch.zeros(B, H, T, T), call) == 0

    def dense(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the weights that act, the penalty and its gradients from the whole matrix in fp64."""
        x, given, name = self.leaves, self.given, self.beside
        seen = torch.ones(B, H, T, T, dtype=torch.bool)
        seen = seen & ORDER if given.get("causal") else seen
        seen = seen & given["mask"] if "mask" in given else seen
        q, k = OF_INPUTS[name](x["q"], x["k"], seen) if name in OF_INPUTS else (x["q"], x["k"])
        s = q @ k.mT * SCALE
        if "softcap" in given:
            s = CAP * (s / CAP).tanh()
        bias = x.get("bias", torch.zeros(()))
        s = (s + bias).masked_fill(~seen, NEVER)
        if name in OF_LOGITS:
            s = OF_LOGITS[name](s, q, k)
        if name == "LinearAttention()":
            s = s + bias
        if (kept := self.kept()) is not None:
            s = s.masked_fill(~kept, NEVER)
        sinks = torch.full((H,), 2.0, dtype=torch.float64) if name == SINK else given.get("sinks")
        column = (
            torch.full((B, H, T, 1), NEVER).double() if sinks is None else sinks.view(1, -1, 1, 1).expand(B, H, T, 1)
        )
        a = torch.cat([s, column], -1).softmax(-1)[..., :-1]
        real = seen.any(2).any(1) if "mask" in given else torch.ones(B, T, dtype=torch.bool)
        penalty = wanted_of(type(self.methods[0]).__name__, s, a, real)
        return a, penalty, self.named(torch.autograd.grad(penalty, list(x.values()), allow_unused=True))


def the_same(got: Tensor, wanted: Tensor, what: str) -> None:
    # Learned numbers of methods are fp32, so that an edit may bring their rounding in.
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-6, atol=2e-6, msg=lambda m: f"{what}: {m}")


WAYS = [(reader, kind, way) for reader in READERS for kind in CALLS for way in ("fast", "textbook", "blocks")]
# every call the fast way, and those with all that logits can have in the other two
EACH_WAY = part_of_grid(
    WAYS, [one for one in WAYS if one[2] == "fast" or one[1] in ("padded sinks", "soft-cap, sinks and learned bias")]
)


@pytest.mark.parametrize(("reader", "kind", "way"), EACH_WAY)
def test_a_reading_is_that_of_the_logits_that_act(
    reader: str, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "SMALL", dict.fromkeys(computation.SMALL, 0))
    if way == "blocks":
        monkeypatch.setattr(computation, "WHOLE", 5 * B * H * T)
    for beside in NEIGHBOURS:
        if refused(kind, beside):
            continue
        case = Case(reader, beside, kind)
        _, penalty, grads = case.run("fast" if way == "fast" else "textbook")
        _, wanted, wanted_grads = case.dense()
        the_same(penalty, wanted, f"penalty beside {beside}")
        for name, grad in wanted_grads.items():
            the_same(grads[name], grad, f"gradient of {name} beside {beside}")


@pytest.mark.parametrize(("reader", "kind", "way"), EACH_WAY)
def test_a_reading_leaves_the_output_as_it_is(
    reader: str, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "SMALL", dict.fromkeys(computation.SMALL, 0))
    if way == "blocks":
        monkeypatch.setattr(computation, "WHOLE", 5 * B * H * T)
    for beside in ["", *OF_INPUTS, *OF_LOGITS, SINK]:
        if refused(kind, beside):
            continue
        case = Case(reader, beside, kind)
        out = case.run("fast" if way == "fast" else "textbook")[0]
        the_same(out, (case.dense()[0] @ case.leaves["v"]).detach(), f"output beside {beside}")


def test_a_reader_that_declines_the_matrix_too_is_told_by_name() -> None:
    class Declines(Method):
        """Reads nothing anywhere."""

        neutral = {}

        def read_free(self, rows: RowReadings, call):
            return NotImplemented

    try:
        q = torch.randn(1, 2, 4, 8)
        with pytest.raises(TypeError, match=r"Declines.*read\(a, call\)"):
            attend_with([Declines()], q, q, q)
    finally:
        del REGISTRY["Declines"]
