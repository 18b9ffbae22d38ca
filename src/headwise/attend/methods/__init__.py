"""The methods of the literature, one file and one class each. Importing this package fills the registry.

Each import makes a method public here and as `headwise.<name>`, also for type checkers.
"""

from typing import TYPE_CHECKING

from headwise.attend.methods.attention_dropout import AttentionDropout as AttentionDropout
from headwise.attend.methods.attention_norm_penalty import AttentionNormPenalty as AttentionNormPenalty
from headwise.attend.methods.attention_sink import AttentionSink as AttentionSink
from headwise.attend.methods.attn_scale import AttnScale as AttnScale
from headwise.attend.methods.branch_drop import BranchDrop as BranchDrop
from headwise.attend.methods.contra_norm import ContraNorm as ContraNorm
from headwise.attend.methods.decorrelation import Decorrelation as Decorrelation
from headwise.attend.methods.differential_attention import DifferentialAttention as DifferentialAttention
from headwise.attend.methods.disagreement import Disagreement as Disagreement
from headwise.attend.methods.drop_attention import DropAttention as DropAttention
from headwise.attend.methods.drop_column import DropColumn as DropColumn
from headwise.attend.methods.drop_head import DropHead as DropHead
from headwise.attend.methods.drop_key import DropKey as DropKey
from headwise.attend.methods.entropy_penalty import EntropyPenalty as EntropyPenalty
from headwise.attend.methods.feat_scale import FeatScale as FeatScale
from headwise.attend.methods.forgetting_attention import ForgettingAttention as ForgettingAttention
from headwise.attend.methods.gated_norm import GatedNorm as GatedNorm
from headwise.attend.methods.gated_output import GatedOutput as GatedOutput
from headwise.attend.methods.gfsa import GFSA as GFSA
from headwise.attend.methods.input_noise import InputNoise as InputNoise
from headwise.attend.methods.interleaved_heads import InterleavedHeads as InterleavedHeads
from headwise.attend.methods.laser import LASER as LASER
from headwise.attend.methods.layer_scale import LayerScale as LayerScale
from headwise.attend.methods.linear_attention import LinearAttention as LinearAttention
from headwise.attend.methods.lsa import LSA as LSA
from headwise.attend.methods.neutreno import NeuTRENO as NeuTRENO
from headwise.attend.methods.nuclear_decay import NuclearDecay as NuclearDecay
from headwise.attend.methods.product_decay import ProductDecay as ProductDecay
from headwise.attend.methods.qk_clip import QKClip as QKClip
from headwise.attend.methods.qk_norm import QKNorm as QKNorm
from headwise.attend.methods.qk_rates import QKRates as QKRates
from headwise.attend.methods.re_attention import ReAttention as ReAttention
from headwise.attend.methods.relaxed_attention import RelaxedAttention as RelaxedAttention
from headwise.attend.methods.sigma_reparam import SigmaReparam as SigmaReparam
from headwise.attend.methods.soft_cap import SoftCap as SoftCap
from headwise.attend.methods.softpick import Softpick as Softpick
from headwise.attend.methods.spectral_cap import SpectralCap as SpectralCap
from headwise.attend.methods.spectral_norm import SpectralNorm as SpectralNorm
from headwise.attend.methods.ssmax import SSMax as SSMax
from headwise.attend.methods.stable_softmax import StableSoftmax as StableSoftmax
from headwise.attend.methods.symmetric_attention import SymmetricAttention as SymmetricAttention
from headwise.attend.methods.temperature import Temperature as Temperature
from headwise.attend.methods.value_norm import ValueNorm as ValueNorm
from headwise.attend.methods.value_residual import ValueResidual as ValueResidual
from headwise.attend.methods.weight_norm import WeightNorm as WeightNorm
from headwise.attend.methods.xsa import XSA as XSA
from headwise.attend.methods.z_loss import ZLoss as ZLoss

# Type checkers read the imports above and do not support a computed list.
if not TYPE_CHECKING:
    __all__ = sorted(name for name, value in globals().items() if isinstance(value, type))
