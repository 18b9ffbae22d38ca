"""What a user chooses, and chooses wrongly: sites, statistics, rows, and the order of watch and regularize."""

import copy
import gc

import pytest
import torch
from grids import part_of_grid
from small_models import HOSTS, fresh

import headwise
from headwise.health.statistics import STATISTICS

VECTORS = torch.randn(6, 9, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_model_of_another_test_is_left():
    gc.collect()
    yield
    gc.collect()


def by_key(records):
    return {(r["site"], r["head"], r["step"], r["statistic"]): r["value"] for r in records}


def test_sampled_queries_give_intervals_around_the_whole_mean():
    x = torch.randn(2, 60, 32, generator=torch.Generator().manual_seed(2))
    found = {}
    for rows in (None, 20):
        model = fresh(HOSTS["own"])
        watch = headwise.watch(model, every=1, on_alert=None, rows=rows, statistics=["attention_entropy", "max_logit"])
        model(x)
        watch.step()
        found[rows] = watch.records()
    whole = by_key(found[None])
    entropies = [r for r in found[20] if r["statistic"] == "attention_entropy"]
    assert all(r["sampled"] and r["low"] < r["value"] < r["high"] for r in entropies)
    inside = [r["low"] <= whole[r["site"], r["head"], 0, "attention_entropy"] <= r["high"] for r in entropies]
    assert len(inside) >= 8
    assert sum(inside) >= 0.75 * len(inside)
    maxima = [r for r in found[20] if r["statistic"] == "max_logit"]
    assert all(r["sampled"] and "low" not in r for r in maxima)
    assert all(r["value"] <= whole[r["site"], r["head"], 0, "max_logit"] for r in maxima)


def test_micro_batches_and_ranks_draw_their_own_sample_of_queries(monkeypatch):
    x = torch.randn(2, 60, 32, generator=torch.Generator().manual_seed(2))

    def read(calls, rank=0):
        monkeypatch.setattr("headwise.health.watching.recorder.rank", lambda: rank)
        model = fresh(HOSTS["own"])
        watch = headwise.watch(model, every=1, on_alert=None, rows=8, statistics=["attention_entropy"])
        for _ in range(calls):
            model(x)
        watch.step()
        return [record["value"] for record in watch.records()]

    # The same batch twice: its mean changes where, and only where, other queries are drawn.
    assert read(1) == read(1)
    assert not set(read(2)) & set(read(1))
    assert not set(read(1, rank=1)) & set(read(1))


def test_what_is_asked_wrongly_is_refused_with_the_remedy():
    model, function = fresh(HOSTS["own"]), torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"There is no statistic 'entropy'.*Statistics: attention_entropy"):
        headwise.watch(model, statistics=["entropy"])
    with pytest.raises(ValueError, match="every must be at least 1 and rows at least 2, got every=0"):
        headwise.watch(model, every=0)
    with pytest.raises(TypeError, match=r'on_alert is "warn", "raise".*got 3'):
        headwise.watch(model, on_alert=3)
    with pytest.raises(TypeError, match=r"log=3 is not a log: pass the path of a file"):
        headwise.watch(model, log=[3])
    with pytest.raises(ValueError, match=r"There is no attention layer 'blocks.7'"):
        headwise.watch(model, where=["blocks.7"])
    assert torch.nn.functional.scaled_dot_product_attention is function
    headwise.watch(model)
    with pytest.raises(ValueError, match=r"blocks.0.attn is watched already: call remove\(\)"):
        headwise.watch(model)


def test_where_and_statistics_choose_what_is_read():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(
        model, every=1, on_alert=None, where=["blocks.1.attn"], statistics=["token_cosine", "sink_mass"]
    )
    model(VECTORS)
    watch.step()
    assert {r["site"] for r in watch.records()} == {"blocks.1.attn"}
    assert [r["head"] for r in watch.records()] == [None, 0, 1, 2, 3]
    assert set(STATISTICS) > {r["statistic"] for r in watch.records()} == {"token_cosine", "sink_mass"}


def test_a_step_without_a_training_forward_says_so():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None)
    with pytest.warns(
        headwise.health.watching.alerts.HealthWarning, match="no training forward of step 0 reached blocks.0.attn"
    ):
        watch.step()
    watch.step()


def test_watched_first_and_regularized_then_is_refused_with_the_order():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1)
    with pytest.raises(
        ValueError, match=r"is watched by headwise.watch: regularize first, then watch \(watch.remove\(\) now\)"
    ):
        headwise.regularize(model, headwise.DropHead(p=0.2))
    watch.remove()
    headwise.regularize(model, headwise.DropHead(p=0.2))
    with pytest.raises(ValueError, match=r"is regularized already with .*DropHead"):
        headwise.regularize(model, headwise.DropHead(p=0.2))


@pytest.mark.parametrize("name", part_of_grid(HOSTS, ("own", "llama-left-padded", "torch-dropout")))
def test_a_model_that_is_watched_alone_is_not_regularized(name):
    model = fresh(HOSTS[name])
    watch = headwise.watch(model, every=1)
    with pytest.raises(ValueError, match="is not regularized"):
        headwise.handle(model)
    watch.remove()


def test_a_part_of_a_watched_model_cannot_be_regularized():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1)
    with pytest.raises(ValueError, match=r"^blocks.0.attn is watched by headwise.watch"):
        headwise.regularize(model.blocks[0], headwise.DropHead(p=0.2))
    watch.remove()


def test_two_watches_share_no_site_and_the_refused_one_changes_nothing():
    model = fresh(HOSTS["own"])
    first = headwise.watch(model, every=1, on_alert=None, where=["blocks.0.attn"], statistics=["max_logit"])
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(ValueError, match=r"blocks.0.attn is watched already"):
        headwise.watch(model, every=1)
    assert len(model._forward_pre_hooks) == hooks
    second = headwise.watch(model, every=1, on_alert=None, where=["blocks.1.attn"], statistics=["max_logit"])
    model(VECTORS)
    for watch in (first, second):
        watch.step()
        assert watch.records()
        watch.remove()
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.parametrize(
    "name", part_of_grid([name for name in HOSTS if "dropout" not in name], ("own", "bert-padded", "torch"))
)
def test_the_copy_of_a_watched_model_can_be_regularized_and_watched(name):
    host = HOSTS[name]
    model = fresh(host)
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["max_logit"])
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    handle = headwise.regularize(twin, headwise.Temperature(value=0.25))
    assert not torch.equal(host.run(twin), host.run(model))
    handle.remove()
    again = headwise.watch(other, every=1, on_alert=None, statistics=["max_logit"])
    host.run(other)
    again.step()
    watch.step()
    assert by_key(again.records()) == by_key(watch.records())
    assert again.records()
    again.remove()
    watch.remove()
    for one in (twin, other, model):
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in one.modules())
        assert not any(m.__dict__.get("forward") for m in one.modules())
