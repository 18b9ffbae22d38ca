"""Compressing: exact where nothing is lost, the nearest product where something is, refused by name where it has no
meaning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from headwise_papers.tasks.character_lm import CharacterModel
from rounding import assert_same_to_rounding
from small_models import Attention, Own
from torch import Tensor, nn

import headwise
from headwise.attend import hosts, projections
from headwise.attend.compressing.exchange import put
from headwise.attend.compressing.site_cut import NarrowColumns, NarrowRows, cut, pseudo_rank
from headwise.attend.projections.capture import feed

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64
}  # fmt: skip
IDS = {"input_ids": torch.arange(12).view(2, 6)}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}


class Grouped(nn.Module):
    """Four heads of 8 that share the keys and values of two, with biases; `turned` puts a rotation that nothing
    declares between."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.turned = 4, 2, turned
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.turned:
            angle = torch.arange(x.shape[1])[:, None] / torch.arange(1, 9)
            q, k = q * angle.cos(), k * angle.cos()
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


HOSTS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "stacked": (Own, torch.linspace(-2, 2, 2 * 6 * 32).view(2, 6, 32).sin()),
    "separate": (lambda: CharacterModel(65, 64, 32, 4, 2, 2), IDS["input_ids"]),
    "grouped": (lambda: nn.Sequential(Grouped()), torch.linspace(-2, 2, 2 * 6 * 32).view(2, 6, 32).sin()),
    "gpt2": (
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
        ),
        IDS,
    ),
    "bert": (lambda: tf.BertModel(tf.BertConfig(**SIZES)), IDS),
    "t5": (lambda: tf.T5EncoderModel(tf.T5Config(**T5)), IDS),
}


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, example = HOSTS[name]
    model = build().eval()
    for parameter in model.parameters():
        # biases that are not 0, and scores that differ
        nn.init.normal_(parameter, std=0.3)
    return model, example


@torch.no_grad()
def output(model: nn.Module, example: Any) -> Tensor:
    found = feed(model, example)
    found = getattr(found, "logits", getattr(found, "last_hidden_state", found))
    assert isinstance(found, Tensor)
    return found


def distance(model: nn.Module, before: Tensor, example: Any) -> float:
    return float((output(model, example) - before).norm())


@torch.no_grad()
def lower_ranks(model: nn.Module, rank: int) -> None:
    """Project the queries and values of every head, with their biases, onto `rank` dimensions."""
    for one in hosts.find(model):
        one.site.model = model
        found = projections.of(one.site)
        for block in (found.q, found.v):
            assert block is not None
            some = torch.linalg.qr(torch.randn(block.head_dim, rank))[0]
            rows = block.by_rows(getattr(block.module, block.name).data)
            rows[block.rows] = (some @ some.T @ block.by_head()).flatten(0, 1)
            if (bias := block.bias()) is not None:
                block.module.bias.data[block.rows] = (
                    bias.view(block.heads, -1, 1).transpose(1, 2) @ some @ some.T
                ).flatten()


@pytest.mark.parametrize("name", HOSTS)
def test_a_cut_that_loses_nothing_changes_no_output(name: str) -> None:
    model, example = made(name)
    lower_ranks(model, 3)
    before = output(model, example)
    done = headwise.compress(model, 1.0, example=example)
    assert {rank for one in done.layers for rank in one.ranks} == {3}
    assert {one.part for one in done.layers} == {"qk", "vo"} and not done.refused
    assert_same_to_rounding(output(model, example), before)
    assert done.attention.after < 0.45 * done.attention.before
    assert done.parameters.after == sum(p.numel() for p in model.parameters())
    assert done.parameters.before - done.parameters.after == done.attention.before - done.attention.after


@pytest.mark.parametrize("name", HOSTS)
def test_a_full_rank_at_energy_1_stays_as_it_was(name: str) -> None:
    model, example = made(name)
    before, keys = output(model, example), list(model.state_dict())
    done = headwise.compress(model, 1.0, example=example)
    assert all(one.kept == 1 for one in done.layers)
    assert torch.equal(output(model, example), before) and list(model.state_dict()) == keys


def test_the_cut_is_the_nearest_product_of_its_rank() -> None:
    torch.manual_seed(0)
    own, shared = torch.randn(4, 8, 32), torch.randn(2, 8, 24)
    cuts = cut(own, shared, 0.8)
    for group, one in enumerate(cuts):
        whole = torch.cat([own[2 * group + head].double().T @ shared[group].double() for head in range(2)])
        values = torch.linalg.svdvals(whole)[:8]
        assert one.rank == pseudo_rank(values, 0.8) == int((values.cumsum(0) < 0.8 * values.sum()).sum()) + 1 < 8
        left = torch.cat([head.T @ one.shared for head in one.own])
        torch.testing.assert_close((whole - left).norm(), values[one.rank :].norm())
        # balanced, as weight decay would leave them
        torch.testing.assert_close(one.shared @ one.shared.T, torch.diag(values[: one.rank]))


