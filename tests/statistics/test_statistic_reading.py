import math
import weakref
from dataclasses import replace

import pytest
import statistic_definitions
import torch
import torch.nn.functional as F
from rounding import assert_same_to_rounding
from statistic_calls import reading
from statistic_definitions import Whole
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.health.statistics import STATISTICS, Queries, Reading, Tally, read, reasons
from headwise.health.statistics.reading import SiteFacts


def values(tallies):
    return {name: STATISTICS[name]().finish(tally) for name, tally in tallies.items()}


class PeakMemory(TorchDispatchMode):
    """Follows the bytes of all tensors that are alive."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor.untyped_storage())
        return out

    def follow(self, storage):
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, size):
        self.known.discard(key)
        self.now -= size


@pytest.mark.grid
@pytest.mark.parametrize("causal", [True, False])
def test_a_long_sequence_is_read_in_less_than_300_mib(causal):
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 16384, 32, generator=draw)
    here = Reading(q, k, v, causal=causal, hidden=v[0], output=v, product_norm=torch.ones(1))
    names = None if causal else ["attention_entropy", "max_logit", "attention_distance", "nonlocal_functional"]
    with PeakMemory() as memory:
        tallies = read(here, names, previous=here)
    assert 2 * 2**20 < memory.peak < 300 * 2**20, f"{memory.peak / 2**20:.0f} MiB"
    assert "attention_entropy" in tallies


def test_the_entropy_of_a_collapsed_head_is_right_where_the_naive_difference_loses_it():
    here = reading("collapsed")
    exact = Whole(here).entropy.mean((0, 2))
    found = values(read(here, ["attention_entropy"]))["attention_entropy"]
    assert Whole(here).logits.max() > 440
    assert exact.max() < 1.0
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)
    logits = (here.q @ here.k.mT * here.scale).bfloat16()
    lse = logits.float().logsumexp(-1).bfloat16()
    naive = (lse - (logits.softmax(-1) * logits).sum(-1)).float().mean((0, 2))
    assert (naive - exact).abs().max() > 0.05


def test_entropy_is_right_where_single_precision_cannot_tell_the_logits_apart():
    draw = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 2, 20, 16, generator=draw) * 40, torch.randn(2, 2, 20, 16, generator=draw) * 0.001
    k += q.mean((0, 2), keepdim=True) + 60
    q += 3000
    here = Reading(q, k, torch.randn(2, 2, 20, 16, generator=draw), scale=0.25)
    assert Whole(here).logits.max() > 300_000
    single = Whole(Reading(q, k, here.v, scale=0.25))
    rough = torch.softmax((q @ k.mT * 0.25), -1)
    exact = single.mean(single.entropy)
    assert ((-torch.special.xlogy(rough, rough)).sum(-1).mean((0, 2)) - exact).abs().max() > 1e-3
    torch.testing.assert_close(values(read(here))["attention_entropy"].double(), exact, rtol=1e-4, atol=1e-6)


def test_the_functional_keeps_its_digits_where_tokens_look_at_themselves_and_values_are_large():
    draw = torch.Generator().manual_seed(4)
    q = F.normalize(torch.randn(2, 3, 20, 16, generator=draw), dim=-1) * 12
    v = torch.randn(2, 3, 20, 16, generator=draw) * 100 + 1e4
    here = Reading(q, q, v)
    whole = Whole(here)
    exact = statistic_definitions.nonlocal_functional(whole, None)
    assert exact < 1e-4 * v.var(2).sum(-1).mean()
    torch.testing.assert_close(values(read(here))["nonlocal_functional"].double(), exact, rtol=1e-4, atol=1e-6)


def test_a_reading_keeps_no_gradients():
    call = reading("causal")
    q = call.q.clone().requires_grad_()
    tallies = read(Reading(q, call.k, call.v, causal=True), rows=8, generator=torch.Generator().manual_seed(0))
    assert not any(tally.total.requires_grad for tally in tallies.values())


def test_a_draw_of_queries_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    read(reading("plain"), rows=8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())


def test_half_precision_inputs_are_read_in_single_precision_under_autocast():
    call = reading("causal")
    halves = [t.bfloat16() for t in (call.q, call.k, call.v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = values(read(Reading(*halves, causal=True)))
    whole = values(read(Reading(*[t.float() for t in halves], causal=True)))
    for name in whole:
        torch.testing.assert_close(low[name], whole[name], rtol=1e-6, atol=1e-7)


def test_micro_batches_join_to_the_figure_of_the_whole_batch():
    names = [n for n in STATISTICS if n != "entropy_floor_spectral"]
    for kind in ("padded", "causal", "with sinks"):
        whole = reading(kind)
        fields = ("q", "k", "v", "mask", "hidden", "output", "real_queries")

        def part(cut, whole=whole, fields=fields):
            cuts = {f: getattr(whole, f)[cut] for f in fields if getattr(whole, f) is not None}
            return Reading(**cuts, causal=whole.causal, sinks=whole.sinks)

        first, second = read(part(slice(0, 1)), names), read(part(slice(1, 3)), names)
        joined = values({name: first[name].add(second[name]) for name in first})
        for name, value in values(read(whole, names)).items():
            if name in joined:
                torch.testing.assert_close(joined[name], value, rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")


@pytest.mark.parametrize("kind", ["causal", "padded", "left padded causal", "sliding"])
def test_sampled_means_are_unbiased_and_their_intervals_hold(kind):
    call = reading(kind)
    names = ["attention_entropy", "entropy_share", "peaked_rows", "attention_distance", "entropy_floor_centred"]
    exact = values(read(call, names))
    draws, inside, sums = 300, dict.fromkeys(names, 0), {name: [] for name in names}
    for seed in range(draws):
        tallies = read(call, names, rows=9, generator=torch.Generator().manual_seed(seed))
        for name, tally in tallies.items():
            value, margin = tally.value(), tally.margin()
            assert tally.sampled
            sums[name].append(value)
            inside[name] += float(((value - exact[name]).abs() <= margin + 1e-6).float().mean())
    for name in names:
        found = torch.stack(sums[name])
        error = found.std(0) / math.sqrt(draws)
        assert ((found.mean(0) - exact[name]).abs() <= 4 * error + 1e-5).all(), name
        assert found.std(0).max() > 0, name
        if name != "peaked_rows":
            assert 0.8 < inside[name] / draws <= 1.0, (name, inside[name] / draws)


@pytest.mark.bits
def test_a_sample_of_all_queries_is_the_whole():
    call = reading("padded")
    sampled = values(read(call, rows=37))
    for name, value in values(read(call)).items():
        assert_same_to_rounding(sampled[name], value)


@pytest.mark.parametrize(
    "kind", ["plain", "causal", "padded", "left padded", "grouped", "soft capped", "with sinks", "biased"]
)
def test_sampled_rows_have_the_figures_of_their_rows(kind):
    call = reading(kind)
    from headwise.health.statistics import RowFigures

    needs = ("top", "entropy", "peak", "distance", "roughness", "centred")
    whole = RowFigures(call, needs)
    part = RowFigures(call, needs, Queries.of(call, 11, torch.Generator().manual_seed(5)))
    index = part.queries.positions[:, None].expand(-1, call.heads, -1)
    valid = part.queries.valid.expand(-1, call.heads, -1) > 0
    assert valid.sum() > 20
    for name in needs:
        expected = getattr(whole, name).gather(2, index)
        torch.testing.assert_close(getattr(part, name)[valid], expected[valid], rtol=1e-5, atol=1e-6, msg=name)


def test_extrema_and_ratios_of_a_sample_are_marked_and_the_bound_is_whole():
    tallies = read(reading("causal"), rows=9)
    marked = {name for name, tally in tallies.items() if tally.sampled}
    assert {"max_logit", "lowest_entropy", "sink_mass", "head_redundancy", "attention_entropy"} <= marked
    assert not {"logit_bound", "token_cosine", "high_frequency", "output_norm"} & marked
    assert tallies["max_logit"].margin() is None


def test_what_has_no_meaning_is_said_with_a_reason():
    cross = reasons(reading("cross").facts())
    assert "different tokens" in cross["nonlocal_functional"]
    assert "no layer before" in cross["layer_redundancy"]
    assert "one head" in reasons(SiteFacts(heads=1))["head_redundancy"]
    facts = SiteFacts(
        heads=4, hidden=True, product_norm=True, product_obstacle="rotary positions turn queries and keys"
    )
    assert "rotary" in reasons(facts)["entropy_floor_spectral"]
    assert "bias" in reasons(facts._replace(product_obstacle=None, bias=True))["entropy_floor_spectral"]
    assert "entropy_floor_spectral" not in reasons(facts._replace(product_obstacle=None))


def test_padding_that_holds_nan_does_not_reach_any_figure():
    call = reading("padded")
    clean = values(read(call))
    hidden, output = call.hidden.clone(), call.output.clone()
    hidden[~call.real_queries] = torch.nan
    output.transpose(1, 2)[~call.real_queries] = torch.nan
    q = call.q.clone()
    q.transpose(1, 2)[~call.real_queries] = torch.nan
    dirty = Reading(
        q,
        call.k,
        call.v,
        call.mask,
        hidden=hidden,
        output=output,
        real_queries=call.real_queries,
        product_norm=call.product_norm,
    )
    found = values(read(dirty, [n for n in clean if n not in ("nonlocal_functional",)]))
    for name, value in found.items():
        torch.testing.assert_close(value, clean[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_diverged_layer_is_read_as_nan_and_stops_nothing():
    call = reading("causal")
    broken = Reading(
        call.q * torch.nan,
        call.k,
        call.v,
        causal=True,
        hidden=call.hidden * torch.nan,
        output=call.output,
        product_norm=call.product_norm,
    )
    found = values(read(broken))
    for name in ("attention_entropy", "max_logit", "sink_mass", "token_cosine", "entropy_floor_spectral"):
        assert found[name].isnan().all(), name
    assert found["output_norm"].isfinite().all()


def test_a_reading_refuses_shapes_that_do_not_fit():
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(ValueError, match=r"4 query heads cannot share 3 key heads"):
        Reading(q, torch.zeros(1, 3, 5, 8), torch.zeros(1, 3, 5, 8))
    with pytest.raises(ValueError, match=r"q \(B,H,T,d\).*\(4, 5, 8\)"):
        Reading(q[0], q, q)


def test_extrema_join_as_extrema():
    low, high = Tally.extremum(torch.tensor([1.0]), "max", False), Tally.extremum(torch.tensor([3.0]), "max", True)
    assert float(low.add(high).value()) == 3.0
    assert low.add(high).sampled
    assert (
        float(
            Tally.extremum(torch.tensor([1.0]), "min", False)
            .add(Tally.extremum(torch.tensor([3.0]), "min", False))
            .value()
        )
        == 1.0
    )


@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_every_statistic_says_what_it_is(name):
    statistic = STATISTICS[name]
    assert statistic.name == name
    assert statistic.unit and statistic.reduction
    assert statistic.per in ("head", "layer")
    first = (statistic.__doc__ or "").strip().splitlines()[0]
    assert first.split()[0].rstrip(".:,").endswith("s"), f"{first!r} does not begin with a verb"
    assert statistic.worse in ("high", "low", None)


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_a_layer_counts_queries_and_keys_once_with_the_layer_before(name):
    before, alone, together = (reading(name, seed) for seed in (1, 2, 2))
    together.share_counts(before)
    found = [read(before), read(alone), read(together)][1:]
    for wanted, shared in zip(*(values(tallies).values() for tallies in found), strict=True):
        assert torch.equal(wanted.nan_to_num(), shared.nan_to_num())
    assert Queries.of(together) is Queries.of(before)
    assert together.keys_unseen is before.keys_unseen
    assert Queries.of(alone) is not Queries.of(before)


def test_layers_with_masks_padding_or_another_order_count_by_themselves():
    plain = reading("plain", 1)
    for name in ("padded", "causal", "left padded"):
        other = reading(name, 2)
        other.share_counts(plain)
        plain.share_counts(other)
        assert other.counts is not plain.counts


def test_later_tokens_of_a_call_find_its_counts():
    here = reading("padded", 1)
    queries = Queries.of(here)
    assert Queries.of(here.with_tokens(final=here.stream)) is queries
    assert Queries.of(replace(here, mask=None, real_queries=None)) is not queries
