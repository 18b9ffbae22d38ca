"""The residual stream around each layer, on every kind of host, against the stream of a loop over the blocks."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision_stub  # noqa: F401  (before timm)
import transformers as tf
from torch import nn

import headwise
from headwise.health.watching.alerts import HealthWarning
from headwise.health.watching.stream import NAMES

READ = ["token_cosine", "high_frequency", *NAMES]
X = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(3)) + 0.4


def with_gains(model: nn.Module) -> nn.Module:
    """Gives norms gains of 1 ± .3, as trained models have: there what enters attention is another figure than the
    stream."""
    g = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=g))
    return model.train()


class Stack(nn.Module):
    """nn.TransformerEncoder as users write it, with the first layers' output kept by a plain loop."""

    def __init__(self, **settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(32, 4, 48, 0.0, norm_first=True, **settings) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return self.streams(x)[-1]

    def streams(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found


def torch_layers(batch_first: bool):
    model = with_gains(Stack(batch_first=batch_first))
    x = X if batch_first else X.transpose(0, 1)
    streams = model.streams(x)
    return model, (x,), {}, [s if batch_first else s.transpose(0, 1) for s in streams]


def llama():
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=60
    )
    model = with_gains(tf.LlamaModel(config))
    seen = model(inputs_embeds=X, output_hidden_states=True).hidden_states
    # The last of them is normed: the loop's own last step is what left the last block.
    place = torch.arange(7)[None]
    last = model.layers[-1](
        seen[-2], position_ids=place, position_embeddings=model.rotary_emb(seen[-2], place), attention_mask=None
    )
    return model, (), {"inputs_embeds": X}, [*seen[:-1], last]


def bert():
    torch.manual_seed(0)
    config = tf.BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=60,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = with_gains(tf.BertModel(config))
    mask = torch.ones(3, 7)
    mask[1, 4:] = 0
    given = {"inputs_embeds": X, "attention_mask": mask}
    return model, (), given, list(model(**given, output_hidden_states=True).hidden_states)


def vit():
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=32, num_heads=4, num_classes=2)
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model = with_gains(model)
    streams = [model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(pictures))))]
    for block in model.blocks:
        streams.append(block(streams[-1]))
    return model, (pictures,), {}, streams


CASES = {
    "torch": lambda: torch_layers(True),
    "torch, tokens first": lambda: torch_layers(False),
    "Llama": llama,
    "BERT, padded": bert,
    "timm ViT": vit,
}


def read(model, args, given, **settings):
    watch = headwise.watch(model, every=1, on_alert=None, statistics=READ, **settings)
    model(*args, **given)
    watch.step()
    records, reasons = watch.records(), watch.reasons()
    watch.remove()
    found = {name: [r["value"] for r in records if r["statistic"] == name] for name in READ}
    return found, reasons


def by_definition(streams, mask=None):
    """Gives (mean cosine of pairs of different tokens, share of the norm that is not the mean), averaged over
    samples."""
    found = []
    for stream in streams:
        cosines, shares = [], []
        for b, x in enumerate(stream.detach().double()):
            x = x if mask is None else x[mask[b].bool()]
            cosine = nn.functional.cosine_similarity(x[:, None], x[None], dim=-1)
            cosines.append(float(cosine[~torch.eye(len(x), dtype=torch.bool)].mean()))
            shares.append(float((x - x.mean(0)).norm() / x.norm()))
        found.append((sum(cosines) / len(cosines), sum(shares) / len(shares)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_that_of_a_loop_over_the_blocks(case):
    model, args, given, streams = CASES[case]()
    found, reasons = read(model, args, given)
    want = by_definition(streams, given.get("attention_mask"))
    assert found["stream_cosine"] == pytest.approx([cosine for cosine, _ in want[:-1]], rel=1e-4, abs=1e-5)
    assert found["stream_high_frequency"] == pytest.approx([share for _, share in want[:-1]], rel=1e-4)
    assert found["final_cosine"] == pytest.approx([want[-1][0]], rel=1e-4, abs=1e-5)
    assert found["final_high_frequency"] == pytest.approx([want[-1][1]], rel=1e-4)
    assert all("last block" in told["final_cosine"] for told in list(reasons.values())[:-1])
    assert "final_cosine" not in list(reasons.values())[-1]
    assert not any("stream_cosine" in told for told in reasons.values())


@pytest.mark.parametrize("case", ["torch", "Llama", "timm ViT"])
def test_behind_a_norm_with_gains_it_is_another_figure_than_what_enters_attention(case):
    model, args, given, _ = CASES[case]()
    found, _ = read(model, args, given)
    apart = [abs(a - b) for a, b in zip(found["token_cosine"], found["stream_cosine"], strict=True)]
    assert max(apart) > 0.01


def test_t5_is_read_around_whole_blocks_and_cross_attention_says_why_not():
    torch.manual_seed(0)
    config = tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60, dropout_rate=0.0)
    model = with_gains(tf.T5Model(config))
    ids = torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "decoder_input_ids": ids}
    seen = {}
    for stack in ("encoder", "decoder"):
        for i, block in enumerate(getattr(model, stack).block):
            block.register_forward_hook(
                lambda m, args, out, at=(stack, i): seen.update(
                    {at: (args[0], out[0] if isinstance(out, tuple) else out)}
                )
            )
    found, reasons = read(model, (), given)
    streams = [seen[stack, i][0] for stack in ("encoder", "decoder") for i in (0, 1)]
    final = [seen[stack, 1][1] for stack in ("encoder", "decoder")]
    assert found["stream_cosine"] == pytest.approx([c for c, _ in by_definition(streams)], rel=1e-4)
    assert found["final_cosine"] == pytest.approx([c for c, _ in by_definition(final)], rel=1e-4)
    assert "self attention" in reasons["decoder.block.0.layer.1.EncDecAttention"]["stream_cosine"]


def test_a_layer_in_no_list_of_blocks_says_why():
    model = nn.Sequential()
    model.attn = nn.MultiheadAttention(32, 4, batch_first=True)
    model.forward = lambda x: model.attn(x, x, x)[0]
    found, reasons = read(model.train(), (X,), {})
    assert found["stream_cosine"] == found["final_cosine"] == []
    assert reasons["attn"]["stream_cosine"] == reasons["attn"]["final_cosine"]
    assert "list of blocks" in reasons["attn"]["stream_cosine"]


@pytest.mark.grid
def test_it_is_the_same_in_a_compiled_graph_and_under_checkpointing():
    model, args, given, _ = CASES["Llama"]()
    want, _ = read(model, args, given)
    compiled, _ = read(torch.compile(model, backend="aot_eager", fullgraph=True), args, given)
    for name in READ:
        assert compiled[name] == pytest.approx(want[name], rel=1e-4), name
    model.activation_checkpointing_enable()
    watch = headwise.watch(model, every=1, on_alert=None, statistics=READ)
    model(*args, **given).last_hidden_state.sum().backward()
    watch.step()
    for name in READ:
        got = [r["value"] for r in watch.records() if r["statistic"] == name]
        assert got == pytest.approx(want[name], rel=1e-4), name
    watch.remove()


def test_a_removed_watch_and_a_copy_leave_no_hook_that_acts():
    model, args, _, _ = CASES["torch"]()
    watch = headwise.watch(model, every=1, on_alert=None, statistics=READ)
    twin = copy.deepcopy(model)
    twin(*args)
    with pytest.warns(HealthWarning, match="nothing was read"):
        watch.step()
    assert watch.records() == []
    watch.remove()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
