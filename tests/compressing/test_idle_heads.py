"""Idle heads are removed by compression as ablation switches them off."""

import pytest
import torch
from test_compress import HOSTS

import headwise
from headwise.attend.projections.capture import feed


def outputs(model, example):
    with torch.no_grad():
        out = feed(model.eval(), example)
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.parametrize("name", HOSTS)
def test_removed_heads_write_what_ablated_heads_do(name):
    make, example = HOSTS[name]
    torch.manual_seed(0)
    model = make()
    parts = "vo" if any(site.rope or site.qk_norm for site in headwise.sites(model)) else "both"
    # the layers that compress can reach
    chosen = {
        key.rpartition(" ")[0] for key in headwise.compress(_copy(make), 1.0, parts=parts, example=example).refused
    }
    sites = [site.name for site in headwise.sites(model) if site.name not in chosen]
    plain = outputs(model, example)
    handle = headwise.regularize(model, allow_none=True, example=example)
    for site in sites:
        handle.ablate(site, [1, 3])
    wanted = outputs(model, example)
    handle.remove()
    assert not torch.allclose(wanted, plain)
    done = headwise.compress(model, 1.0, parts=parts, example=example, idle={site: [3, 1] for site in sites})
    torch.testing.assert_close(outputs(model, example), wanted, rtol=1e-4, atol=1e-4)
    assert done.attention.after < done.attention.before


def _copy(make):
    torch.manual_seed(0)
    return make()


def test_an_idle_head_keeps_one_row():
    model = _copy(HOSTS["stacked"][0])
    done = headwise.compress(model, 1.0, idle={"blocks.1.attn": [2]}, example=HOSTS["stacked"][1])
    ranks = {(cut.site, cut.part): cut.ranks for cut in done.layers}
    assert ranks["blocks.1.attn", "vo"] == (8, 8, 1, 8) and ranks["blocks.1.attn", "qk"] == (8, 8, 1, 8)
    assert ranks["blocks.0.attn", "vo"] == (8, 8, 8, 8)


def test_a_layer_is_given_by_its_index_its_name_or_both():
    by_name, by_index = _copy(HOSTS["stacked"][0]), _copy(HOSTS["stacked"][0])
    headwise.compress(by_name, 1.0, idle={"blocks.0.attn": [1], "blocks.1.attn": [0, 2]})
    done = headwise.compress(by_index, 1.0, idle={0: [1], 1: [2], "blocks.1.attn": [0]})
    assert {cut.site: cut.ranks for cut in done.layers if cut.part == "vo"} == {
        "blocks.0.attn": (8, 1, 8, 8),
        "blocks.1.attn": (1, 8, 1, 8),
    }
    for name, x in by_name.state_dict().items():
        torch.testing.assert_close(by_index.state_dict()[name], x)


def test_a_layer_without_any_head_left_writes_its_bias():
    model = _copy(HOSTS["stacked"][0])
    headwise.compress(model, 1.0, idle={"blocks.1.attn": range(4)}, example=HOSTS["stacked"][1])
    out = model.blocks[1].attn(torch.randn(2, 6, 32))
    torch.testing.assert_close(out, model.blocks[1].attn.proj.inner.bias.expand(2, 6, 32))


def test_heads_that_cannot_be_removed_are_refused_and_nothing_changes():
    model = _copy(HOSTS["stacked"][0])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for idle, settings, error, message in (
        (
            {"blocks.0.attm": [1]},
            {},
            ValueError,
            r"no attention layer 'blocks\.0\.attm'\. Did you mean 'blocks\.0\.attn'",
        ),
        ({"blocks.0.attn": [1, 4]}, {}, ValueError, r"idle: heads of blocks\.0\.attn are 0 to 3, got 4"),
        ({"blocks.0.attn": 1}, {}, TypeError, "idle must map names or indices of sites to lists of heads"),
        ({2: [1]}, {}, ValueError, "idle: layers are from 0 to 1, as headwise.sites"),
        ({True: [1]}, {}, TypeError, "idle: a layer is an index or the name of an attention layer, got True"),
        ({"blocks.0.attn": [1], 0: [7]}, {}, ValueError, r"idle: heads of blocks\.0\.attn are 0 to 3, got 7"),
        ({"blocks.0.attn": [1]}, {"parts": "qk"}, ValueError, "idle heads are removed from values and output"),
        (
            {"blocks.0.attn": [1]},
            {"where": ["blocks.1.attn"]},
            ValueError,
            r"blocks\.0\.attn: its idle heads cannot be",
        ),
    ):
        with pytest.raises(error, match=message):
            headwise.compress(model, idle=idle, **settings)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
