"""Every method with two forms computes the same in both: values, penalties and gradients, on every kind of call."""

from __future__ import annotations

import itertools

import pytest
import torch
from grids import part_of_grid
from torch import Tensor

import headwise
from headwise.attend import methods as all_methods
from headwise.attend.attention import computation as attention
from headwise.attend.attention.matrix import ON_ROWS
from headwise.attend.core.call import Call
from headwise.attend.core.method import REGISTRY, TWINS, Method
from headwise.testing.calls import KINDS, B, D, H, T, assert_same_run, attend_with, run, tensors


@pytest.fixture(autouse=True)
def _matrix_free_forms_run_on_small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SMALL", dict.fromkeys(attention.SMALL, 0))


VARIANTS = [
    "DropAttention(p=0.4)",
    "DropAttention(p=0.5, window=3)",
    "DropAttention(p=0.5, detach_normalizer=True)",
    "DropAttention(p=0.5, unit='element')",
    "DropKey(p=0.5, unit='column')",
    "DropKey(p=0.2, unit='column', end_p=0.6)",
    "RelaxedAttention(gamma=0.3, support='all')",
    "RelaxedAttention(gamma=0.5, fuzziness=0.3)",
    "AttentionNormPenalty(strength=1000.0, per_map=True)",
    "EntropyPenalty(strength=1.0, target=0.9, band=0.1)",
    "EntropyPenalty(strength=10.0, head_mean=True)",
    "Decorrelation(strength=10.0, probes=5)",
    "Decorrelation(strength=10.0, rows=4)",
    "Disagreement(on='position', strength=1.0)",
    "Disagreement(on='position', strength=10.0, rows=4)",
    "EntropyPenalty(strength=10.0, rows=4)",
    "AttentionNormPenalty(strength=1000.0, rows=4)",
    "Disagreement(on='values', strength=1.0)",
    "Disagreement(on='output', strength=1.0, flatten=True)",
    "ReAttention(norm='none')",
    "DifferentialAttention(version=2)",
]


def build(text: str) -> Method:
    from headwise.attend.methods.text import parse

    return parse(text)[0]


def two_forms() -> list[Method]:
    classes = [cls for cls in REGISTRY.values() if cls.__module__.startswith("headwise.attend.methods")]
    found = [
        cls(**cls.strong)
        for cls in classes
        # Methods that read A only without its matrix are also read on the matrix.
        if any(cls.overrides(stage) and any(map(cls.overrides, twins)) for stage, twins in TWINS.items())
        or (cls.overrides("read_free") and cls.__name__ != "QKClip")
    ]
    return found + [build(text) for text in VARIANTS]


def acting_in_the_call() -> list[Method]:
    stages = ("inputs", "logits", "weights", "read", "read_free", "output")
    # Two act on the weights of a layer, which a call does not have; tests/methods/test_qk_clip.py cuts such a reading
    # into blocks.
    on_weights = ("QKClip", "QKRates")
    own = (
        cls
        for cls in REGISTRY.values()
        if cls.__module__.startswith("headwise.attend.methods") and cls.__name__ not in on_weights
    )
    found = [cls(**cls.strong) for cls in own]
    return [m for m in found + [build(text) for text in VARIANTS] if any(m.overrides(stage) for stage in stages)]


