"""Windows: draws are per sample, whatever the rows of a call are, or the site is refused by name."""

import pytest
import torch
from own_models import GroupsOfTheirOwn, HeadsInTheBatch, InGroups, SelfAttention, SequenceFirst, Stack, stack, tokens
from rounding import assert_same_to_rounding
from tiny_timm import EXPLICIT, PARTLY, WHOLE, images, made

import headwise
from headwise import AttnScale, DropHead, FeatScale, NeuTRENO, RelaxedAttention
from headwise.attend.core.method import Method

SEEN: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


class RowsSeen(Method):
    """Writes down the queries of each call, and to which sample each row belongs."""

    random = True
    no_neutral = "it changes nothing at all"

    def inputs(self, q, k, v, call):
        SEEN[call.site.name] = (q.detach().clone(), call.per_sample(torch.arange(call.samples)))
        return q, k, v


def rows_and_truth(model, x, name):
    """Return for a site to which sample the core takes each row to belong, and to which it does."""
    model(x)
    queries, said = SEEN[name]
    truth = torch.full((len(queries),), -1)
    for sample in range(len(x)):
        other = x.clone()
        other[sample] += 1.0
        model(other)
        moved = ((SEEN[name][0] - queries).abs() > 1e-6).flatten(1).any(1)
        assert (truth[moved] == -1).all(), "a row holds tokens of two samples"
        truth[moved] = sample
    return said, truth


def swin():
    from timm.layers import set_fused_attn

    set_fused_attn(True, experimental=True)
    try:
        return made(EXPLICIT["Swin"])
    finally:
        set_fused_attn(True)


WINDOWED = {name: lambda name=name: made(WHOLE[name]) for name in ("Hiera", "Twins", "MaxViT")}
WINDOWED |= {"DaViT": lambda: made(PARTLY["DaViT"][0]), "Swin": swin}


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_all_windows_of_a_sample_share_its_draw_on_timm(name, example):
    model, x = WINDOWED[name](), images()
    handle = headwise.regularize(model, RowsSeen(), example=x if example else None)
    # Statistics of a batch would let samples see each other.
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.eval()
    windowed = [s for s in headwise.sites(model) if s.windowed]
    assert windowed
    for site in windowed:
        said, truth = rows_and_truth(model, x, site.name)
        assert said.tolist() == truth.tolist()
    handle.remove()


@pytest.mark.parametrize("name", WINDOWED)
def test_what_an_example_shows_is_what_timm_is_known_for(name):
    declared = {s.name: (s.windowed, s.row_order) for s in headwise.sites(WINDOWED[name]())}
    model = WINDOWED[name]()
    handle = headwise.regularize(model, AttnScale(), example=images())
    for f in handle.fitted:
        if f.site.row_order:
            assert (f.site.windowed, f.site.row_order) == declared[f.site.name]
    assert any(f.site.row_order for f in handle.fitted)
    handle.remove()


@pytest.mark.bits
@pytest.mark.parametrize("order", ["samples first", "windows first"])
def test_the_order_of_windows_of_ones_own_is_seen_on_an_example(order):
    model, x = stack(InGroups, order=order), tokens(length=16)
    plain = model(x)
    handle = headwise.regularize(model, RowsSeen(), DropHead(p=0.0), RelaxedAttention(gamma=0.0), example=x)
    # The same kernel, on windows in another order.
    assert_same_to_rounding(model(x), plain)
    rows = {"samples first": "sample-major", "windows first": "window-major"}[order]
    assert [(f.site.windowed, f.site.row_order) for f in handle.fitted] == [(True, rows)] * 2
    # The rows as the methods see them: those of a sample side by side.
    said, truth = rows_and_truth(model, x, "layers.1")
    assert said.tolist() == truth.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    handle.remove()


@pytest.mark.parametrize("order", ["samples first", "windows first"])
def test_windows_give_the_same_as_whole_samples_would(order):
    """Every head that is dropped is dropped in all windows of a sample: in the layer's output nothing of it is left."""
    x = tokens(length=16)
    model = Stack(InGroups(order))
    torch.nn.init.eye_(model.layers[0].proj.weight)
    torch.nn.init.zeros_(model.layers[0].proj.bias)
    handle = headwise.regularize(model, DropHead(p=0.6), example=x)
    dropped = ((model(x) - x) == 0).view(3, 16, 4, 4)
    per_sample = dropped.all(-1).all(1)
    assert torch.equal(dropped, per_sample[:, None, :, None].expand_as(dropped))
    assert per_sample.any()
    assert not per_sample.all(1).any()
    handle.remove()


