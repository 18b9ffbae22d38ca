"""SigmaReparam in speech recognition: does it make a post-LN transformer trainable without a warm-up?

Zhai et al. 2023 train 36 layers on LibriSpeech; this study trains a smaller encoder of the same design (a gated
convolution, then the layers, CTC over letters, SpecAugment, Adagrad at a constant rate) on AN4's 948 utterances.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.speech import Speech

SOURCE = "Zhai et al. 2023, arXiv 2303.06296, speech recognition"
PRE = "baseline | norm=pre"
SLOW = "baseline | learning_rate=0.01"
SIGMA = 'SigmaReparam(init="one", layers="all")'
RATES = (0.01, 0.1)
SMALL = {
    "dim": 48,
    "depth": 6,
    "heads": 4,
    "mlp_dim": 96,
    "stride": 5,
    "bands": 1,
    "band": 2,
    "stretches": 1,
    "stretch": 10,
    "optimizer": "adagrad",
    "learning_rate": 3e-2,
    "weight_decay": 0.0,
    "tokens_per_batch": None,
    "batch_size": 4,
    "steps": 950,
}
# the model of the authors' code and paper, with SpecAugment scaled from 80 filters to 13 cepstra
PAPER = {
    "dim": 768,
    "depth": 36,
    "heads": 4,
    "mlp_dim": 3072,
    "stride": 3,
    "dropout": 0.3,
    "layer_drop": 0.3,
    "bands": 2,
    "band": 5,
    "stretches": 10,
    "stretch": 50,
    "tokens_per_batch": 40_000,
    "schedule": "plateau",
    "factor": 0.5,
    "patience": 10,
    "steps": 20_000,
    "dtype": "bfloat16",
}

STUDY = Study(
    name="sigma-speech",
    title="SigmaReparam in speech recognition",
    question="Does SigmaReparam make a post-LN transformer for speech trainable without warm-up, and what does it do "
    "to a pre-LN one?",
    task=Speech.model_validate(SMALL),
    task_place="headwise_papers.tasks.speech:Speech",
    # the baseline is post-LN
    methods=(
        SIGMA,
        PRE,
        f"{SIGMA} | norm=pre",
        *(f"baseline | learning_rate={rate}" for rate in RATES),
        *(f"{SIGMA} | learning_rate={rate}" for rate in RATES),
        *(f"{arm} | learning_rate={rate}, norm=pre" for arm in ("baseline", SIGMA) for rate in RATES),
    ),
    seeds=6,
    scales={"small": Scale(settings=SMALL, seeds=6), "paper": Scale(settings=SMALL | PAPER, seeds=3)},
    premises=(learned("test/letter_error", 1.0, 0.7, arm=PRE, lower=True),),
    claims=(
        Claim(
            text="SigmaReparam makes a post-LN transformer trainable.",
            source=SOURCE,
            tests=(
                ClaimTest(arm=SIGMA, outcome="test/loss", says="lower"),
                ClaimTest(arm=SIGMA, outcome="test/letter_error", says="lower"),
            ),
        ),
        Claim(
            text="SigmaReparam does more for post-LN than a third of the learning rate does.",
            source="ours: the remedy that costs nothing",
            tests=(ClaimTest(arm=SIGMA, outcome="test/letter_error", says="lower", against=SLOW),),
        ),
        Claim(
            text="A plain pre-LN transformer trains where a plain post-LN one does not.",
            source="ours: what a stable norm does without SigmaReparam",
            tests=(ClaimTest(arm=PRE, outcome="test/letter_error", says="lower"),),
        ),
        Claim(
            text="With SigmaReparam, post-LN reaches what pre-LN reaches.",
            source="ours: the source says that post-LN is stabilized",
            tests=(ClaimTest(arm=SIGMA, outcome="test/letter_error", says="same", against=PRE, margin=0.05),),
        ),
        Claim(
            text="At a third and at three times the learning rate too, SigmaReparam writes fewer wrong letters than "
            "plain post-LN.",
            source="ours: robustness over learning rates",
            tests=tuple(
                ClaimTest(
                    arm=f"{SIGMA} | learning_rate={rate}",
                    outcome="test/letter_error",
                    says="lower",
                    against=f"baseline | learning_rate={rate}",
                )
                for rate in RATES
            ),
        ),
    ),
    notes=(
        "As in the authors' code, gamma begins at 1; unlike there, the convolution is reparametrized too, and q "
        "and k each have their own sigma.",
        "AN4 has 948 training and 130 test utterances and no validation split; every utterance is used. One that CTC "
        "cannot reach in its frames, one without words, and one that is too long or has other letters raise an error "
        "before anything trains.",
        "A model with empty output has an error rate of 100 %, which is also the value of a diverged run.",
        "The paper's data, LibriSpeech, is not among the loaders: the scale `paper` trains its model with its recipe "
        "on AN4, with sinusoids for its positions (CAPE), and lowers the learning rate when the training loss "
        "stagnates (there: the word error rate). It was not run.",
    ),
)