def test_heads_keep_ranks_of_their_own_as_the_pseudo_rank_counts_them() -> None:
    model, example = made("separate")
    for layer in (block.attn for block in model.blocks):
        layer.query.weight.data[:8] *= torch.logspace(0, -3, 8)[:, None]
    done = headwise.compress(model, 0.95, parts="qk", example=example)
    first = done.layers[0]
    assert len(set(first.ranks)) > 1 and first.ranks[0] == min(first.ranks)


def test_more_energy_keeps_more_and_loses_less() -> None:
    losses, kept = [], []
    for energy in (0.5, 0.8, 0.95):
        model, example = made("separate")
        far = functools.partial(distance, before=output(model, example), example=example)
        done = headwise.compress(model, energy, example=example, loss=far)
        assert done.loss is not None and done.loss.before == 0
        losses.append(done.loss.after)
        kept.append(done.attention.after)
    assert losses == sorted(losses, reverse=True) and losses[-1] > 0 and kept == sorted(kept)


@pytest.mark.parametrize("name", ["stacked", "separate", "gpt2", "bert"])
def test_a_compressed_model_is_saved_and_loaded(name: str, tmp_path: Any) -> None:
    model, example = made(name)
    headwise.compress(model, 0.7, example=example)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = made(name)[0]
    headwise.load_compressed(again, torch.load(tmp_path / "model.pt"))
    assert torch.equal(output(again, example), output(model, example))


def test_what_save_pretrained_wrote_is_loaded_though_tied_weights_stand_in_it_once(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model, example = made("gpt2")
    headwise.compress(model, 0.7, example=example)
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(tmp_path)).eval()
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    headwise.load_compressed(again, state)
    assert torch.equal(output(again, example), output(model, example))


def test_a_state_dict_that_does_not_fit_leaves_the_model_alone() -> None:
    model, example = made("separate")
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="holds no compressed layer"):
        headwise.load_compressed(model, plain)
    headwise.compress(model, 0.7, example=example)
    state = model.state_dict()
    for spoiled, said in (
        ({k: v for k, v in state.items() if k != "head.weight"}, "head.weight is missing"),
        (state | {"more": torch.zeros(1)}, "more has no place"),
        (state | {"head.weight": torch.zeros(2, 2)}, r"head.weight is \(2, 2\), not \(65, 32\)"),
    ):
        again = made("separate")[0]
        with pytest.raises(ValueError, match=said):
            headwise.load_compressed(again, spoiled)
        assert all(torch.equal(tensor, plain[name]) for name, tensor in again.state_dict().items())
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.query is a NarrowRows, not a plain linear layer"):
        headwise.load_compressed(model, state)


def test_rotary_positions_allow_values_and_output_alone() -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"self_attn qk: rotary positions .* parts=\"vo\""):
        headwise.compress(model, 0.9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    lower_ranks(model, 3)
    wanted = output(model, IDS)
    done = headwise.compress(model, 1.0, parts="vo")
    assert_same_to_rounding(output(model, IDS), wanted)
    assert [(one.part, one.ranks) for one in done.layers] == [("vo", (3, 3))] * 2


def test_norms_of_queries_and_keys_are_named() -> None:
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)).eval()
    with pytest.raises(ValueError, match=r"rotary|normalised"):
        headwise.compress(model, 0.9, parts="qk")


def test_a_rotation_that_nothing_declares_is_seen_by_exchanging_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Grouped(turned=True)).eval()
    example = HOSTS["grouped"][1]
    with pytest.raises(ValueError, match="other factors of the same W_KᵀW_Q change its scores"):
        headwise.compress(model, 0.9, example=example)
    assert isinstance(model[0].q_proj, nn.Linear)
    assert headwise.compress(model, 0.9, parts="vo", example=example).layers


