"""NeuTRENO in incremental understanding: a sentence's sentiment after each word, by a restarted or a causal model."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.prefixes import Prefixes

NEUTRENO = "NeuTRENO(strength=0.6)"
CAUSAL, CAUSAL_NEUTRENO = "baseline | reading=causal", f"{NEUTRENO} | reading=causal"
# the directions are guesses from the title of G.7 and from its references
SOURCE = "our own question, beside G.7 of Nguyen et al. 2023, after Kahardipraja et al. 2021, arXiv 2109.07364"
NONE = {"figures": "not known here"}


def _both(text: str, outcome: str, says: str) -> tuple[Claim, Claim]:
    """Return the same claim for a model that is restarted on each prefix and for a causal one."""
    readings = (("run anew on each prefix", NEUTRENO, "baseline"), ("that is causal", CAUSAL_NEUTRENO, CAUSAL))
    return tuple(  # type: ignore[return-value]  # two of them
        Claim(
            text=f"NeuTRENO {text} of a model {words}.",
            source=SOURCE,
            published=NONE,
            tests=(
                ClaimTest.model_validate(
                    {"arm": arm, "outcome": f"prefixes/{outcome}", "says": says, "against": plain}
                ),
            ),
        )
        for words, arm, plain in readings
    )


STUDY = Study(
    name="neutreno-prefixes",
    title="NeuTRENO in incremental understanding of sentences",
    question="Is a model with NeuTRENO right earlier in a sentence, and does it change its answer less often?",
    task=Prefixes(
        epochs=1,
        batch_size=64,
        learning_rate=3e-3,
        schedule="cosine",
        warmup=0.1,
        train_size=32_000,
        vocabulary=6000,
        depth=4,
        heads=4,
        mlp_dim=128,
    ),
    task_place="headwise_papers.tasks.prefixes:Prefixes",
    methods=(NEUTRENO, CAUSAL, CAUSAL_NEUTRENO),
    # half a percentage point of prefixes
    margin=0.005,
    premises=(learned("test/accuracy", 0.5, 0.1), learned("test/accuracy", 0.5, 0.1, arm=CAUSAL)),
    claims=(
        *_both("raises the accuracy over prefixes", "prefix_accuracy", "higher"),
        *_both("lowers the edit overhead", "edit_overhead", "lower"),
        *_both("shortens the correction time", "correction_time", "lower"),
        *_both("raises the relative correctness", "relative_correctness", "higher"),
    ),
    scales={
        "small": Scale(seeds=8),
        "paper": Scale(
            settings={
                "epochs": 10,
                "train_size": None,
                "dim": 512,
                "depth": 6,
                "heads": 8,
                "head_dim": 64,
                "mlp_dim": 2048,
                "vocabulary": 20_000,
                "learning_rate": 1e-4,
                "batch_size": 64,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "The paper's G.7 is known here only by its title and its references, which are on incremental understanding of "
        "sentences: all eight directions are guesses. Incremental learning of classes, another question, is "
        "neutreno-incremental.",
        "Trained only on whole sentences. With one label per prefix, the first answer is the one necessary edit.",
    ),
)
