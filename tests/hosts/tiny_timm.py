"""Tiny timm models, with weights that are large enough for every layer to matter."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torchvision_stub  # noqa: F401  (before timm)
from torch import Tensor, nn

Make = Callable[..., nn.Module]
FLAT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
WIDTHS, HEADS = (8, 16, 16, 16), (1, 2, 2, 2)


def _named(name: str, **settings: Any) -> Make:
    def make(**more: Any) -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=3, **settings, **more)

    return make


def _class(path: str, **settings: Any) -> Make:
    def make(**more: Any) -> nn.Module:
        module, _, name = path.rpartition(".")
        return getattr(import_module(f"timm.models.{module}"), name)(num_classes=3, **settings, **more)

    return make


def _maxvit(attn_drop_rate: float = 0.0) -> nn.Module:
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

    attention = MaxxVitTransformerCfg(dim_head=4, window_size=(4, 4), attn_drop=attn_drop_rate, rel_pos_type="bias")
    config = MaxxVitCfg(
        embed_dim=(8, 16), depths=(1, 1), block_type=("M", "M"), stem_width=8, transformer_cfg=attention
    )
    return MaxxVit(config, img_size=32, num_classes=3)


def _mvit() -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    return MultiScaleVit(MultiScaleVitCfg(depths=(1, 1), embed_dim=16, num_heads=1), img_size=(32, 32), num_classes=3)


# Every attention layer of these is reached.
WHOLE: dict[str, Make] = {
    "ViT": _named("vit_tiny_patch16_224", **FLAT),
    "DeiT": _named("deit_tiny_distilled_patch16_224", **FLAT),
    "EVA-02": _named("eva02_tiny_patch14_224", **FLAT),
    "BEiT": _named("beit_base_patch16_224", **FLAT),
    "SigLIP": _named("vit_base_patch16_siglip_224", **FLAT),
    "NaFlexViT": _named("naflexvit_base_patch16_gap", **FLAT),
    "Hiera": _named("hiera_tiny_224", img_size=(32, 32), embed_dim=8, num_heads=2, stages=(1, 1, 1, 1)),
    "Twins": _class(
        "twins.Twins",
        img_size=32,
        patch_size=2,
        embed_dims=WIDTHS,
        num_heads=HEADS,
        depths=(2, 2, 1, 1),
        wss=(4, 4, 4, 4),
    ),
    "PVTv2": _class("pvt_v2.PyramidVisionTransformerV2", embed_dims=WIDTHS, num_heads=HEADS, depths=(1, 1, 1, 1)),
    "MaxViT": _maxvit,
}
# Those that take a rate of attention dropout on to the fused call.
DROPPING = ("ViT", "EVA-02", "BEiT", "NaFlexViT", "Twins", "PVTv2", "MaxViT")
# Some layers of these are reached: what each unreachable layer is.
PARTLY: dict[str, tuple[Make, str]] = {
    "CaiT": (_named("cait_xxs24_224", **FLAT), "TalkingHeadAttn"),
    "XCiT": (_named("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4), "XCA"),
    "DaViT": (_class("davit.DaVit", depths=(1, 1), embed_dims=(8, 16), num_heads=(2, 2), window_size=4),
    "ChannelAttention"),
    "VOLO": (
        _class("volo.VOLO", layers=[1, 1], img_size=32, embed_dims=[16, 16], num_heads=[2, 2], downsamples=(False,
        False),
               outlook_attention=(True, False), stem_hidden_dim=8, patch_size=4, use_aux_head=False),
        "OutlookAttention|ClassAttention",
    ),
    "CrossViT": (
        _class("crossvit.CrossVit", img_size=32, embed_dim=(16, 32), depth=((1, 1, 1),), num_heads=(2, 2)),
        "CrossAttention",
    ),
}  # fmt: skip
# None of these is reached: explicit softmax.
EXPLICIT: dict[str, Make] = {
    "Swin": _class(
        "swin_transformer.SwinTransformer",
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=8,
        depths=(2,),
        num_heads=(2,),
    ),
    "SwinV2": _class(
        "swin_transformer_v2.SwinTransformerV2",
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=8,
        depths=(2,),
        num_heads=(2,),
    ),
    "MViTv2": _mvit,
    "LeViT": _class("levit.Levit", img_size=32, embed_dim=(16, 16), key_dim=8, depth=(1, 1), num_heads=(2, 2)),
    "TNT": _class("tnt.TNT", img_size=32, embed_dim=16, inner_dim=8, depth=1, num_heads_inner=2, num_heads_outer=2),
    "ConViT": _named("convit_tiny", **FLAT),
    "Visformer": _class(
        "visformer.Visformer", img_size=32, init_channels=8, embed_dim=32, depth=(1, 1, 1), num_heads=2
    ),
    "GCViT": _class(
        "gcvit.GlobalContextVit", img_size=32, window_size=(4, 4), embed_dim=8, depths=(1, 1), num_heads=(2, 2)
    ),
}


def made(make: Make, seed: int = 0, **settings: Any) -> nn.Module:
    """Make a model whose weights are drawn anew, so that no layer starts without effect."""
    torch.manual_seed(seed)
    model = make(**settings)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "gamma" in name:
            nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def images(batch: int = 3, seed: int = 5) -> Tensor:
    """Draw a batch of images (B, 3, 32, 32)."""
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, x: Tensor, *, training: bool, seed: int = 3) -> Tensor:
    """Run the model in a mode, its own randomness from a seed."""
    torch.manual_seed(seed)
    return model.train(training)(x)
