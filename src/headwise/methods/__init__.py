"""The methods of the literature, one file and one class each. Importing this package fills the registry."""

from headwise.methods.attention_dropout import AttentionDropout
from headwise.methods.attention_norm_penalty import AttentionNormPenalty
from headwise.methods.attention_sink import AttentionSink
from headwise.methods.branch_drop import BranchDrop
from headwise.methods.gfsa import GFSA
from headwise.methods.layer_scale import LayerScale
from headwise.methods.lsa import LSA
from headwise.methods.ssmax import SSMax
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
    "LayerScale",
    "NeuTRENO",
    "NuclearDecay",
    "ProductDecay",
    "QKClip",
    "QKNorm",
    "RelaxedAttention",
    "SSMax",
    "SigmaReparam",
    "SoftCap",
    "SpectralNorm",
    "SymmetricAttention",
    "Temperature",
    "ValueResidual",
    "WeightNorm",
    "ZLoss",
]