def compare(methods: list[Method], kind: str, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> set[str]:
    fast, textbook = (run(methods, kind, form, dtype, dropout=dropout) for form in ("fast", "textbook"))
    # For a query with one key XSA leaves only rounding errors, which the norm of differential attention amplifies.
    # A difference of differences leaves little too.
    names = sorted(type(method).__name__ for method in methods)
    worse = 10.0 if names in (["DifferentialAttention", "XSA"], ["DifferentialAttention"] * 2) else 1.0
    assert_same_run(fast, textbook, dtype, worse)
    return fast.kernels


def fused_expected(method: Method, kind: str) -> bool:
    text = repr(method)
    needs = ("detach_normalizer", "head_mean", '"position"', 'norm="batch"')
    if "rows=4" not in text and any(word in text for word in needs):
        return False
    if text == "Decorrelation(strength=1000.0)":
        return False
    if text.startswith(("StableSoftmax", "SoftCap", "Softpick")):
        # The kernels that edit logits run on CUDA; tests/kernels/test_triton_edited.py interprets them.
        return False
    if text.startswith("LinearAttention") and kind in ("left padded", "sliding", "bias"):
        # The visible keys differ between queries.
        return False
    if text.startswith("ForgettingAttention") and kind not in ("causal", "grouped", "sinks"):
        # A mask, or its absence, does not guarantee causality.
        return False
    return not (text.startswith("Temperature") and kind == "bias")


# Methods of self attention are refused on cross attention, and those without a softmax together with a sink.
WITH_A_MEANING = [
    (m, kind)
    for m in two_forms()
    for kind in KINDS
    if not (m.self_only and kind == "cross")
    and not (type(m).__name__ in ("LASER", "LinearAttention", "Softpick") and "sinks" in kind)
]


@pytest.mark.parametrize(
    ("method", "kind"), WITH_A_MEANING, ids=lambda part: part if isinstance(part, str) else repr(part)
)
def test_both_forms_agree(method: Method, kind: str) -> None:
    kernels = compare([method], kind)
    assert ("explicit" in kernels) != fused_expected(method, kind)


@pytest.mark.parametrize("kind", ["plain", "causal", "padded", "bias"])
@pytest.mark.parametrize("method", two_forms(), ids=repr)
def test_both_forms_agree_in_bf16(method: Method, kind: str) -> None:
    compare([method], kind, torch.bfloat16)


@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("method", two_forms(), ids=repr)
def test_both_forms_agree_under_host_dropout(method: Method, kind: str) -> None:
    kernels = compare([method], kind, dropout=0.3)
    if method.overrides("attend") and not method.commutes_with_dropout:
        assert kernels == {"explicit"}


def cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lower the limit above which the matrix is built in blocks; return the list of each block's queries."""
    sizes: list[int] = []
    block = Call.block

    def counted(call: Call, queries: slice) -> Call:
        sizes.append(queries.stop - queries.start)
        return block(call, queries)

    monkeypatch.setattr(attention, "WHOLE", 4 * B * H * T)
    monkeypatch.setattr(Call, "block", counted)
    return sizes


@pytest.mark.parametrize("kind", ["plain", "causal", "left padded", "bias"])
@pytest.mark.parametrize("method", acting_in_the_call(), ids=repr)
def test_blocks_of_queries_give_what_the_whole_matrix_gives(
    method: Method, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run([method], kind, "textbook")
    sizes = cut_into_blocks(monkeypatch)
    blocks = run([method], kind, "textbook")
    on_rows = any(map(method.overrides, ON_ROWS))
    assert bool(sizes) == (method.rowwise or not on_rows)
    assert_same_run(blocks, whole)


def on_rows() -> list[type[Method]]:
    classes = [cls for cls in REGISTRY.values() if cls.__module__.startswith("headwise.attend.methods")]
    return [cls for cls in classes if any(map(cls.overrides, ON_ROWS))]


@pytest.mark.parametrize("cls", on_rows(), ids=lambda cls: cls.__name__)
def test_every_method_of_the_package_that_sees_rows_says_whether_they_may_be_seen_apart(cls: type[Method]) -> None:
    assert "rowwise" in vars(cls)


@pytest.mark.parametrize("cls", [cls for cls in on_rows() if not cls.rowwise], ids=lambda cls: cls.__name__)
def test_a_method_that_is_not_rowwise_needs_its_rows_together(
    cls: type[Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run([cls(**cls.strong)], "causal", "textbook")
    cut_into_blocks(monkeypatch)
    monkeypatch.setattr(cls, "rowwise", True)
    try:
        blocks = run([cls(**cls.strong)], "causal", "textbook")
    except (RuntimeError, ValueError):
        return
    same = [
        torch.allclose(a, b, rtol=1e-3, atol=1e-5)
        for a, b in ((blocks.out, whole.out), (blocks.penalty, whole.penalty))
    ]
    assert not all(same)


def mixing_queries() -> dict[str, type[Method]]:
    """Return methods of a third party, written without knowledge of blocks."""

    class MixesWeights(Method):
        """Takes half of the mean over queries from the weights."""

        neutral = {}

        def weights(self, a: Tensor, call: Call) -> Tensor:
            return a - 0.5 * a.mean(-2, keepdim=True)

    class MixesLogits(Method):
        """Takes the mean over queries from the logits."""

        neutral = {}

        def logits(self, s: Tensor, call: Call) -> Tensor:
            return s - s.mean(-2, keepdim=True)

    class MixesReading(Method):
        """Penalises the mean weight of each key."""

        neutral = {}
        penalizes = True

        def read(self, a: Tensor, call: Call) -> None:
            call.penalize(self, a.mean(-2).square().sum(-1).sum(-1), per="sample")

    return {cls.__name__: REGISTRY.pop(cls.__name__) for cls in (MixesWeights, MixesLogits, MixesReading)}


@pytest.mark.parametrize("cls", mixing_queries().values(), ids=lambda cls: cls.__name__)
def test_a_strangers_method_that_mixes_queries_is_right_at_any_size(
    cls: type[Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, _ = tensors("plain", torch.float64)
    q, k, v = (inputs[name].double() for name in "qkv")
    s = q @ k.mT / D**0.5
    if cls.__name__ == "MixesLogits":
        s = s - s.mean(-2, keepdim=True)
    a = s.softmax(-1)
    penalty = a.mean(-2).square().sum(-1).sum(-1).mean()
    if cls.__name__ == "MixesWeights":
        a = a - 0.5 * a.mean(-2, keepdim=True)
    cut_into_blocks(monkeypatch)
    # With methods around it that may be computed in blocks.
    for methods in ([cls()], [build("ZLoss(strength=0.0)"), cls(), build("SoftCap(cap=1e5)")]):
        out, found = attend_with(methods, q, k, v)
        torch.testing.assert_close(out, a @ v, rtol=1e-8, atol=1e-8)
        if cls.__name__ == "MixesReading":
            torch.testing.assert_close(found.double(), penalty, rtol=1e-6, atol=0.0)


def sharing_a_stage() -> list[tuple[Method, Method]]:
    stages = ("inputs", "logits", "weights", "read", "output")
    methods = acting_in_the_call()
    return [
        (a, b)
        for a, b in itertools.permutations(methods, 2)
        if any(a.overrides(stage) and b.overrides(stage) for stage in stages)
    ]


@pytest.mark.parametrize("kind", part_of_grid(("causal", "padded"), ("padded",)))
@pytest.mark.parametrize("first", acting_in_the_call(), ids=repr)
def test_ordered_pairs_that_share_a_stage_agree(first: Method, kind: str) -> None:
    for a, b in sharing_a_stage():
        if a is first or repr(a) == repr(first):
            try:
                compare([a, b], kind)
            except AssertionError as error:
                raise AssertionError(f"{a!r} + {b!r} on a {kind} call: {error}") from error


@pytest.mark.parametrize(
    "method", [*(REGISTRY[name]() for name in all_methods.__all__), *map(build, VARIANTS)], ids=repr
)
def test_an_instance_holds_its_settings_and_nothing_else(method: Method) -> None:
    assert vars(method).keys() == method.settings().keys()


@pytest.mark.parametrize(
    ("text", "in_evaluation", "draws"),
    [
        ("RelaxedAttention(gamma=0.3)", False, False),
        ("RelaxedAttention(gamma=0.3, fuzziness=0.1)", False, True),
        ("RelaxedAttention(gamma=0.3, matched_inference=True)", True, False),
        ("Decorrelation()", False, False),
        ("Decorrelation(probes=3)", False, True),
        ("Decorrelation(rows=3)", False, True),
        ("EntropyPenalty(rows=3)", False, True),
        ("AttentionNormPenalty(rows=3)", False, True),
        ("Disagreement(on='position', rows=3)", False, True),
        ("DropHead()", False, True),
        ("NeuTRENO()", True, False),
    ],
)
def test_a_method_says_with_its_settings_when_it_acts_and_whether_it_draws(
    text: str, in_evaluation: bool, draws: bool
) -> None:
    method = build(text)
    assert method.acts_in(training=True)
    assert (method.acts_in(training=False), method.draws()) == (in_evaluation, draws)


def test_every_method_of_the_package_is_exported() -> None:
    classes = {name for name, cls in REGISTRY.items() if cls.__module__.startswith("headwise.attend.methods")}
    assert classes == set(all_methods.__all__)
    assert classes <= set(headwise.__all__)
