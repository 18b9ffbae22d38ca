"""Small models, and checks of a method on them: neutral, strong, gradients, removal, folding, copies, compiling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attend import Method, Regularized, handle, regularize
from headwise.attend.optimizers import parameter_groups
from headwise.borders import forward_hooks_of, forward_pre_hooks_of


@dataclass
class Host:
    """A model with a batch.

    Attributes:
        make: builds the model.
        batch: returns positional and keyword arguments of a call.
        unseen: (B, T), True for tokens that no other token may see; None if each sees all. With it, the first argument
            of the model is x (B, T, C).
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    unseen: Tensor | None = None

    def run(self, model: Callable[..., Any], batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> Tensor:
        """Return the model's output for a batch, by default its own."""
        args, kwargs = batch or self.batch()
        out = model(*args, **kwargs)
        return out if isinstance(out, Tensor) else out[0]

    def example(self) -> Any:
        """Return the batch in the form of `regularize(example=...)`."""
        args, kwargs = self.batch()
        return kwargs or args


class Attention(nn.Module):
    """Attention with one stacked projection for q, k and v, as in timm."""

    def __init__(self, dim: int = 32, heads: int = 4, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention branch."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return self.proj(o.transpose(1, 2).reshape(b, t, c))


class PlainBlock(nn.Module):
    """A pre-norm layer of a transformer."""

    def __init__(self, dim: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, causal, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return x with both branches added."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Own(nn.Module):
    """A pre-norm transformer on vectors that calls F.scaled_dot_product_attention."""

    def __init__(
        self, depth: int = 2, dim: int = 32, heads: int = 4, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PlainBlock(dim, heads, causal, dropout) for _ in range(depth)])
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return five numbers per token."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, whose layers attend by nn.MultiheadAttention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return five numbers per token; `padding` (B, T) is True for padding tokens."""
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def vectors(batch: int = 3, tokens: int = 9) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch of random tokens."""
    return (torch.randn(batch, tokens, 32, generator=torch.Generator().manual_seed(5)),), {}


PADDING = torch.arange(9) >= torch.tensor([9, 6, 9])[:, None]
LAST = torch.arange(9).expand(3, 9) == 8
MODELS = {
    "a model with plain attention": Host(Own, vectors),
    "a causal model": Host(lambda: Own(causal=True), vectors, LAST),
    "torch's encoder": Host(Encoder, vectors),
    "torch's encoder with padding": Host(Encoder, lambda: ((*vectors()[0], PADDING), {}), PADDING),
}


def fresh(host: Host, seed: int = 0) -> nn.Module:
    """Return the host's model with the same weights every time."""
    torch.manual_seed(seed)
    return host.make().train()


def fit(
    cls: type[Method], host: Host, settings: Mapping[str, Any], model: nn.Module | None = None
) -> tuple[nn.Module, Regularized]:
    """Return a model of the host with one method fitted onto it, and the handle."""
    model = fresh(host) if model is None else model
    return model, regularize(model, cls(**settings), example=host.example())


def run(host: Host, model: nn.Module, seed: int = 3) -> Tensor:
    """Return the model's output with torch's generator seeded."""
    torch.manual_seed(seed)
    return host.run(model)


def assert_same(got: Tensor, wanted: Tensor, what: str, *, bits: bool = False) -> None:
    """Raise AssertionError with the largest difference if two outputs differ by more than rounding, or in any bit."""
    got, wanted = got.detach(), wanted.detach()
    largest = float((got - wanted).abs().max())
    # Two kernels of torch itself differ by half of this on models of this size (1.0e-6 of the largest output).
    same = torch.equal(got, wanted) if bits else largest <= 2e-6 * max(1.0, float(wanted.abs().max()))
    assert same, f"{what}: the largest difference is {largest:.3g}"


def neutral_changes_nothing(cls: type[Method], host: Host) -> None:
    """Check that the neutral setting adds no loss and changes no bit, or only rounding if another kernel runs."""
    if cls.neutral is None:
        assert cls.no_neutral, f"{cls.__name__} declares no neutral setting and does not say why"
        return
    model = fresh(host)
    plain = {mode: run(host, model.train(mode)) for mode in (True, False)}
    model, regularized = fit(cls, host, cls.neutral, model)
    for mode in (True, False):
        with torch.enable_grad():
            out = run(host, model.train(mode))
        exact = all(f.kernels <= {"fused", "draws"} for f in regularized.fitted)
        what = f"at {cls(**cls.neutral)!r} the output changes in {'training' if mode else 'evaluation'}"
        assert_same(out, plain[mode], what, bits=exact and not cls.learns)
        if mode:
            loss = float(regularized.loss().detach())
            # A penalty of strength 0 is 0.
            assert abs(loss) <= 1e-6, f"at {cls(**cls.neutral)!r} the loss is {loss:.3g}"


def strong_setting_acts(cls: type[Method], host: Host) -> None:
    """Check that the strong setting changes outputs, loss or, after a step, weights, and in evaluation as declared."""
    model = fresh(host)
    plain = {mode: run(host, model.train(mode)).detach() for mode in (True, False)}
    model, regularized = fit(cls, host, cls.strong, model)
    if cls.learns and cls.neutral is not None:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if ".headwise." in key:
                    parameter.add_(0.5)
    out = run(host, model.train())
    loss = regularized.loss()
    if cls.only_rounding:
        assert_same(out, plain[True], "only_rounding is declared, and the output changes")
    acted = cls.only_rounding or bool((out - plain[True]).abs().max() > 1e-4)
    if cls.penalizes:
        (grad,) = torch.autograd.grad(loss, [_query_weight(model)], allow_unused=False)
        acted = acted or bool(abs(float(loss.detach())) > 1e-6 and grad.abs().max() > 0)
    if cls.overrides("after_step") and not acted:
        out.sum().backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        regularized.after_step()
        acted = any(not torch.equal(p, before[k]) for k, p in model.named_parameters())
    assert acted, f"{cls(**cls.strong)!r} did nothing: neither output nor loss nor weights changed"
    largest = float((run(host, model.eval()).detach() - plain[False]).abs().max())
    expected = cls.acts == "both" or cls.overrides("after_step")
    assert (largest > 1e-6) == expected, (
        f"acts is {cls.acts!r}, and the largest difference in evaluation is {largest:.3g}"
    )


def _query_weight(model: nn.Module) -> nn.Parameter:
    return next(p for n, p in model.named_parameters() if ("q" in n or "in_proj" in n) and p.dim() == 2)


def removal_leaves_no_trace(cls: type[Method], host: Host) -> None:
    """Check that removal before any step restores all bits, state-dict keys, modules, attributes and hooks."""
    model = fresh(host)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain, kinds = run(host, model), [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    model, regularized = fit(cls, host, cls.strong, model)
    run(host, model)
    regularized.remove()
    after = model.state_dict()
    assert list(after) == list(before), f"state-dict keys differ: {sorted({*after} ^ {*before})}; write unbuild()"
    for key, value in after.items():
        assert_same(value, before[key], f"{key} is not restored; write unbuild()", bits=True)
    assert_same(run(host, model), plain, "the output is not restored", bits=True)
    assert [type(m) for m in model.modules()] == kinds, "modules of other classes remain"
    assert [set(m.__dict__) for m in model.modules()] == attributes, "attributes remain on modules; write unbuild()"
    assert not any(forward_hooks_of(m) or forward_pre_hooks_of(m) for m in model.modules()), (
        "hooks remain; write unbuild()"
    )


def training_steps_work(cls: type[Method], host: Host) -> None:
    """Check that every gradient is finite, that each learned parameter gets one, and that three steps stay finite."""
    model, regularized = fit(cls, host, cls.strong)
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, attention_weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        loss = run(host, model).square().mean() + regularized.loss()
        optimizer.zero_grad()
        loss.backward()
        without = [n for n, p in model.named_parameters() if ".headwise." in n and p.grad is None]
        assert not without, f"learned parameters get no gradient: {without}"
        broken = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        assert not broken, f"gradients are not finite: {broken}"
        optimizer.step()
        regularized.after_step()
    assert run(host, model).isfinite().all(), "the output is not finite after three steps"


def tokens_out_of_sight_do_not_matter(cls: type[Method], host: Host) -> None:
    """Check that padding, or the last token of a causal model, does not change the outputs of other tokens."""
    if host.unseen is None:
        return
    method = cls(**cls.strong)
    (x, *rest), keywords = host.batch()
    other = torch.where(host.unseen[..., None], 3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(6)), x)
    outs = []
    for tokens in (x, other):
        model, _ = fit(cls, host, cls.strong)
        # Statistics of a training batch include all tokens, so methods that act in evaluation are checked there.
        model.train(not method.acts_in(False))
        torch.manual_seed(3)
        outs.append(host.run(model, ((tokens, *rest), keywords)).detach()[~host.unseen])
    largest = float((outs[0] - outs[1]).abs().max())
    assert largest <= 1e-5 * max(1.0, float(outs[0].abs().max())), (
        f"tokens depend on tokens that they may not see: the largest difference is {largest:.3g}"
    )


def folding_keeps_the_bits(cls: type[Method], host: Host) -> None:
    """Check that `fold()` after a step keeps the bits in evaluation, and keeps methods that act in evaluation."""
    model, regularized = fit(cls, host, cls.strong)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    (run(host, model).square().mean() + regularized.loss()).backward()
    optimizer.step()
    regularized.after_step()
    model.eval()
    with torch.no_grad():
        before = run(host, model)
        regularized.fold()
        after = run(host, model)
    assert_same(after, before, "fold() changes the model in evaluation", bits=True)
    stays = cls.acts == "both" and not cls.overrides("fold")
    assert stays != regularized.removed, f"after fold() the method {'went' if stays else 'stays'}"
    if not stays:
        keys = {*model.state_dict()} ^ {*fresh(host).state_dict()}
        assert not keys, f"after fold() state-dict keys differ: {sorted(keys)}"
        assert list(model.state_dict()) == list(fresh(host).state_dict()), (
            "after fold() state-dict keys are in another order"
        )


def copied_models_stand_alone(cls: type[Method], host: Host) -> None:
    """Check that a deep copy of a fitted model computes the same, and still works after removal from the original."""
    model, regularized = fit(cls, host, cls.strong)
    run(host, model).sum().backward()
    twin = copy.deepcopy(model)
    other = handle(twin)
    assert other is not regularized and other.model is twin, "the copy has the handle of the original"
    modules = [(f.site.module, g.site.module) for f, g in zip(regularized.fitted, other.fitted, strict=True)]
    assert all(a is not b for a, b in modules), "the copy has the sites of the original"
    assert_same(run(host, twin), run(host, model), "the copy computes something else", bits=True)
    twin.load_state_dict(model.state_dict(), strict=True)
    regularized.remove(discard=True)
    assert torch.isfinite(run(host, twin)).all(), "the copy's output is not finite after removal from the original"
    assert handle(twin) is other, "the copy lost its handle"
    other.remove(discard=True)


def autocast_works(cls: type[Method], host: Host) -> None:
    """Check that a training step under bf16 autocast has finite gradients."""
    model, regularized = fit(cls, host, cls.strong)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(host, model)
        loss = out.float().square().mean() + regularized.loss()
    loss.backward()
    broken = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert not broken, f"gradients under bf16 autocast are not finite: {broken}"
    regularized.after_step()


def losses_only_in_training(cls: type[Method], host: Host) -> None:
    """Check that neither evaluation nor a forward without gradients adds a loss."""
    model, regularized = fit(cls, host, cls.strong)
    run(host, model.eval())
    loss = float(regularized.loss().detach())
    assert loss == 0.0, f"evaluation leaves a loss of {loss:.3g}"
    with torch.no_grad():
        run(host, model.train())
    loss = float(regularized.loss().detach())
    assert loss == 0.0, f"a forward without gradients leaves a loss of {loss:.3g}"


def compiles(cls: type[Method], host: Host) -> None:
    """Check that `torch.compile(fullgraph=True)` traces the model and computes the same numbers."""
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model, regularized = fit(cls, host, cls.strong)
        runner = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        loss = host.run(runner).square().mean() + regularized.loss()
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), grads))
    torch.compiler.reset()
    (wanted, eager), (got, graph) = results
    largest = float((got - wanted).abs())
    assert largest <= 1e-5 + 1e-4 * float(wanted.abs()), f"the loss differs: the largest difference is {largest:.3g}"
    assert eager.keys() == graph.keys(), f"other parameters get gradients: {sorted(eager.keys() ^ graph.keys())}"
    for name, grad in eager.items():
        largest = float((graph[name] - grad).abs().max())
        assert largest <= 1e-4 + 1e-3 * float(grad.abs().max()), (
            f"the gradient of {name} differs: the largest difference is {largest:.3g}"
        )
