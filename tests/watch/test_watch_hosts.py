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
