"""Ten model types with the heads of their weights told by hand, and steps of the optimizers as their papers say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, SIZE, GROUPS, VOCABULARY = 32, 4, 8, 2, 40
# For a weight, or a tensor like it, the views that are its heads.
Split = Callable[[Tensor], list[Tensor]]


def rows(count: int, first: int = 0, size: int = SIZE, apart: int | None = None) -> Split:
    """Return `count` heads of `size` rows, `apart` rows from each other."""
    step = size if apart is None else apart
    return lambda w: [w[first + h * step : first + h * step + size] for h in range(count)]


def columns(count: int, first: int = 0) -> Split:
    return lambda w: [w[:, first + h * SIZE : first + (h + 1) * SIZE] for h in range(count)]


def joined(*splits: Split) -> Split:
    return lambda w: [view for split in splits for view in split(w)]


def whole(w: Tensor) -> list[Tensor]:
    return [w]


def _hf(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def _llama(config: str, model: str, **more: Any) -> Callable[[], nn.Module]:
    return _hf(
        config, model, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, vocab_size=VOCABULARY, **more,
    )  # fmt: skip


def _torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


SEPARATE = {
    "q_proj.weight": rows(HEADS),
    "k_proj.weight": rows(GROUPS),
    "v_proj.weight": rows(GROUPS),
    "o_proj.weight": columns(HEADS),
}
GATED = {"gate_proj.weight": whole, "up_proj.weight": whole, "down_proj.weight": whole}
STACKED = joined(rows(HEADS), rows(HEADS, WIDTH), rows(HEADS, 2 * WIDTH))
# each head's queries, keys and values one after the other
INTERLEAVED = joined(*(rows(HEADS, part * SIZE, apart=3 * SIZE) for part in range(3)))
# each group's two queries, key and value
FALCON = joined(*(rows(GROUPS, part * SIZE, apart=4 * SIZE) for part in range(4)))
NOPE, ROPE, VALUE, LATENT = 8, 4, 6, 12

# The model, and for each kind of weight, by the end of its name, its heads; all other weights are AdamW's.
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Split]]] = {
    "llama": (_llama("LlamaConfig", "LlamaForCausalLM"), SEPARATE | GATED),
    "qwen3": (_llama("Qwen3Config", "Qwen3ForCausalLM", head_dim=SIZE), SEPARATE | GATED),
    "phi3": (
        _llama("Phi3Config", "Phi3ForCausalLM", pad_token_id=0),
        {
            "qkv_proj.weight": rows(HEADS + 2 * GROUPS),
            "o_proj.weight": columns(HEADS),
            "gate_up_proj.weight": whole,
            "down_proj.weight": whole,
        },
    ),
    "gpt2": (
        _hf("GPT2Config", "GPT2LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=VOCABULARY),
        # stored with its inputs first
        {
            "c_attn.weight": columns(3 * HEADS),
            "attn.c_proj.weight": rows(HEADS),
            "c_fc.weight": whole,
            "mlp.c_proj.weight": whole,
        },
    ),
    "gpt-neox": (
        _hf(
            "GPTNeoXConfig",
            "GPTNeoXForCausalLM",
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            vocab_size=VOCABULARY,
        ),
        {
            "query_key_value.weight": INTERLEAVED,
            "attention.dense.weight": columns(HEADS),
            "dense_h_to_4h.weight": whole,
            "dense_4h_to_h.weight": whole,
        },
    ),
    "falcon": (
        _hf(
            "FalconConfig",
            "FalconForCausalLM",
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_kv_heads=GROUPS,
            new_decoder_architecture=True,
            vocab_size=VOCABULARY,
        ),
        {
            "query_key_value.weight": FALCON,
            "self_attention.dense.weight": columns(HEADS),
            "dense_h_to_4h.weight": whole,
            "dense_4h_to_h.weight": whole,
        },
    ),
    "bert": (
        _hf(
            "BertConfig",
            "BertModel",
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            vocab_size=VOCABULARY,
        ),
        {
            "query.weight": rows(HEADS),
            "key.weight": rows(HEADS),
            "value.weight": rows(HEADS),
            "attention.output.dense.weight": columns(HEADS),
            "intermediate.dense.weight": whole,
            "output.dense.weight": whole,
        },
    ),
    # one layer, called twice
    "albert": (
        _hf(
            "AlbertConfig",
            "AlbertModel",
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            embedding_size=16,
            vocab_size=VOCABULARY,
        ),
        {
            "query.weight": rows(HEADS),
            "key.weight": rows(HEADS),
            "value.weight": rows(HEADS),
            "attention.dense.weight": columns(HEADS),
            "ffn.weight": whole,
            "ffn_output.weight": whole,
        },
    ),
    "t5": (
        _hf(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=WIDTH,
            d_kv=SIZE,
            d_ff=48,
            num_layers=1,
            num_heads=HEADS,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        ),
        {
            "Attention.q.weight": rows(HEADS),
            "Attention.k.weight": rows(HEADS),
            "Attention.v.weight": rows(HEADS),
            "Attention.o.weight": columns(HEADS),
            "wi.weight": whole,
            "wo.weight": whole,
        },
    ),
    "torch": (
        _torch,
        {
            "in_proj_weight": STACKED,
            "out_proj.weight": columns(HEADS),
            "linear1.weight": whole,
            "linear2.weight": whole,
        },
    ),
    # the parts that heads share are whole matrices
    "deepseek": (
        _hf(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            q_lora_rank=16,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            first_k_dense_replace=2,
            vocab_size=VOCABULARY,
            head_dim=ROPE,
        ),
        {
            "q_a_proj.weight": whole,
            "q_b_proj.weight": joined(rows(HEADS, 0, NOPE, NOPE + ROPE), rows(HEADS, NOPE, ROPE, NOPE + ROPE)),
            "kv_a_proj_with_mqa.weight": joined(rows(1, 0, LATENT), rows(1, LATENT, ROPE)),
            "kv_b_proj.weight": joined(rows(HEADS, 0, NOPE, NOPE + VALUE), rows(HEADS, NOPE, VALUE, NOPE + VALUE)),
            "o_proj.weight": lambda w: list(w.split(VALUE, dim=1)),
        }
        | GATED,
    ),
}


def built(name: str) -> tuple[nn.Module, dict[str, Split]]:
    """Return a model in fp64 and the heads of its weights, by their names."""
    build, ends = LAYOUTS[name]
    torch.manual_seed(0)
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    found = {}
    for weight, parameter in model.named_parameters():
        # the longest end that fits
        fitting = sorted((end for end in ends if weight.endswith(end)), key=len)
        if fitting and parameter.ndim == 2:
            found[weight] = ends[fitting[-1]]
    assert set(map(id, found.values())) == set(map(id, ends.values())), "an end fits no weight"
    return model, found


def gradients(model: nn.Module, steps: int = 15) -> Iterator[dict[str, Tensor]]:
    """Return gradients for some steps, with a trend and unlike sizes from head to head, by name."""
    generator = torch.Generator().manual_seed(1)

    def drawn(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64)

    trend = {name: drawn(p) for name, p in model.named_parameters()}
    for _ in range(steps):
        yield {name: (t + drawn(t)) * 10 ** (2 * torch.rand(1, generator=generator)) for name, t in trend.items()}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def set_gradients(model: nn.Module, grads: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name].clone()


class AdamW:
    """Loshchilov and Hutter 2019, Algorithm 2, with the decay scaled by the rate: the update without its rate."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.first, self.second, self.steps = 0.0, 0.0, 0

    def update(self, gradient: Tensor) -> Tensor:
        self.steps += 1
        self.first = self.beta1 * self.first + (1 - self.beta1) * gradient
        self.second = self.beta2 * self.second + (1 - self.beta2) * gradient**2
        first, second = self.first / (1 - self.beta1**self.steps), self.second / (1 - self.beta2**self.steps)
        return first / (second**0.5 + self.eps)


class Muon:
    """Jordan et al. 2024: Nesterov momentum, orthogonalized matrix by matrix; the step's size after Liu et al. 2025."""

    def __init__(self, split: Split, mu: float = 0.95, original: bool = False, turned: bool = False) -> None:
        self.split, self.mu, self.original, self.turned = split, mu, original, turned
        self.mean = 0.0

    def update(self, gradient: Tensor) -> Tensor:
        self.mean = self.mu * self.mean + (1 - self.mu) * gradient
        update = self.mu * self.mean + (1 - self.mu) * gradient
        # a momentum that is looked ahead: g + μ(b - g)
        update = update.clone()
        for matrix in self.split(update):
            outputs, inputs = matrix.shape[::-1] if self.turned else matrix.shape
            size = max(1, outputs / inputs) ** 0.5 if self.original else 0.2 * max(outputs, inputs) ** 0.5
            matrix.copy_(size * quintic(matrix))
        return update


def quintic(matrix: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x
