import pytest
import torch
from tiny_models import FAMILIES

import headwise

CASES = [
    (name, padding) for name, family in FAMILIES.items() for padding in family.paddings if name not in ("CLIP", "Swin")
]


def attention_maps(family, batch):
    """Gives the model's own attention weights per site name's place, from its eager implementation."""
    model = family.build("eager").train()
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    groups = [output.get(key) for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")]
    return [group for group in groups if group is not None]


def entropies(weights, real):
    entropy = -torch.special.xlogy(weights.double(), weights.double()).sum(-1)
    if real is None:
        return entropy.mean((0, 2))
    return torch.stack([entropy[:, h][real.bool()].mean() for h in range(weights.shape[1])])


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_entropy_of_every_head_is_that_of_the_models_own_weights(name, padding):
    family = FAMILIES[name]
    batch = family.batch(padding)
    model = family.build().train()
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["attention_entropy"])
    family.logits(model, batch)
    watch.step()
    found = {}
    for record in watch.records():
        found.setdefault(record["site"], []).append(record["value"])
    watch.remove()
    assert len(found) == family.sites[0]
    if name == "GptOss":
        # Its weights leave the sink out, whose mass is part of the entropy; the exactness tests compare that case.
        return
    expected = []
    masks = [batch.get("attention_mask"), batch.get("decoder_attention_mask")]
    groups = attention_maps(family, batch)
    for group, kind in zip(groups, ("one",) if len(groups) == 1 else ("encoder", "decoder", "cross")):
        for weights in group:
            real = masks[1] if kind in ("decoder", "cross") else masks[0]
            real = None if real is None or real.shape[1] != weights.shape[2] else real
            expected.append(entropies(weights, real))
    for site, values in found.items():
        value = torch.tensor(values, dtype=torch.float64)
        near = min(float((value - one).abs().max()) for one in expected if one.shape == value.shape)
        assert near < 1e-4, f"{site}: {values} is none of {[e.tolist() for e in expected]}"


def test_a_model_in_fp64_gives_the_figures_of_one_in_fp32():
    from small_models import HOSTS

    host, found = HOSTS["llama"], {}
    model = host.make().train()
    for dtype in (torch.float32, torch.float64):
        watch = headwise.watch(model.to(dtype), every=1)
        host.run(model)
        watch.step()
        found[dtype] = {(r["statistic"], r["site"], r["head"]): r["value"] for r in watch.records()}
        watch.remove()
    assert found[torch.float32].keys() == found[torch.float64].keys() and len(found[torch.float64]) > 50
    for key, value in found[torch.float64].items():
        assert found[torch.float32][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def figures(model, *calls):
    watch = headwise.watch(model, every=1, closer=None, on_alert=None)
    for call in calls:
        model(*call[:2], **call[2])
    watch.step()
    found = {(r["site"], r["statistic"], r["head"]): r["value"] for r in watch.records()}
    watch.remove()
    return found


def test_padding_counts_in_no_figure_of_an_encoder_or_a_decoder_that_masks_it():
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 4, 2, 2, 32, 0.0, batch_first=True)
    source, target, causal = torch.randn(3, 8, 16), torch.randn(3, 9, 16), torch.ones(9, 9, dtype=torch.bool).triu(1)
    sources, targets = (6, 8, 4), (9, 5, 7)
    unread, unwritten = (
        torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]
        for x, lengths in ((source, sources), (target, targets))
    )
    masks = {"src_key_padding_mask": unread, "memory_key_padding_mask": unread, "tgt_key_padding_mask": unwritten}
    alone = [
        (source[at : at + 1, :read], target[at : at + 1, :written], {"tgt_mask": causal[:written, :written]})
        for at, (read, written) in enumerate(zip(sources, targets, strict=True))
    ]
    found = figures(model, (source, target, {"tgt_mask": causal, **masks}))
    assert {"later_keys", "logit_bound", "attention_entropy", "sink_mass"} <= {name for _, name, _ in found}
    assert found == pytest.approx(figures(model, *alone), rel=1e-3, abs=1e-5, nan_ok=True)