def test_unknown_windows_raise_by_name_rather_than_draw_per_window():
    model = stack(InGroups)
    handle = headwise.regularize(model, DropHead(p=0.5))
    with pytest.raises(
        RuntimeError, match=r"layers\.0 is called with 12 rows for 3 samples, while DropHead\(p=0\.5\) acts per sample"
    ):
        model(tokens(length=16))
    with pytest.raises(RuntimeError, match=r"pass example=batch \(with two or more different samples\)"):
        model(tokens(length=16))
    handle.remove()
    # What does not act per sample needs to know nothing.
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.5))
    model(tokens(length=16)).sum().backward()
    handle.remove()


def test_rows_in_no_order_are_refused_after_an_example_too():
    model, x = stack(InGroups, depth=1, order="shuffled"), tokens(length=16)
    handle = headwise.regularize(model, DropHead(p=0.5), example=x)
    with pytest.raises(RuntimeError, match="which rows belong to which sample could not be seen on the example"):
        model(x)
    handle.remove()


@pytest.mark.parametrize("method", [NeuTRENO(), FeatScale()], ids=repr)
@pytest.mark.parametrize("kind", [InGroups, GroupsOfTheirOwn])
def test_methods_that_need_whole_samples_refuse_windows_of_ones_own(method, kind):
    model, x = stack(kind), tokens(length=16)
    with pytest.raises(ValueError, match="window"):
        headwise.regularize(model, method, example=x)
    if isinstance(method, NeuTRENO):
        handle = headwise.regularize(model, method)
    elif kind is GroupsOfTheirOwn:
        return
    else:
        # It learns parameters, whose shapes an example of one row a sample may show.
        handle = headwise.regularize(model, method, example=tokens(length=4))
    with pytest.raises(
        RuntimeError, match=r"layers\.\d is called with 12 rows for 3 samples, as layers that attend in windows are"
    ):
        model(x)
    handle.remove()


@pytest.mark.parametrize(("heads_first", "heads"), [(False, 4), (True, 4), (True, 2), (False, 2)])
def test_a_dimension_of_windows_is_told_from_that_of_heads(heads_first, heads):
    # 16 tokens are 4 windows: as many as heads where the sizes alone cannot tell.
    x = tokens(length=16)
    model = Stack(GroupsOfTheirOwn(heads_first, heads))
    torch.nn.init.eye_(model.layers[0].proj.weight)
    torch.nn.init.zeros_(model.layers[0].proj.bias)
    plain = model(x)
    handle = headwise.regularize(model, DropHead(p=0.0))
    torch.testing.assert_close(model(x), plain)
    handle.set(DropHead, p=0.6)
    dropped = ((model(x) - x) == 0).view(3, 16, heads, -1)
    per_sample = dropped.all(-1).all(1)
    assert torch.equal(dropped, per_sample[:, None, :, None].expand_as(dropped))
    assert per_sample.any()
    handle.remove()


def test_heads_that_cannot_be_told_from_windows_raise_by_name():
    model = Stack(GroupsOfTheirOwn(heads_first=True))
    model.layers[0].num_heads = 4
    handle = headwise.regularize(model, DropHead(p=0.5))
    # Contiguous copies hide how the projection laid its heads.
    split = model.layers[0].split
    model.layers[0].split = lambda x: tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in split(x))
    with pytest.raises(
        RuntimeError, match=r"layers\.0 calls attention with q of shape \(3, 4, 4, 4, 4\), and which dimension"
    ):
        model(tokens(length=16))
    del model.layers[0].split
    handle.remove()


def test_heads_folded_into_the_batch_are_unfolded_once_an_example_showed_them():
    model, x = stack(HeadsInTheBatch), tokens()
    plain = model(x)
    handle = headwise.regularize(model, DropHead(p=0.5))
    with pytest.raises(
        RuntimeError, match=r"has 4 heads and calls attention with q of shape \(12, 8, 4\) for 3 samples"
    ):
        model(x)
    handle.remove()
    handle = headwise.regularize(model, RowsSeen(), DropHead(p=0.0), example=x)
    torch.testing.assert_close(model(x), plain)
    assert SEEN["layers.0"][0].shape == (3, 4, 8, 4)
    said, truth = rows_and_truth(model, x, "layers.1")
    assert said.tolist() == truth.tolist()
    handle.remove()


def test_heads_before_samples_are_refused():
    model, x = stack(HeadsInTheBatch), tokens()
    for layer in model.layers:
        layer.order = "heads first"
    handle = headwise.regularize(model, DropHead(p=0.5), example=x)
    with pytest.raises(RuntimeError, match="whether its first dimension holds heads, and in which order, is not known"):
        model(x)
    handle.remove()


def test_a_batch_that_stands_second_is_seen_on_an_example():
    model, x = SequenceFirst(), tokens().transpose(0, 1)
    handle = headwise.regularize(model, DropHead(p=0.5))
    with pytest.raises(RuntimeError, match="attn is called with 3 rows for 8 samples"):
        model(x)
    handle.remove()
    handle = headwise.regularize(model, DropHead(p=0.5), example=x)
    model(x).sum().backward()
    assert [(f.site.windowed, f.site.row_order) for f in handle.fitted] == [(False, "own")]
    handle.remove()


