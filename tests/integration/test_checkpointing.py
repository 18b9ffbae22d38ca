"""Activation checkpointing, accumulation and several forwards: the same gradients and one penalty."""

import pytest
import torch
from grids import part_of_grid
from small_models import HOSTS, Own, fresh
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

NAMES = list(shelf.__all__)


class Checkpointed(Own):
    """Runs its blocks under activation checkpointing: each apart, all in one region, or each inside the region of
    all."""

    mode = "none"

    def forward(self, x):
        if self.mode == "none":
            return super().forward(x)
        reentrant = self.mode == "reentrant"
        if self.mode in ("whole", "nested"):
            return self.head(checkpoint(self.stack, x, use_reentrant=False))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)

    def stack(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.mode == "nested" else block(x)
        return x


def make(name, settings=None):
    torch.manual_seed(0)
    model = Checkpointed().train()
    cls = REGISTRY[name]
    handle = headwise.regularize(model, cls(**(settings or cls.strong)), example=torch.randn(2, 5, 32))
    return model, handle


def inputs():
    return torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(7), requires_grad=True)


def gradients(model, handle, mode, forwards=1):
    model.mode = mode
    handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
    model.zero_grad()
    outs = [model(inputs()) for _ in range(forwards)]
    penalty = handle.loss()
    loss = sum(out.square().mean() for out in outs)
    if forwards == 2:
        # R-Drop's shape: two draws of the same batch in one loss.
        loss = loss + (outs[0] - outs[1]).square().mean()
    (loss + penalty).backward()
    assert float(handle.loss().detach()) == 0.0 or not REGISTRY[type(handle.methods[0]).__name__].overrides("read"), (
        "a recompute was counted again"
    )
    return penalty.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# one of each kind: on weights, on logits, a penalty, carried values, beside the call, in place of a weight
KINDS = ("DropHead", "DropKey", "EntropyPenalty", "NeuTRENO", "QKNorm", "SigmaReparam")
REGIONS = [(name, mode, forwards) for name in NAMES for mode in ("each", "whole", "nested") for forwards in (1, 2)]


@pytest.mark.parametrize(
    ("name", "mode", "forwards"),
    part_of_grid(REGIONS, [one for one in REGIONS if one[0] in KINDS or one[1:] == ("each", 2)]),
)
def test_checkpointing_gives_the_same_gradients_and_one_penalty(name, mode, forwards):
    model, handle = make(name)
    plain_penalty, plain = gradients(model, handle, "none", forwards)
    penalty, got = gradients(model, handle, mode, forwards)
    torch.testing.assert_close(penalty, plain_penalty)
    assert got.keys() == plain.keys()
    for key in plain:
        torch.testing.assert_close(got[key], plain[key], rtol=1e-4, atol=1e-6, msg=key)


# They draw, add to the loss, carry values or keep means of batches: a forward that cannot be distinguished from its
# repetition would do it twice.
REFUSED_WHEN_REENTRANT = {
    "AttentionDropout",
    "AttentionNormPenalty",
    "Decorrelation",
    "Disagreement",
    "BranchDrop",
    "DropAttention",
    "DropColumn",
    "DropHead",
    "DropKey",
    "EntropyPenalty",
    "InputNoise",
    "NeuTRENO",
    "ReAttention",
    "ValueResidual",
    "ZLoss",
}


