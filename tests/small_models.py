"""Small models of every host, each with a batch and a loss, for the tests of all methods on all hosts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.testing.on_models import Attention, Encoder, Host, Own, PlainBlock, fresh, vectors

__all__ = ["HOSTS", "Attention", "Encoder", "Host", "Own", "PlainBlock", "fresh", "vectors"]


def _ids(padding: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :4] = 0
    if padding == "right":
        mask[1, 6:] = 0
    return (), {"input_ids": ids, **({} if padding is None else {"attention_mask": mask})}


def _llama(dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attention_dropout=dropout,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def _bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
    )
    return BertForMaskedLM(config)


HOSTS = {
    "own": Host(Own, vectors),
    "own-causal": Host(lambda: Own(causal=True), vectors),
    "own-dropout": Host(lambda: Own(dropout=0.1), vectors),
    "llama": Host(_llama, lambda: _ids(None)),
    "llama-left-padded": Host(_llama, lambda: _ids("left")),
    "bert-padded": Host(_bert, lambda: _ids("right")),
    "bert-dropout": Host(lambda: _bert(0.1), lambda: _ids(None)),
    "torch": Host(Encoder, vectors),
    "torch-dropout": Host(lambda: Encoder(0.1), vectors),
}
