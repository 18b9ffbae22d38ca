"""The remedies for each alert, during training and for a checkpoint, with their sources."""

from __future__ import annotations

import re
from typing import NamedTuple


class Remedy(NamedTuple):
    """A remedy and its source."""

    text: str
    source: str


# Whether a model that was trained with a method can become a stock one by handle.export: exactly, or not at all.
EXPORTED = {
    "SigmaReparam": True,
    "QKClip": True,
    "QKNorm": False,
    "SoftCap": False,
    "NeuTRENO": False,
    "AttnScale": False,
    "FeatScale": False,
    "ValueResidual": False,
}
# Alerts that describe a head and need no action; they add nothing to its score in an audit.
HARMLESS = ("sharp_head",)


def _with_export(remedy: Remedy) -> Remedy:
    """Return a remedy that says which of its methods survive the export to a stock model, if one does not."""
    named = [name for name in dict.fromkeys(re.findall(r"\w+", remedy.text)) if name in EXPORTED]
    exact = " and ".join(name for name in named if EXPORTED[name])
    refused = ", ".join(name for name in named if not EXPORTED[name])
    if not refused:
        return remedy
    kept = f"{exact} can be exported to a stock model exactly; t" if exact else "T"
    return remedy._replace(text=f"{remedy.text}. {kept}he export of {refused} is refused")


