"""Compiled models: one graph, none again while strengths change, the same numbers as in eager mode."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from grids import part_of_grid
from own_models import CausalAttention, GroupsOfTheirOwn, SelfAttention, stack, tokens
from tiny_timm import WHOLE, images, made

import headwise
from headwise.attend.attention import softmax
from headwise.attend.hosts.sdpa import open_sites


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    assert open_sites.current.top is None
    assert F.scaled_dot_product_attention is softmax.fused


def graphs():
    """Return how many graphs were compiled since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


ACTING = "DropHead(p=0.2) + RelaxedAttention(gamma=0.1)"
CASES = {
    "own": (
        lambda: stack(SelfAttention),
        tokens,
        "DropHead(p=0.2) + DropKey(unit='column') + NeuTRENO() + Decorrelation(strength=1.0)",
    ),
    "nanoGPT": (lambda: stack(CausalAttention), tokens, ACTING + " + DropColumn(p=0.2)"),
    "windows": (lambda: stack(GroupsOfTheirOwn), tokens, ACTING + " + InputNoise(scale=0.1, unit='std')"),
    "ViT": (lambda: made(WHOLE["ViT"]), images, ACTING + " + NeuTRENO()"),
    "MaxViT": (lambda: made(WHOLE["MaxViT"]), images, "DropHead(p=0.2)"),
}


@pytest.mark.parametrize("case", part_of_grid(CASES, ("windows",)))
def test_one_graph_and_no_other_over_five_steps_with_a_changing_strength(case):
    make, batch, methods = CASES[case]
    model, x = make().train(), batch()
    handle = headwise.regularize(model, *headwise.parse(methods), example=x)
    eager = copy.deepcopy(model)
    twin = headwise.handle(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(5):
        outputs = []
        for run, one in ((compiled, handle), (eager, twin)):
            one.set(headwise.DropHead, p=0.1 * step)
            out = run(x)
            loss = out.square().mean() + one.loss()
            loss.backward()
            one.after_step()
            outputs.append((out, loss))
        torch.testing.assert_close(outputs[0], outputs[1])
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert graphs() == 1
    handle.remove()
    twin.remove()


@pytest.mark.bits
def test_a_removed_method_leaves_the_compiled_model():
    model, x = stack(), tokens()
    plain = model(x)
    handle = headwise.regularize(model, headwise.RelaxedAttention(gamma=1.0))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert not torch.allclose(compiled(x), plain)
    handle.remove()
    assert torch.equal(compiled(x), plain)


class Breaking(SelfAttention):
    """Breaks the graph inside of its forward, and may raise after that."""

    error = None

    def forward(self, x):
        q, k, v = self.split(x)
        torch._dynamo.graph_break()
        out = F.scaled_dot_product_attention(q, k, v)
        if self.error is not None:
            raise self.error
        return self.join(out)


def test_a_broken_graph_stays_inside_its_site_and_an_exception_leaves_it():
    model, x = stack(Breaking), tokens()
    handle = headwise.regularize(model, headwise.RelaxedAttention(gamma=1.0))
    relaxed = model(x)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), relaxed)
    other = stack(SelfAttention)
    plain = other(x)
    for error in (ValueError("broken"), KeyboardInterrupt()):
        model.layers[1].error = error
        with pytest.raises(type(error)):
            compiled(x)
        assert torch.equal(other(x), plain)
        model.layers[1].error = None
        torch.testing.assert_close(compiled(x), relaxed)
    handle.remove()


@pytest.mark.bits
def test_an_exception_in_eager_mode_misroutes_no_model_compiled_later():
    model, other, x = stack(Breaking), stack(SelfAttention), tokens()
    plain = other(x)
    handle = headwise.regularize(model, headwise.RelaxedAttention(gamma=1.0))
    model.layers[1].error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        model(x)
    assert torch.equal(torch.compile(other, fullgraph=True, backend="eager")(x), plain)
    handle.remove()


def test_a_compiled_model_runs_in_another_thread():
    model, x = stack(), tokens()
    handle = headwise.regularize(model, headwise.RelaxedAttention(gamma=1.0))
    relaxed = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    results = [compiled(x)]
    worker = threading.Thread(target=lambda: results.append(compiled(x)))
    worker.start()
    worker.join()
    assert len(results) == 2
    for result in results:
        torch.testing.assert_close(result, relaxed)
    handle.remove()


def test_a_compiled_layer_inside_of_an_eager_model_belongs_to_its_site():
    model, x = stack(), tokens()
    handle = headwise.regularize(model, headwise.RelaxedAttention(gamma=1.0), headwise.DropHead(p=0.5))
    twin = copy.deepcopy(model)
    model.layers[1].compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(x), twin(x))
    handle.remove()
    headwise.handle(twin).remove()


@pytest.mark.bits
def test_a_compiled_neutral_setting_is_the_host():
    model, x = stack(), tokens()
    plain = torch.compile(model, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    handle = headwise.regularize(model, headwise.DropHead(p=0.0), headwise.RelaxedAttention(gamma=0.0))
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), plain)
    handle.remove()
