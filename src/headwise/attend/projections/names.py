"""Names of the heads, head sizes, norms and projections in attention modules and configs.

All such names are in this file: to support a host with other names, add them here.
"""

from __future__ import annotations

from typing import Any

HEADS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_attention_head", "heads", "nhead", "nheads",
    "num_head",
)  # fmt: skip
# Only for composed configs (BART, T5), whose plain names are properties of one half.
HALVES_HEADS = ("decoder_attention_heads", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_head", "head_size")
# Latent attention (DeepSeek) has separate sizes for queries and keys and for values.
COMPARED_DIM = ("qk_head_dim", *HEAD_DIM)
VALUE_DIM = ("v_head_dim",)
HIDDEN = ("hidden_size", "d_model", "dim", "n_embd")

PROJECTIONS = {
    "q": {"q_proj", "query", "q_lin", "q", "to_q", "wq", "w_q", "q_attn", "query_proj", "linear_q", "q_linear",
    "queries"},
    "k": {"k_proj", "key", "k_lin", "k", "to_k", "wk", "w_k", "k_attn", "key_proj", "linear_k", "k_linear", "keys"},
    "v": {"v_proj", "value", "v_lin", "v", "to_v", "wv", "w_v", "v_attn", "value_proj", "linear_v", "v_linear",
    "values"},
    "o": {
        "o_proj", "out_proj", "out_lin", "o", "to_out", "wo", "w_o", "proj", "dense", "c_proj", "out", "output",
        "output_proj", "linear_out", "o_linear", "projection", "proj_out", "fc_out",
    },
}  # fmt: skip
# Biases that the attention module itself adds to a projection without bias, as in BEiT and EVA.
BIASES_APART = {"q": "q_bias", "k": "k_bias", "v": "v_bias"}
# Names of modules whose sibling `output.dense` is the output projection, as in BERT and related models.
BESIDE_OUTPUT = ("self", "attention", "self_attention")
QK_NORMS = (
    "q_norm", "k_norm", "norm_q", "norm_k", "qk_norm", "query_norm", "q_ln", "q_layernorm", "query_layernorm",
    "qk_layernorm",
)  # fmt: skip


def first_number(owner: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of the attributes `names` that is a positive whole number, or None."""
    for name in names:
        value = getattr(owner, name, None)
        # True is an int in Python, but a flag is not a number.
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
