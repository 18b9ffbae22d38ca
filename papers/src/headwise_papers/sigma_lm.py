"""SigmaReparam in a post-norm language model without warm-up, at learning rates too high for the plain model."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Premise, Scale, Study
from headwise_papers.tasks.language_model import UNIGRAM, LanguageModel

SIGMA = 'SigmaReparam(init="one", layers="all")'
LOW, HIGH = "learning_rate=0.001", "learning_rate=0.01"
SOURCE = "Zhai et al. 2023, arXiv 2303.06296, of language models, in words"
SEGMENTS, WINDOW = "test/loss", "window/loss"
# nats per word: those of a word predicted by its frequency
GOAL = 4.7

STUDY = Study(
    name="sigma-lm",
    title="SigmaReparam in a language model with norms behind each branch",
    question="Does SigmaReparam let a post-norm language model train without a warm-up where the plain one does not?",
    task=LanguageModel(
        norm="post",
        depth=6,
        steps=150,
        learning_rate=3e-3,
        warmup=0,
        schedule="constant",
        window_words=256,
        test_size=300,
        divergence_factor=1.5,
        loss_goal=GOAL,
    ),
    task_place="headwise_papers.tasks.language_model:LanguageModel",
    methods=(SIGMA, f"baseline | {LOW}", f"{SIGMA} | {LOW}", f"baseline | {HIGH}", f"{SIGMA} | {HIGH}"),
    premises=(
        learned(SEGMENTS, UNIGRAM, 0.3, arm=f"baseline | {LOW}", lower=True),
        Premise(
            name="failure arose",
            text=f"The plain model does not train: its test loss stays above {UNIGRAM - 0.1:.4g} nats, those of a "
            "word's frequency but 0.1",
            tests=tuple(
                ClaimTest(arm=arm, outcome=SEGMENTS, says="higher", level=UNIGRAM - 0.1)
                for arm in ("baseline", f"baseline | {HIGH}")
            ),
        ),
    ),
    claims=(
        Claim(
            text="SigmaReparam stabilizes the training of a language model with norms behind each branch: its "
            "perplexity is lower.",
            source=SOURCE,
            tests=tuple(ClaimTest(arm=SIGMA, outcome=place, says="lower") for place in (SEGMENTS, WINDOW)),
        ),
        Claim(
            text="It improves robustness to hyperparameters: at three times the learning rate it still trains, and "
            "the plain model does not.",
            source=SOURCE,
            tests=(
                ClaimTest(arm=f"{SIGMA} | {HIGH}", against=f"baseline | {HIGH}", outcome=SEGMENTS, says="lower"),
                # "still trains": no worse than at the lower rate by more than 0.1 nats, and it may be better
                ClaimTest(arm=f"{SIGMA} | {HIGH}", against=SIGMA, outcome=SEGMENTS, says="lower", by=-0.1),
            ),
        ),
        Claim(
            text="Without SigmaReparam convergence is slow: at the same rate the training loss, smoothed, takes more "
            f"steps to {GOAL} nats.",
            source=f"{SOURCE}; its abstract: slow convergence",
            tests=(ClaimTest(arm=SIGMA, outcome="training/steps_to_goal", says="lower"),),
        ),
        Claim(
            text="Without SigmaReparam the training loss fluctuates more: at the same rate it has more spikes.",
            source=f"{SOURCE}; its introduction: fluctuations of the training loss",
            tests=(ClaimTest(arm=SIGMA, outcome="training/spikes", says="lower"),),
        ),
        Claim(
            text="Where the plain model trains, at a third of the rate, SigmaReparam trains as well, within 0.1 nats "
            "per word.",
            source="a question of this study's own",
            tests=(
                ClaimTest(
                    arm=f"{SIGMA} | {LOW}", against=f"baseline | {LOW}", outcome=SEGMENTS, says="same", margin=0.1
                ),
            ),
        ),
    ),
    scales={
        "small": Scale(settings={}, seeds=10),
        # 17 million parameters: a minute a run on one GPU
        "gpu": Scale(
            settings={
                "vocabulary": 8192,
                "context": 256,
                "window_words": 4096,
                "dim": 384,
                "depth": 8,
                "heads": 6,
                "mlp_dim": 1536,
                "steps": 2000,
                "batch_size": 64,
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=6,
        ),
        "paper": Scale(
            settings={
                "vocabulary": 33_278,
                "context": 256,
                "window_words": 4096,
                "dim": 512,
                "depth": 16,
                "heads": 8,
                "mlp_dim": 2048,
                "dropout": 0.1,
                "steps": 4000,
                "batch_size": 64,
                "learning_rate": 1e-3,
                "schedule": "cosine",
                "test_size": None,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "A word predicted only by its frequency costs about 4.7 nats here: a model that ends there has not trained, "
        "although its loss never rose.",
        "Diverged: the smoothed loss exceeds 1.5 times its minimum, or is not finite.",
        "Words beyond the 2,000 most frequent ones count as one unknown word: perplexities are comparable only within "
        "this study.",
        "Paper: the size of a small WikiText-103 model, on WikiText-2; the text on which this study is based gives "
        "no figures.",
    ),
)
