"""Tiny randomly initialised models of diffusers with batches that fit them; nothing is downloaded.

`MODELS["Flux"].build()` gives a model in eval mode, `.batch()` what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2


@dataclass(frozen=True)
class Tiny:
    """One model: how it is built and called, and how many of its layers are self and cross attention.

    Attributes:
        joint: sites that take image and text apart.
        text: how many text tokens stand among how many tokens in its joint calls, and whether they come first.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], dict[str, Any]]
    sites: tuple[int, int]
    joint: int = 0
    text: tuple[int, int, bool] | None = None

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model in eval mode, with weights large enough that attention is far from uniform."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # gates and last layers start at 0 there, which would hide what attention does
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
                elif not parameter.any():
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=g))
        return model.eval()

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """Make a batch of two samples."""
        return self.inputs(torch.Generator().manual_seed(seed))


def output(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return what a model predicts."""
    return model(**batch).sample


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=g)


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _flux_batch(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(g, 9, 4), "encoder_hidden_states": _noise(g, 5, 12), "pooled_projections": _noise(g, 8),
        "timestep": torch.rand(BATCH, generator=g), "img_ids": torch.rand(9, 3, generator=g), "txt_ids": torch.zeros(5,
        3),
    }  # fmt: skip


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=8, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip


def _sd3_batch(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(g, 4, 8, 8), "encoder_hidden_states": _noise(g, 5, 12), "pooled_projections": _noise(g,
        8),
        "timestep": torch.tensor([3, 7]),
    }  # fmt: skip


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=8,
    )


def _dit_batch(g: torch.Generator) -> dict[str, Any]:
    return {"hidden_states": _noise(g, 4, 8, 8), "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12,
        freq_dim=16,
        ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def _wan_batch(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(g, 4, 2, 4, 4), "timestep": torch.tensor([3, 7]), "encoder_hidden_states": _noise(g, 5,
        12)
    }  # fmt: skip


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12, attention_head_dim=2,
    )  # fmt: skip


def _unet_batch(g: torch.Generator) -> dict[str, Any]:
    return {"sample": _noise(g, 4, 8, 8), "timestep": torch.tensor([3, 7]), "encoder_hidden_states": _noise(g, 5, 12)}


MODELS = {
    "Flux": Tiny(_flux, _flux_batch, (2, 0), joint=1, text=(5, 14, True)),
    "SD3": Tiny(_sd3, _sd3_batch, (2, 0), joint=2, text=(5, 21, False)),
    "DiT": Tiny(_dit, _dit_batch, (2, 0)),
    "Wan": Tiny(_wan, _wan_batch, (2, 2)),
    "UNet": Tiny(_unet, _unet_batch, (4, 4)),
}
