"""Which attention layers of timm are reached, and what is said of the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_timm import EXPLICIT, PARTLY, WHOLE, images, made, run

import headwise
from headwise import DropColumn, DropHead, NeuTRENO
from headwise.attend import hosts


def reach(model):
    """Return the classes of reached and of unreachable layers, with the reasons of the latter."""
    found = hosts.find(model)
    reached = {type(f.site.module).__name__ for f in found if f.adapter is not None}
    return reached, {type(f.site.module).__name__: f.reason for f in found if f.adapter is None}


@pytest.mark.parametrize("name", PARTLY)
def test_what_is_reached_acts_and_what_is_not_is_listed_with_the_reason(name):
    make, unreachable = PARTLY[name]
    model, x = made(make), images()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = run(model, x, training=True).detach()
    reached, left = reach(model)
    assert reached
    assert "|".join(sorted(left, reverse=True)) == unreachable
    model.load_state_dict(before)
    handle = headwise.regularize(model, DropColumn(p=0.9))
    assert (run(model, x, training=True) - plain).abs().max() > 1e-5
    handle.loss()
    rows = handle.report().rows
    assert {row.status for row in rows} == {"regularized", "unreachable"}
    for row in rows:
        if row.status == "unreachable":
            what = "channel to channel" if re.search("XCA|Channel", unreachable) else "computes its own attention"
            assert what in row.detail
    handle.remove()


@pytest.mark.parametrize("name", PARTLY)
def test_asking_for_an_unreachable_layer_by_name_is_an_error(name):
    model = made(PARTLY[name][0])
    layer = next(f.site.name for f in hosts.find(model) if f.adapter is None)
    with pytest.raises(ValueError, match=re.escape(layer) + r" \(\w+\) cannot be reached: it (attends|computes)"):
        headwise.regularize(model, DropHead(p=0.2), where=[layer])


@pytest.mark.parametrize("name", EXPLICIT)
def test_an_explicit_softmax_is_refused_by_name_with_reason_and_remedy(name):
    model = made(EXPLICIT[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=f"none of the attention layers of {type(model).__name__} can be reached"
    ) as caught:
        headwise.regularize(model, DropHead(p=0.2))
    text = str(caught.value)
    for found in hosts.find(model):
        assert f"{found.site.name} ({type(found.site.module).__name__}) cannot be reached: it" in text
    assert "explicit softmax" in text
    assert "switch it on" in text or "call F.scaled_dot_product_attention in it" in text
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["Swin", "Visformer", "XCiT"])
def test_the_remedy_that_is_named_works(name):
    from timm.layers import set_fused_attn

    make = EXPLICIT[name] if name in EXPLICIT else PARTLY[name][0]
    set_fused_attn(True, experimental=True)
    try:
        model, x = made(make), images()
    finally:
        set_fused_attn(True)
    if name == "XCiT":
        assert "channel to channel" in reach(model)[1]["XCA"]
        return
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = run(model, x, training=True).detach()
    model.load_state_dict(before)
    handle = headwise.regularize(model, DropHead(p=0.7))
    assert (run(model, x, training=True) - plain).abs().max() > 1e-4
    assert {row.status for row in handle.report().rows} == {"regularized"}
    handle.remove()


@pytest.mark.parametrize("name", WHOLE)
def test_no_layer_of_a_reached_model_is_left_out(name):
    model = made(WHOLE[name])
    assert reach(model)[1] == {}


@pytest.mark.parametrize("name", ["Hiera", "Twins", "PVTv2", "MaxViT", "CaiT", "XCiT"])
def test_carrying_values_is_refused_where_token_order_or_count_differ(name):
    model = made(WHOLE[name] if name in WHOLE else PARTLY[name][0])
    with pytest.raises(
        ValueError, match=r"no attention layer is left for NeuTRENO|applies to no layer above it"
    ) as caught:
        headwise.regularize(model, NeuTRENO())
    why = {
        "Hiera": "windows",
        "Twins": "windows",
        "MaxViT": "windows",
        "PVTv2": "pools",
        "CaiT": "cross",
        "XCiT": "cross",
    }
    assert why[name] in str(caught.value)


@pytest.mark.grid
def test_a_subprocess_imports_timm_with_the_stub_on_its_path():
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    code = "import torchvision_stub, timm; print(timm.__version__)"
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("1."), done.stderr
