"""Training with transformers' own switches: gradient checkpointing, autocast, learned parameters."""

from __future__ import annotations

import pytest
import torch
from rounding import assert_same_to_rounding
from tiny_models import FAMILIES, Family
from torch import Tensor, nn

import headwise
from headwise import AttnScale, DropColumn, DropHead, EntropyPenalty, NeuTRENO, RelaxedAttention
from headwise.attend.regularizing.regularize import regularize

CHECKPOINTED = [FAMILIES[name] for name in ("Llama", "GptOss", "BERT", "ViT", "Swin", "T5", "BART", "Whisper")]


def methods(family: Family) -> list[headwise.Method]:
    some = [
        DropColumn(p=0.3),
        RelaxedAttention(gamma=0.2, fuzziness=0.1),
        EntropyPenalty(strength=0.5),
        DropHead(p=0.3),
    ]
    return some if family.windowed else [*some, NeuTRENO(strength=0.6)]


def enable(model: nn.Module, settings: dict) -> None:
    """Switch checkpointing on under the name that this version of transformers gives it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings or None)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or None)


def step(family: Family, *, checkpointing: dict | None, dropout: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, penalties included, and all gradients of one training step."""
    model = family.build(dropout=dropout).train()
    if checkpointing is not None:
        enable(model, checkpointing)
    runs: list[int] = []
    handle = regularize(model, *methods(family), seed=5)
    handle.fitted[-1].site.module.register_forward_pre_hook(lambda module, args: runs.append(1))
    torch.manual_seed(1)
    loss = family.logits(model, family.batch(family.paddings[-1])).square().mean() + handle.loss()
    loss.backward()
    handle.after_step()
    assert len(runs) == (1 if checkpointing is None else 2)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.bits
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", CHECKPOINTED, ids=lambda f: f.name)
def test_gradient_checkpointing_trains_with_the_same_gradients(family: Family, dropout: float) -> None:
    loss, plain = step(family, checkpointing=None, dropout=dropout)
    again, saved = step(family, checkpointing={}, dropout=dropout)
    # Checkpointing turns the cache of keys off: the same kernel reads keys and values in another layout.
    assert_same_to_rounding(again, loss)
    assert saved.keys() == plain.keys()
    for name, grad in plain.items():
        assert (saved[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7, name


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    family = FAMILIES["Llama"]
    model = family.build().train()
    enable(model, {"use_reentrant": True})
    regularize(model, DropHead(p=0.3))
    loss = family.logits(model, family.batch()).square().mean()
    with pytest.raises(
        RuntimeError, match=r"layers\.2\.self_attn was run again.*reentrant.*DropHead\(p=0.3\).*use_reentrant=False"
    ):
        loss.backward()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "T5", "Swin"])
def test_autocast_trains(name: str) -> None:
    family = FAMILIES[name]
    model = family.build().train()
    handle = regularize(model, *methods(family))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = family.logits(model, family.batch(family.paddings[-1])).float().square().mean() + handle.loss()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_learned_parameters_are_saved_and_trained_with_the_model() -> None:
    family = FAMILIES["BERT"]
    model = family.build().train()
    handle = regularize(model, AttnScale())
    learned = [name for name, _ in model.named_parameters() if ".headwise." in name]
    assert len(learned) == 3
    assert set(learned) <= model.state_dict().keys()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (family.logits(model, family.batch("right")).square().mean() + handle.loss()).backward()
    optimizer.step()
    handle.after_step()
    assert all(model.get_parameter(name).abs().max() > 0 for name in learned)