@pytest.mark.parametrize("name", NAMES)
def test_reentrant_checkpointing_is_the_same_or_refused_by_name(name):
    model, handle = make(name)
    _, plain = gradients(model, handle, "none")
    if name in REFUSED_WHEN_REENTRANT:
        with pytest.raises(RuntimeError, match=rf"{name}.*use_reentrant=False"):
            gradients(model, handle, "reentrant")
        return
    _, got = gradients(model, handle, "reentrant")
    for key in plain:
        torch.testing.assert_close(got[key], plain[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["DropHead", "EntropyPenalty", "DropColumn", "InputNoise", "AttentionNormPenalty"])
def test_a_compiled_block_under_checkpointing_repeats_its_draws(name):
    torch._dynamo.reset()
    model, handle = make(name)
    plain_penalty, plain = gradients(model, handle, "none")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    penalty, got = gradients(model, handle, "each")
    torch.testing.assert_close(penalty, plain_penalty, rtol=1e-4, atol=1e-6)
    for key in plain:
        torch.testing.assert_close(got[key], plain[key], rtol=1e-3, atol=1e-5, msg=key)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", part_of_grid(NAMES, KINDS))
def test_checkpointing_inside_a_compiled_graph_is_the_same(name):
    torch._dynamo.reset()
    model, handle = make(name)
    plain_penalty, plain = gradients(model, handle, "none")
    compiled = torch.compile(model, backend="aot_eager")
    model.mode = "each"
    handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
    model.zero_grad()
    out = compiled(inputs())
    penalty = handle.loss()
    (out.square().mean() + penalty).backward()
    torch.testing.assert_close(penalty.detach(), plain_penalty, rtol=1e-4, atol=1e-6)
    for key in plain:
        got = dict(model.named_parameters())[key].grad
        torch.testing.assert_close(got, plain[key], rtol=1e-3, atol=1e-5, msg=key)
    torch._dynamo.reset()


def test_accumulated_micro_batches_draw_apart_and_sum_their_penalties():
    model, handle = make("EntropyPenalty")
    parts = []
    for _ in range(2):
        out = model(inputs())
        parts.append(handle.loss())
        (out.mean() + parts[-1]).backward()
    # both outputs are kept, as for one loss of both
    both = [model(inputs()) for _ in range(2)]
    torch.testing.assert_close(handle.loss().detach(), sum(p.detach() for p in parts))
    assert len(both) == 2
    model, handle = make("DropHead", {"p": 0.5})
    assert not torch.equal(model(inputs()), model(inputs()))


def test_blocks_of_queries_give_the_same_as_the_whole_matrix(monkeypatch):
    from headwise.attend.attention import computation as attention

    results = []
    for limit in (1 << 24, 200):
        monkeypatch.setattr(attention, "WHOLE", limit)
        model, handle = make("DropKey", {"p": 0.5, "unit": "element"})
        results.append(gradients(model, handle, "none"))
    for key in results[0][1]:
        torch.testing.assert_close(results[0][1][key], results[1][1][key], rtol=1e-4, atol=1e-6)


def test_transformers_checkpointing_repeats_the_draws():
    host = HOSTS["llama"]
    model = fresh(host)
    handle = headwise.regularize(
        model, headwise.DropColumn(p=0.5), headwise.NeuTRENO(), headwise.EntropyPenalty(strength=1.0)
    )
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
        model.zero_grad()
        (host.run(model).square().mean() + handle.loss()).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["DropHead", "EntropyPenalty", "NeuTRENO"])
@pytest.mark.parametrize("call", ["loss", "after_step"])
def test_reentrant_checkpointing_is_named_in_the_order_of_the_readme(name, call):
    model, handle = make(name)
    model.mode = "reentrant"
    model(inputs())
    with pytest.raises(
        RuntimeError,
        match=rf"blocks\.1\.attn ran without gradients inside a training forward.*{name}.*use_reentrant=False",
    ):
        getattr(handle, call)()
    # Without a forward that trains it is still the training mode that is missing.
    model, handle = make(name)
    with torch.no_grad():
        model(inputs())
    with pytest.raises(RuntimeError, match=r"never reached in the first training step.*training mode"):
        handle.after_step()


@pytest.mark.parametrize("name", ["AttnScale", "QKNorm", "GatedOutput"])
def test_methods_that_reentrant_checkpointing_cannot_disturb_train_in_the_order_of_the_readme(name):
    found = []
    for mode in ("none", "reentrant"):
        model, handle = make(name)
        model.mode = mode
        (model(inputs()).square().mean() + handle.loss()).backward()
        handle.after_step()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-6)