@pytest.mark.parametrize("example", [None, "one sample", "samples all alike"])
def test_an_example_that_shows_nothing_leaves_the_order_unknown(example):
    x = {None: None, "one sample": tokens(1, 16), "samples all alike": tokens(1, 16).expand(3, -1, -1).clone()}[example]
    model = stack(InGroups)
    handle = headwise.regularize(model, DropHead(p=0.5), example=x)
    if example == "samples all alike":
        model(tokens(length=16))
    else:
        with pytest.raises(RuntimeError, match="which rows belong to which sample"):
            model(tokens(length=16))
    handle.remove()


class OnAList(torch.nn.Module):
    """Takes a list of tensors, so that the batch of the whole is not known."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, parts):
        return self.layer(torch.cat(parts))


def test_where_the_batch_of_the_whole_is_unknown_rows_are_taken_for_samples():
    model = OnAList(SelfAttention())
    handle = headwise.regularize(model, RowsSeen(), DropHead(p=0.5))
    model([tokens(2), tokens(3)])
    assert SEEN["layer"][1].tolist() == [0, 1, 2, 3, 4]
    handle.remove()


def test_windows_need_the_batch_of_the_whole():
    model = OnAList(WINDOWED["MaxViT"]().stages[0].blocks[0].attn_block)
    handle = headwise.regularize(model, DropHead(p=0.5))
    with pytest.raises(RuntimeError, match="the batch of the whole model is not known here"):
        model([torch.randn(2, 8, 8, 8)])
    handle.remove()


def test_a_part_of_the_model_called_alone_does_not_use_the_batch_of_an_earlier_call():
    model = stack()
    handle = headwise.regularize(model, RowsSeen(), DropHead(p=0.5))
    model(tokens(3))
    model.layers[0](tokens(5))
    assert SEEN["layers.0"][1].tolist() == [0, 1, 2, 3, 4]
    handle.remove()


# Shifted windows


def calls_and_outputs(model, method, x):
    """Gives each site's call and its output per head."""
    handle, seen = headwise.regularize(model.train(), method), {}
    for f in handle.fitted:
        f.armed, f.observer = True, lambda call, out: seen.setdefault(call.site.name, (call, out.detach()))
    model(x)
    handle.remove()
    return seen


def test_keys_of_other_regions_are_no_allowed_keys_in_timms_shifted_windows():
    model = swin()
    seen = calls_and_outputs(model, RelaxedAttention(gamma=0.5), images())
    plain, shifted = (seen[f"layers.0.blocks.{i}.attn"] for i in (0, 1))
    assert plain[0].allowed().all()
    call, out = shifted
    regions = model.layers[0].blocks[1].attn_mask == 0
    allowed = regions.repeat(3, 1, 1)[:, None].expand(-1, 2, -1, -1)
    assert not allowed.all()
    assert torch.equal(call.allowed().expand_as(allowed), allowed)
    bias = model.layers[0].blocks[1].attn._get_rel_pos_bias()
    logits = (call.q @ call.k.mT * call.scale + bias).masked_fill(~allowed, -torch.inf)
    mixed = 0.5 * logits.softmax(-1) + 0.5 * allowed / allowed.sum(-1, keepdim=True)
    assert (out - mixed @ call.v).abs().max() < 1e-5


def test_statistics_count_the_keys_of_a_shifted_windows_own_region():
    model = swin()
    watch = headwise.watch(model.train(), every=1, on_alert=None, statistics=["entropy_share"])
    seen = {}
    block = model.layers[0].blocks[1].attn
    hook = block.qkv.register_forward_hook(lambda m, args, out: seen.update(qkv=out.detach()))
    model(images())
    watch.step()
    hook.remove()
    q, k, _ = seen["qkv"].unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    allowed = (model.layers[0].blocks[1].attn_mask == 0).repeat(3, 1, 1)[:, None]
    logits = q @ k.mT * q.shape[-1] ** -0.5 + block._get_rel_pos_bias().detach()
    p = logits.masked_fill(~allowed, -torch.inf).softmax(-1).double()
    share = -torch.special.xlogy(p, p).sum(-1) / allowed.sum(-1).log()
    values = [r["value"] for r in watch.records() if r["site"] == "layers.0.blocks.1.attn"]
    assert values == pytest.approx(share.mean((0, 2)).tolist(), rel=1e-4)
    watch.remove()


def test_a_bias_of_minus_100_is_an_allowed_key_where_windows_are_not_shifted():
    model = swin()
    with torch.no_grad():
        model.layers[0].blocks[0].attn.relative_position_bias_table[0] = -100.0
    call, _ = calls_and_outputs(model, RelaxedAttention(gamma=0.5), images())["layers.0.blocks.0.attn"]
    assert call.mask.min() == -100
    assert call.allowed().all()
