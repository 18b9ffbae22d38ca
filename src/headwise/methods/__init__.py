"""The methods of the literature, one file and one class each. Importing this package fills the registry."""

from headwise.methods.attention_dropout import AttentionDropout
from headwise.methods.attention_norm_penalty import AttentionNormPenalty
from headwise.methods.attention_sink import AttentionSink
from headwise.methods.attn_scale import AttnScale
from headwise.methods.branch_drop import BranchDrop
from headwise.methods.contra_norm import ContraNorm
from headwise.methods.decorrelation import Decorrelation
from headwise.methods.differential_attention import DifferentialAttention
from headwise.methods.disagreement import Disagreement
from headwise.methods.drop_attention import DropAttention
from headwise.methods.drop_column import DropColumn
from headwise.methods.drop_head import DropHead
from headwise.methods.drop_key import DropKey
from headwise.methods.entropy_penalty import EntropyPenalty
from headwise.methods.feat_scale import FeatScale
from headwise.methods.forgetting_attention import ForgettingAttention
from headwise.methods.gated_output import GatedOutput
from headwise.methods.gfsa import GFSA
from headwise.methods.input_noise import InputNoise
from headwise.methods.interleaved_heads import InterleavedHeads
from headwise.methods.layer_scale import LayerScale
from headwise.methods.linear_attention import LinearAttention
from headwise.methods.lsa import LSA
from headwise.methods.neutreno import NeuTRENO
from headwise.methods.nuclear_decay import NuclearDecay
from headwise.methods.product_decay import ProductDecay
from headwise.methods.qk_clip import QKClip
from headwise.methods.qk_norm import QKNorm
from headwise.methods.qk_rates import QKRates
from headwise.methods.re_attention import ReAttention
from headwise.methods.relaxed_attention import RelaxedAttention
from headwise.methods.sigma_reparam import SigmaReparam
from headwise.methods.soft_cap import SoftCap
from headwise.methods.spectral_cap import SpectralCap
from headwise.methods.spectral_norm import SpectralNorm
from headwise.methods.ssmax import SSMax
from headwise.methods.symmetric_attention import SymmetricAttention
from headwise.methods.temperature import Temperature
from headwise.methods.value_residual import ValueResidual
from headwise.methods.weight_norm import WeightNorm
from headwise.methods.xsa import XSA
from headwise.methods.z_loss import ZLoss

__all__ = [
    "GFSA",
    "LSA",
    "XSA",
    "AttentionDropout",
    "AttentionNormPenalty",
    "AttentionSink",
    "AttnScale",
    "BranchDrop",
    "ContraNorm",
    "Decorrelation",
    "DifferentialAttention",
    "Disagreement",
    "DropAttention",
    "DropColumn",
    "DropHead",
    "DropKey",
    "EntropyPenalty",
    "FeatScale",
    "ForgettingAttention",
    "GatedOutput",
    "InputNoise",
    "InterleavedHeads",
    "LayerScale",
    "LinearAttention",
    "NeuTRENO",
    "NuclearDecay",
    "ProductDecay",
    "QKClip",
    "QKNorm",
    "QKRates",
    "ReAttention",
    "RelaxedAttention",
    "SSMax",
    "SigmaReparam",
    "SoftCap",
    "SpectralCap",
    "SpectralNorm",
    "SymmetricAttention",
    "Temperature",
    "ValueResidual",
    "WeightNorm",
    "ZLoss",
]
