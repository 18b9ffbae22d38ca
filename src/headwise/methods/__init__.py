"""The methods of the literature, one file and one class each. Importing this package fills the registry.

Each import makes a method public here and as `headwise.<name>`, also for type checkers.
"""

from typing import TYPE_CHECKING

from headwise.methods.attention_dropout import AttentionDropout as AttentionDropout
from headwise.methods.attention_norm_penalty import AttentionNormPenalty as AttentionNormPenalty
from headwise.methods.attention_sink import AttentionSink as AttentionSink
from headwise.methods.attn_scale import AttnScale as AttnScale
from headwise.methods.branch_drop import BranchDrop as BranchDrop
from headwise.methods.contra_norm import ContraNorm as ContraNorm
from headwise.methods.decorrelation import Decorrelation as Decorrelation
from headwise.methods.differential_attention import DifferentialAttention as DifferentialAttention
from headwise.methods.disagreement import Disagreement as Disagreement
from headwise.methods.drop_attention import DropAttention as DropAttention
from headwise.methods.drop_column import DropColumn as DropColumn
from headwise.methods.drop_head import DropHead as DropHead
from headwise.methods.drop_key import DropKey as DropKey
from headwise.methods.entropy_penalty import EntropyPenalty as EntropyPenalty
from headwise.methods.feat_scale import FeatScale as FeatScale
from headwise.methods.forgetting_attention import ForgettingAttention as ForgettingAttention
from headwise.methods.gated_norm import GatedNorm as GatedNorm
from headwise.methods.gated_output import GatedOutput as GatedOutput
from headwise.methods.gfsa import GFSA as GFSA
from headwise.methods.input_noise import InputNoise as InputNoise
from headwise.methods.interleaved_heads import InterleavedHeads as InterleavedHeads
from headwise.methods.laser import LASER as LASER
from headwise.methods.layer_scale import LayerScale as LayerScale
from headwise.methods.linear_attention import LinearAttention as LinearAttention
from headwise.methods.lsa import LSA as LSA
from headwise.methods.neutreno import NeuTRENO as NeuTRENO
from headwise.methods.nuclear_decay import NuclearDecay as NuclearDecay
from headwise.methods.product_decay import ProductDecay as ProductDecay
from headwise.methods.qk_clip import QKClip as QKClip
from headwise.methods.qk_norm import QKNorm as QKNorm
from headwise.methods.qk_rates import QKRates as QKRates
from headwise.methods.re_attention import ReAttention as ReAttention
from headwise.methods.relaxed_attention import RelaxedAttention as RelaxedAttention
from headwise.methods.sigma_reparam import SigmaReparam as SigmaReparam
from headwise.methods.soft_cap import SoftCap as SoftCap
from headwise.methods.softpick import Softpick as Softpick
from headwise.methods.spectral_cap import SpectralCap as SpectralCap
from headwise.methods.spectral_norm import SpectralNorm as SpectralNorm
from headwise.methods.ssmax import SSMax as SSMax
from headwise.methods.stable_softmax import StableSoftmax as StableSoftmax
from headwise.methods.symmetric_attention import SymmetricAttention as SymmetricAttention
from headwise.methods.temperature import Temperature as Temperature
from headwise.methods.value_norm import ValueNorm as ValueNorm
from headwise.methods.value_residual import ValueResidual as ValueResidual
from headwise.methods.weight_norm import WeightNorm as WeightNorm
from headwise.methods.xsa import XSA as XSA
from headwise.methods.z_loss import ZLoss as ZLoss

# Type checkers read the imports above and do not support a computed list.
if not TYPE_CHECKING:
    __all__ = sorted(name for name, value in globals().items() if isinstance(value, type))
