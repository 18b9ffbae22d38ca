"""The methods: one file each. Importing this package fills the registry."""

from .attention_norm_penalty import AttentionNormPenalty
from .attn_scale import AttnScale
from .decorrelation import Decorrelation
from .disagreement import Disagreement
from .drop_attention import DropAttention
from .drop_column import DropColumn
from .drop_head import DropHead
from .drop_key import DropKey
from .entropy_penalty import EntropyPenalty
from .feat_scale import FeatScale
from .gated_output import GatedOutput
from .input_noise import InputNoise
from .neutreno import NeuTRENO
from .nuclear_decay import NuclearDecay
from .product_decay import ProductDecay
from .qk_clip import QKClip
from .qk_norm import QKNorm
from .relaxed_attention import RelaxedAttention
from .sigma_reparam import SigmaReparam
from .soft_cap import SoftCap
from .spectral_norm import SpectralNorm
from .symmetric_attention import SymmetricAttention
from .temperature import Temperature
from .value_residual import ValueResidual
from .weight_norm import WeightNorm

__all__ = [
    "AttentionNormPenalty",
    "AttnScale",
    "Decorrelation",
    "Disagreement",
    "DropAttention",
    "DropColumn",
    "DropHead",
    "DropKey",
    "EntropyPenalty",
    "FeatScale",
    "GatedOutput",
    "InputNoise",
    "NeuTRENO",
    "NuclearDecay",
    "ProductDecay",
    "QKClip",
    "QKNorm",
    "RelaxedAttention",
    "SigmaReparam",
    "SoftCap",
    "SpectralNorm",
    "SymmetricAttention",
    "Temperature",
    "ValueResidual",
    "WeightNorm",
]