# By alert. "<alert> of a checkpoint" is for activations of a checkpoint, "<alert> of weights" for its weights.
REMEDIES = {
    "entropy_collapse": Remedy(
        "SigmaReparam or QKNorm bound it, and kept a vision transformer from diverging in "
        "docs/results/entropy-collapse; a lower learning rate or a longer warm-up delays it",
        "Zhai et al. 2023, arXiv 2303.06296; Dehghani et al. 2023, arXiv 2302.05442",
    ),
    "logit_growth": Remedy(
        "QKNorm, QKClip, SigmaReparam or SoftCap bound the logits. In docs/results/stability-map they let a small "
        "language model tolerate a higher learning rate, SigmaReparam the highest",
        "Dehghani et al. 2023, arXiv 2302.05442; Kimi K2 2025, arXiv 2507.20534",
    ),
    "loss_spike": Remedy(
        "look at the batches and the learning rate of the last steps. In docs/results/alarms wrong labels, outlier "
        "tokens and a rate that jumped raised it; watch(..., keep=N) keeps the steps for headwise replay. If the rate "
        "is intended, SigmaReparam or QKNorm tolerate a higher one, as in docs/results/stability-map",
        "OLMo 2 2025, arXiv 2501.00656; Zhai et al. 2023, arXiv 2303.06296",
    ),
    "over_smoothing": Remedy(
        "NeuTRENO, AttnScale or FeatScale keep tokens distinct, as docs/results/oversmoothing-at-init measures for "
        "NeuTRENO; a high cosine is a diagnosis, not a measure of quality",
        "Nguyen et al. 2023, arXiv 2312.00751; Wang et al. 2022, arXiv 2203.05962",
    ),
    "rank_collapse": Remedy(
        "NeuTRENO, which kept the tokens of 24 layers distinct in docs/results/neutreno-depth, or ValueResidual pass "
        "early values to later layers; check that skip connections are in place",
        "Dong et al. 2021, arXiv 2103.03404; Zhou et al. 2024, arXiv 2410.17897",
    ),
    "low_rank": Remedy(
        "weight decay on queries, keys, values and output lowers their rank, as docs/results/decay-lm measures: give "
        "them a smaller one (parameter_groups)",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "not_finite": Remedy(
        "go back to an earlier checkpoint with a lower learning rate or clipped gradients; QKNorm or SigmaReparam "
        "bound the logits from there",
        "Zhai et al. 2023, arXiv 2303.06296; Dehghani et al. 2023, arXiv 2302.05442",
    ),
    "sorted_batches": Remedy(
        "shuffle the examples in each epoch (shuffle=True of the data loader, a larger shuffle buffer). If they are "
        "shuffled, look for a stretch of bad data, or a rate that is too high; labels are not seen here",
        "Bottou 2009, Curiously fast convergence of some stochastic gradient descent algorithms; Gürbüzbalaban et al. "
        "2015, arXiv 1510.08560",
    ),
    "mask_lost": Remedy(
        "stop: the model sees the tokens that it must predict, so its training loss means nothing from here on. Find "
        "what changed in the attention call (is_causal, the mask, a new kernel or cache), and go back to the "
        "checkpoint before",
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    "dead_head": Remedy(
        "prune it, or spread the work over heads with DropHead in the next run",
        "Michel et al. 2019, arXiv 1905.10650; Zhou et al. 2020, arXiv 2004.13342",
    ),
    "redundancy": Remedy(
        "Disagreement or DropHead make heads differ",
        "Li et al. 2018, arXiv 1810.10183; Zhou et al. 2020, arXiv 2004.13342",
    ),
    "sharp_head of a checkpoint": Remedy(
        "no action: heads that read a fixed position, such as the token before, are sharp in healthy "
        "models. headwise.watch shows during training whether a head became sharp",
        "Voita et al. 2019, arXiv 1905.09418",
    ),
    "logit_growth of a checkpoint": Remedy(
        "large logits lose digits in half precision: keep the softmax in fp32. QKNorm or QKClip bound them in the "
        "next run",
        "Dehghani et al. 2023, arXiv 2302.05442; Kimi K2 2025, arXiv 2507.20534",
    ),
    "over_smoothing of a checkpoint": Remedy(
        "a high cosine is a diagnosis, not a measure of quality: compare it with that of a model known to be good",
        "Wang et al. 2022, arXiv 2203.05962",
    ),
    "rank_collapse of a checkpoint": Remedy(
        "check that weights and skip connections were loaded as they were trained", "Dong et al. 2021, arXiv 2103.03404"
    ),
    "low_rank of a checkpoint": Remedy(
        "the head can be stored low-rank (headwise.compress)", "Kobayashi et al. 2024, arXiv 2410.23819"
    ),
    "not_finite of a checkpoint": Remedy(
        "the file is damaged or the training diverged: take an earlier checkpoint", "IEEE 754"
    ),
    "dead_head of a checkpoint": Remedy("prune it", "Michel et al. 2019, arXiv 1905.10650"),
    "redundancy of a checkpoint": Remedy(
        "heads with similar attention can be pruned to one", "Michel et al. 2019, arXiv 1905.10650"
    ),
    "rank_collapse of weights": Remedy(
        "less weight decay on attention (headwise.parameter_groups) keeps rank in the next run; here the head can be "
        "stored low-rank",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "logit_growth of weights": Remedy(
        "SigmaReparam, QKNorm or QKClip bound the logits in the next run; watch the largest logit on data",
        "Zhai et al. 2023, arXiv 2303.06296; Kimi K2 2025, arXiv 2507.20534",
    ),
    "low_rank_by_decay of weights": Remedy(
        "a smaller attention_weight_decay (headwise.parameter_groups) in the next run, if the loss needs more rank",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "not_finite of weights": Remedy(
        "the file is damaged or the training diverged: take an earlier checkpoint", "IEEE 754"
    ),
}


REMEDIES = {name: _with_export(remedy) for name, remedy in REMEDIES.items()}


def remedy_for_weights(alert: str) -> Remedy:
    """Return the remedy for an alert on the weights of a checkpoint."""
    return REMEDIES.get(f"{alert} of weights") or REMEDIES[alert]


def remedy_for(alert: str, *, trains: bool) -> Remedy:
    """Return the remedy for an alert on activations, during training (`trains`) or for a checkpoint."""
    return REMEDIES[alert] if trains else REMEDIES[f"{alert} of a checkpoint"]