class Reading(Attention):
    """Reads the weight of its projection itself."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        made = F.linear(x, self.qkv.weight, self.qkv.bias)
        q, k, v = made.view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


def test_code_that_reads_the_weight_itself_is_refused() -> None:
    model = nn.Sequential(Reading()).eval()
    with pytest.raises(ValueError, match=r"its code does not accept another layer instead of 0\.qkv"):
        headwise.compress(model, 0.9, example=torch.randn(2, 6, 32))
    assert isinstance(model[0].qkv, nn.Linear)


def spoil_by_tying(model: Own) -> None:
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight


def spoil_by_a_hook(model: Own) -> None:
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)


def spoil_by_parametrizing(model: Own) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attn.proj)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_by_tying, "blocks.0.attn.qkv shares its weights"),
        (spoil_by_a_hook, "blocks.0.attn.qkv has hooks on it"),
        (spoil_by_parametrizing, "blocks.0.attn.proj is a ParametrizedLinear: only a plain linear layer is cut"),
    ],
)
def test_layers_that_cannot_be_replaced_are_named(spoil: Callable[[Own], None], said: str) -> None:
    model = Own()
    spoil(model)
    with pytest.raises(ValueError, match=said):
        headwise.compress(model, 0.9, where=["blocks.0.attn"], example=torch.randn(2, 6, 32))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = Own()
    model.blocks[0].attn.proj.weight.data[3, 4] = value
    with pytest.raises(ValueError, match=r"blocks\.0\.attn vo: blocks\.0\.attn\.proj has weights that are not finite"):
        headwise.compress(model, 0.9, where=["blocks.0.attn"], example=torch.randn(2, 6, 32))


def test_a_compressed_model_is_not_compressed_again() -> None:
    model = Own()
    headwise.compress(model, 0.8, example=torch.randn(2, 6, 32))
    with pytest.raises(ValueError, match=r"blocks\.0\.attn qk: it is compressed already, see its qkv"):
        headwise.compress(model, 0.8, example=torch.randn(2, 6, 32))


def test_nothing_is_drawn_from_torchs_generator() -> None:
    model, example = Own(), torch.randn(2, 6, 32)
    state = torch.get_rng_state()
    headwise.compress(model, 0.8, example=example)
    assert torch.equal(torch.get_rng_state(), state)
    again = Own()
    state = torch.get_rng_state()
    headwise.load_compressed(again, model.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_fails_on_the_cut_model_leaves_the_plain_one() -> None:
    model, said = Own(), []

    def loss(judged: nn.Module) -> float:
        said.append(judged)
        if len(said) == 2:
            raise RuntimeError("no data")
        return 1.0

    plain = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="no data"):
        headwise.compress(model, 0.8, example=torch.randn(2, 6, 32), loss=loss)
    assert dict(model.named_modules()) == plain and len(said) == 2


def test_torchs_own_layer_is_refused() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(ValueError, match=r"self_attn qk: nn\.MultiheadAttention reads its weights directly"):
        headwise.compress(model, 0.9, example=torch.randn(2, 6, 32))


def test_a_regularized_or_watched_model_is_refused() -> None:
    model = Own()
    regularized = headwise.regularize(model, headwise.DropHead(p=0.2))
    with pytest.raises(ValueError, match=r"regularized: call fold\(\) or remove\(\)"):
        headwise.compress(model, 0.9)
    regularized.remove()
    watched = headwise.watch(model)
    with pytest.raises(ValueError, match=r"watched by headwise.watch: call remove\(\)"):
        headwise.compress(model, 0.9)
    watched.remove()
    assert headwise.compress(model, 0.9, example=torch.randn(2, 6, 32)).layers


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"energy": 0.0}, "above 0 and at most 1, got 0.0"),
        ({"energy": 95}, "got 95"),
        ({"energy": "0.9"}, "got '0.9'"),
        ({"energy": True}, "got True"),
        ({"parts": "ov"}, "got 'ov'"),
        ({"where": lambda site: False}, "where= chooses no attention layer"),
    ],
)
def test_settings_out_of_range_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        headwise.compress(Own(), **given)
    with pytest.raises(TypeError, match="takes a torch module first, got str"):
        headwise.compress("bert")  # type: ignore[arg-type]


def test_where_leaves_the_other_layers_and_what_cannot_be_cut_is_listed() -> None:
    model = nn.ModuleDict({"plain": Grouped(), "turned": Grouped(turned=True)}).eval()
    done = headwise.compress(model, 0.6)
    assert set(done.refused) == {"turned qk"}
    assert {(one.site, one.part) for one in done.layers} == {("plain", "qk"), ("plain", "vo"), ("turned", "vo")}
    assert "left unchanged: turned qk: other factors" in str(done)
    other = Own()
    headwise.compress(other, 0.6, where=["blocks.1.attn"], example=torch.randn(2, 6, 32))
    assert isinstance(other.blocks[0].attn.qkv, nn.Linear) and isinstance(other.blocks[1].attn.qkv, NarrowRows)


def test_the_table_says_parameters_time_and_loss() -> None:
    model, example = made("stacked")
    shown = str(headwise.compress(model, 0.7, example=example, loss=lambda m: 1.5))
    for words in (
        "blocks.0.attn  qk",
        " of 8",
        "parameters: ",
        "of the projections",
        "time of a forward: ",
        "loss: 1.5 -> 1.5",
    ):
        assert words in shown


def test_a_compressed_model_trains_and_keeps_its_precision() -> None:
    model = Own().to(torch.bfloat16)
    model.blocks[0].attn.qkv.requires_grad_(False)
    headwise.compress(model, 0.7, example=torch.randn(2, 6, 32, dtype=torch.bfloat16))
    narrow = model.blocks[1].attn
    assert isinstance(narrow.qkv, NarrowRows) and isinstance(narrow.proj, NarrowColumns)
    model(torch.randn(2, 6, 32, dtype=torch.bfloat16)).float().sum().backward()
    assert narrow.qkv.inner.weight.grad is not None and narrow.qkv.inner.weight.dtype == torch.bfloat16
    assert model.blocks[0].attn.qkv.inner.weight.grad is None
    assert "out_features=96, kept=" in repr(narrow.qkv)


def test_layers_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    put(model, {"0": other})
    assert model[0] is other
