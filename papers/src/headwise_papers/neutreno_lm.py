"""NeuTRENO in a language model (Nguyen et al. 2023, arXiv 2312.00751), pre-norm and post-norm, on WikiText-2."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.language_model import UNIGRAM, LanguageModel

# ln(33.70 / 34.29), in nats per word: between vocabularies, only ratios of perplexities are comparable
EFFECT = -0.0174
NEUTRENO, POST = "NeuTRENO(strength=0.4)", "norm=post"
SEGMENTS, WINDOW = "test/loss", "window/loss"

STUDY = Study(
    name="neutreno-lm",
    title="NeuTRENO in a language model",
    question="Does NeuTRENO lower the perplexity of a language model, by segments and by a sliding window?",
    task=LanguageModel(learning_rate=3e-3, test_size=300),
    task_place="headwise_papers.tasks.language_model:LanguageModel",
    methods=(NEUTRENO, f"baseline | {POST}", f"{NEUTRENO} | {POST}"),
    premises=tuple(learned(SEGMENTS, UNIGRAM, 0.3, arm=arm, lower=True) for arm in ("baseline", f"baseline | {POST}")),
    claims=(
        Claim(
            text="NeuTRENO at strength 0.4 lowers the test perplexity of a language model.",
            source="Nguyen et al. 2023, arXiv 2312.00751, table 3: WikiText-103, sliding window",
            published={"test perplexity": "34.29 → 33.70", "validation perplexity": "33.15 → 32.60"},
            tests=(
                ClaimTest(arm=NEUTRENO, outcome=SEGMENTS, says="lower", effect=EFFECT),
                ClaimTest(arm=NEUTRENO, outcome=WINDOW, says="lower", effect=EFFECT),
            ),
        ),
        Claim(
            text="It does so with norms behind each branch too (a question of this study's own).",
            source="Nguyen et al. 2023, arXiv 2312.00751, table 3, of one order of norms",
            published={"test perplexity": "34.29 → 33.70"},
            tests=tuple(
                ClaimTest(
                    arm=f"{NEUTRENO} | {POST}", against=f"baseline | {POST}", outcome=place, says="lower", effect=EFFECT
                )
                for place in (SEGMENTS, WINDOW)
            ),
        ),
        Claim(
            text="Norms behind each branch alone lower the perplexity more than NeuTRENO does with norms before.",
            source="ours",
            kind="figures known",
            tests=tuple(
                ClaimTest(arm=f"baseline | {POST}", against=NEUTRENO, outcome=place, says="lower")
                for place in (SEGMENTS, WINDOW)
            ),
        ),
    ),
    scales={
        "small": Scale(settings={}, seeds=10),
        "paper": Scale(
            settings={
                "vocabulary": 33_278,
                "context": 256,
                "window_words": None,
                "dim": 128,
                "depth": 16,
                "heads": 8,
                "mlp_dim": 2048,
                "dropout": 0.1,
                "steps": 4000,
                "batch_size": 96,
                "learning_rate": 2.5e-4,
                "warmup": 400,
                "test_size": None,
            },
            seeds=5,
        ),
    },
    notes=(
        "Words beyond the 2,000 most frequent ones of the training text count as one unknown word; their share is the "
        "outcome "
        "test/unknown. Perplexities are comparable only within this study, and the claims are judged in nats per word.",
        "Segments: every word is predicted from those of its segment before it. Sliding window: from a whole context, "
        "over the first words of the test text, as the paper evaluates.",
        "Paper: the published shape with all 33,278 words of WikiText-2. WikiText-103, fifty times as long, is not "
        "read.",
    ),
)
