"""NeuTRENO in a pretrained encoder that is fine-tuned to find answers in SQuAD.

Nguyen et al. 2023, arXiv 2312.00751, section G.9. The paper fine-tunes BERT-base on SQuAD 1.1; this study fine-tunes
MiniLM on the development questions only, split by article.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import better_than_untrained
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.answer_extraction import AnswerExtraction

SOURCE = "Nguyen et al. 2023, arXiv 2312.00751, section G.9"
FIGURE_7 = f"{SOURCE}, figure 7, of which no figures are given"
TUNED = "NeuTRENO(strength=0.2, warmup_steps=20)"
# a single step that changes nothing, so that the weights are evaluated before training
AS_LOADED, RANDOM = "learning_rate=1e-09, steps=1", "learning_rate=1e-09, random_weights=true, steps=1"
FIDELITY = "NeuTRENO(strength=0.6)"
COSINE = "heads/final_cosine/mean"

STUDY = Study(
    name="neutreno-bert",
    title="NeuTRENO in a pretrained encoder that finds answers",
    question="Does fine-tuning with NeuTRENO raise F1, or at least not lower it, and are tokens less alike?",
    task=AnswerExtraction(steps=60, test_size=200),
    task_place="headwise_papers.tasks.answer_extraction:AnswerExtraction",
    methods=(
        TUNED,
        f"baseline | {AS_LOADED}",
        f"{FIDELITY} | {AS_LOADED}",
        f"baseline | {RANDOM}",
        f"{FIDELITY} | {RANDOM}",
    ),
    premises=(better_than_untrained("test/f1", f"baseline | {AS_LOADED}"),),
    claims=(
        Claim(
            text="BERT fine-tuned with NeuTRENO finds answers better.",
            source=f"{SOURCE}: SQuAD 1.1, in words",
            tests=tuple(ClaimTest(arm=TUNED, outcome=f"test/{metric}", says="higher") for metric in ("f1", "exact")),
        ),
        Claim(
            text="Fine-tuning with NeuTRENO does no harm: F1 falls by less than 3 points (a weaker question of this "
            "study's own).",
            source=f"our own question, beside {SOURCE}",
            tests=(ClaimTest(arm=TUNED, outcome="test/f1", says="higher", by=-0.03),),
        ),
        # all seeds load the same weights and read the same tokens: one observation, which no test can judge
        Claim(text="NeuTRENO makes tokens less alike in the pretrained model without any training.", source=FIGURE_7),
        Claim(
            text="NeuTRENO makes tokens less alike in a random model.",
            source=FIGURE_7,
            tests=(
                ClaimTest(arm=f"{FIDELITY} | {RANDOM}", against=f"baseline | {RANDOM}", outcome=COSINE, says="lower"),
            ),
        ),
        Claim(
            text="Tokens are less alike behind fine-tuning with NeuTRENO too (a question of this study's own).",
            source=f"our own question, beside {SOURCE}",
            tests=(ClaimTest(arm=TUNED, outcome=COSINE, says="lower"),),
        ),
    ),
    seeds=12,
    scales={
        "small": Scale(settings={}, seeds=12),
        "paper": Scale(
            settings={
                "passage": "whole",
                "tokens": 384,
                "shared_tokens": 128,
                "answer_tokens": 30,
                "steps": 1000,
                "batch_size": 32,
                "learning_rate": 5e-5,
                "test_size": None,
            },
            seeds=6,
        ),
    },
    notes=(
        "Small: a passage is cut to the sentences that contain its answer, which makes the task easier than SQuAD's "
        "own, and 200 windows of the twelve test articles are judged. Exact match and F1 by the official rules, best "
        "over the annotators' answers.",
        "MiniLM comes with a package; --set pretrained=FOLDER takes any transformers encoder. Its word embeddings "
        "are not trained.",
        "As loaded, the weights of all seeds are the same, and so are the tokens that are read: they are one "
        "observation, and the claim on them has no test. Several pretrained models would be needed.",
        "Paper: whole passages. Its training set of 87,599 questions is not read, and its strength is not named in "
        "the text on which this study is based.",
    ),
)
