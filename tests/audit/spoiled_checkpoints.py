"""Small checkpoints to spoil, and the refusal that is expected of them."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

from headwise.health.auditing.audit import CheckpointError, audit


def good(folder):
    """Save a small good model."""
    config = tf.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=40,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def refused(checkpoint, match, **options):
    with pytest.raises(CheckpointError, match=match):
        audit(checkpoint, **options)
