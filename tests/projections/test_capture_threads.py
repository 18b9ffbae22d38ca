"""Captures of one thread leave the models of other threads alone, and each other."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise
from headwise.attend.attention import softmax
from headwise.attend.projections import capture, stand_ins


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert F.scaled_dot_product_attention is softmax.fused


class Attention(nn.Module):
    """One fused matrix, whose layout is found by a capture; `pause` is called in the middle of a forward."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.num_heads, self.pause = heads, lambda: None
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        self.pause()
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def stack(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Attention(), Attention())


def beside(work):
    """Return what `work` returns in another thread, which ends before this returns; its error is raised."""
    results, errors = [], []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def test_a_plain_model_in_another_thread_is_not_touched_while_a_capture_runs():
    ours, other, x = Attention(), stack(1), torch.randn(2, 5, 16)
    plain = other(x)
    found = []
    # In the middle of our module's forward, where the capture counts calls and edits outputs.
    ours.pause = lambda: found.append(beside(lambda: other(x)))
    with torch.no_grad(), capture.seen(ours, lambda out, _: out + 1e3) as calls:
        ours(x)
    assert len(calls) == 1
    assert torch.equal(found[0], plain)


def test_the_same_module_run_by_another_thread_is_not_counted():
    ours, x = Attention(), torch.randn(2, 5, 16)
    plain = ours(x)
    with torch.no_grad(), capture.seen(ours, lambda out, _: out * 0) as calls:
        assert torch.equal(beside(lambda: ours(x)), plain)
        assert not calls
        ours(x)
    assert len(calls) == 1


def test_captures_of_two_threads_do_not_meet_and_the_last_restores_the_function():
    first, second, x = Attention(), Attention(), torch.randn(2, 5, 16)
    outer, inner = capture.seen(first), capture.seen(second)
    with torch.no_grad():
        mine = outer.__enter__()
        theirs = beside(inner.__enter__)
        first(x)
        # The first capture ends before the second: the function is still needed.
        outer.__exit__(None, None, None)
        assert F.scaled_dot_product_attention is stand_ins.scaled_dot_product_attention
        beside(lambda: inner.__exit__(None, None, None))
    assert (len(mine), len(theirs)) == (1, 0)


@pytest.mark.parametrize("first", ["capture", "methods"])
def test_methods_that_are_fitted_while_a_capture_runs_stay_fitted(first):
    ours, other, x = Attention(), stack(1), torch.randn(2, 5, 16)
    plain = other(x)
    with torch.no_grad(), capture.seen(ours):
        handle = headwise.regularize(other, headwise.Temperature(value=0.2))
        if first == "methods":
            # They leave first, below the capture's stand-in.
            handle.remove()
            assert torch.equal(other(x), plain)
    if first == "capture":
        assert not torch.allclose(other(x), plain)
        handle.remove()
    assert torch.equal(other(x), plain)


def test_a_wrapper_of_another_library_stays_in_place():
    ours, x = Attention(), torch.randn(2, 5, 16)
    plain = F.scaled_dot_product_attention
    with torch.no_grad():
        for _ in range(2):
            with capture.seen(ours) as calls:
                below, count = F.scaled_dot_product_attention, []

                def wrapper(*args, below=below, count=count, **kwargs):
                    count.append(1)
                    return below(*args, **kwargs)

                F.scaled_dot_product_attention = wrapper
                ours(x)
            assert (len(calls), len(count)) == (1, 1)
            assert F.scaled_dot_product_attention is wrapper
            with capture.seen(ours) as calls:
                ours(x)
            assert (len(calls), len(count)) == (1, 2)
            F.scaled_dot_product_attention = plain
    with capture.seen(ours):
        pass


def test_transformers_interface_is_shown_to_one_thread_and_restored():
    from transformers import AttentionInterface, LlamaConfig, LlamaModel

    get_interface = AttentionInterface.get_interface
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    torch.manual_seed(0)
    models = [LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval() for _ in "ab"]
    ids = torch.arange(6)[None]
    with torch.no_grad():
        plain = models[1](input_ids=ids).last_hidden_state
        with capture.seen(models[0].layers[0].self_attn, lambda out, _: out + 1e3) as calls:
            other = beside(lambda: models[1](input_ids=ids).last_hidden_state)
            models[0](input_ids=ids)
    assert torch.equal(other, plain)
    # Keys as the interface gets them, before they are repeated.
    assert [call.k.shape[1] for call in calls] == [2]
    assert AttentionInterface.get_interface is get_interface


def test_threads_may_watch_and_audit_models_of_their_own_at_once():
    plain, x = stack(9), torch.randn(2, 5, 16)
    expected, wrong, ended = plain(x), [], threading.Event()

    def watches():
        for seed in range(6):
            own = stack(seed)
            watch = headwise.watch(own, every=1, on_alert=None)
            own(x).square().mean().backward()
            watch.step()
            if "spectral_norm_qk" not in {record["statistic"] for record in watch.records()}:
                wrong.append(f"no weights: {watch.report()}")
            watch.remove()

    def computes():
        while not ended.is_set():
            if not torch.equal(plain(x), expected):
                wrong.append("a plain model's output")

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                wrong.append(repr(error))

        return threading.Thread(target=run)

    busy, workers = guarded(computes), [guarded(watches) for _ in range(2)]
    for thread in (busy, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    ended.set()
    busy.join()
    assert not wrong
