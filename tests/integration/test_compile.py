"""torch.compile(fullgraph=True): one graph, the same numbers, no recompilation when a strength changes."""

import pytest
import torch
from grids import part_of_grid
from small_models import HOSTS, fresh
from torch._dynamo.testing import CompileCounterWithBackend

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

NAMES = list(shelf.__all__)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rewind(handle):
    handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})


# Every method on one host; one method of each kind of stage on the others, which route calls in their own ways.
KINDS = ["DropHead", "EntropyPenalty", "InputNoise", "NeuTRENO", "RelaxedAttention", "SigmaReparam"]


@pytest.mark.parametrize(
    ("name", "host"),
    part_of_grid(
        [(n, "own") for n in NAMES] + [(n, h) for h in ("llama", "torch") for n in KINDS],
        [("SigmaReparam", "own"), ("EntropyPenalty", "torch"), ("NeuTRENO", "llama")],
    ),
)
def test_one_graph_and_the_same_numbers_over_steps_with_a_changing_strength(name, host):
    cls = REGISTRY[name]
    model = fresh(HOSTS[host])
    method = cls(**cls.strong)
    handle = headwise.regularize(model, method, example=HOSTS[host].example())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    results = {}
    for kind, runner in (("eager", model), ("compiled", compiled)):
        rewind(handle)
        results[kind] = []
        for step in range(5):
            for field in method.live:
                start = getattr(method, field)
                handle.set(method, **{field: start * (1 - 0.1 * step)})
            out = HOSTS[host].run(runner)
            loss = out.square().mean() + handle.loss()
            grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
            results[kind].append((loss.detach(), [g for g in grads if g is not None]))
    assert counter.frame_count == 1, f"{name} on {host}: {counter.frame_count} graphs"
    for (a, ga), (b, gb) in zip(results["eager"], results["compiled"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert len(ga) == len(gb)
        for x, y in zip(ga, gb, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    if cls.random:
        losses = [float(a) for a, _ in results["compiled"]]
        assert len(set(losses)) == len(losses), "every step must draw anew"


@pytest.mark.grid
def test_noting_which_kernel_ran_costs_no_second_graph():
    """The note is written by the graph itself and changes with the first call: a graph that read it would be made
    again."""
    model = fresh(HOSTS["own"])
    handle = headwise.regularize(model, headwise.DropHead(p=0.4), headwise.RelaxedAttention(gamma=0.3))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert not any(f.kernels for f in handle.fitted)
    for _ in range(3):
        HOSTS["own"].run(compiled)
    assert counter.frame_count == 1
    assert all(f.kernels == {"fused"} for f in handle.fitted)


@pytest.mark.grid
def test_inductor_runs_random_and_carrying_methods():
    model = fresh(HOSTS["own"])
    handle = headwise.regularize(
        model, headwise.DropHead(p=0.4), headwise.NeuTRENO(strength=0.6), headwise.DropColumn(p=0.3)
    )
    eager = [HOSTS["own"].run(model).detach() for _ in range(2)]
    rewind(handle)
    compiled = torch.compile(model, fullgraph=True)
    for expected in eager:
        out = HOSTS["own"].run(compiled)
        out.sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
