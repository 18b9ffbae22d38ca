"""Threads and checkpointing: forwards that run beside each other, and forwards that run again."""

import threading

import pytest
import torch
import torch.nn.functional as F
from own_models import SelfAttention, stack, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import headwise
from headwise import DropHead, NeuTRENO, RelaxedAttention
from headwise.attend.attention import softmax
from headwise.attend.hosts.sdpa import open_sites

STRONG = (DropHead(p=0.6), RelaxedAttention(gamma=0.9))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert open_sites.current.top is None
    assert F.scaled_dot_product_attention is softmax.fused


@pytest.mark.bits
def test_threads_with_models_of_their_own_do_not_meet():
    x = tokens(length=32)
    models = [stack(depth=4) for _ in range(4)]
    handles = [headwise.regularize(m, DropHead(p=0.1 * (i + 1)), NeuTRENO()) for i, m in enumerate(models[:3])]

    def together(results, index):
        for _ in range(20):
            results[index] = models[index](x)

    def reset():
        for handle in handles:
            handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})

    serial, threaded = {}, {}
    for index in range(4):
        together(serial, index)
    reset()
    workers = [threading.Thread(target=together, args=(threaded, index)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(serial[i], threaded[i]) for i in range(4))
    for handle in handles:
        handle.remove()


@pytest.mark.bits
def test_threads_may_evaluate_one_model_at_once():
    model = stack(depth=4).eval()
    batches = [tokens(batch=2 + i, length=8 + i, seed=i) for i in range(4)]
    handle = headwise.regularize(model, NeuTRENO(strength=0.9), example=batches[0])
    serial = [model(x) for x in batches]
    wrong = []

    def evaluate(index):
        try:
            for _ in range(30):
                if not torch.equal(model(batches[index]), serial[index]):
                    wrong.append(index)
        except RuntimeError as error:
            wrong.append(error)

    workers = [threading.Thread(target=evaluate, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    handle.remove()


class CheckpointsItsCall(SelfAttention):
    """Checkpoints inside of the forward: in the recompute no module is entered."""

    def forward(self, x):
        def attend(q, k, v):
            return torch.tanh(F.scaled_dot_product_attention(q, k, v))

        q, k, v = self.split(x)
        return self.join(checkpoint(attend, q, k, v, use_reentrant=False) if self.checkpoints else attend(q, k, v))

    checkpoints = True


@pytest.mark.parametrize(
    "methods", ["DropHead(p=0.5)", "DropHead(p=0.5) + RelaxedAttention(gamma=0.8) + Decorrelation(strength=1.0)"]
)
def test_a_call_that_is_checkpointed_inside_of_the_forward_has_the_same_gradients(methods):
    gradients = []
    for checkpoints in (False, True):
        model, x = stack(CheckpointsItsCall), tokens()
        for layer in model.layers:
            layer.checkpoints = checkpoints
        handle = headwise.regularize(model, *headwise.parse(methods))
        (model(x).square().sum() + handle.loss()).backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(handle.shared.penalties) == 0
        handle.remove()
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


class Checkpointed(nn.Module):
    """Checkpoints each layer, some of them fitted and some not."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpoints = True

    def forward(self, x):
        def both(x):
            return x + self.layers[1](self.layers[0](x))

        return checkpoint(both, x, use_reentrant=False) if self.checkpoints else both(x)


def test_the_recompute_of_an_unfitted_layer_stays_unfitted():
    gradients = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model, x = Checkpointed(SelfAttention(), SelfAttention()), tokens()
        model.checkpoints = checkpoints
        handle = headwise.regularize(model, DropHead(p=0.5), RelaxedAttention(gamma=0.8), where=["layers.1"])
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        handle.remove()
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
