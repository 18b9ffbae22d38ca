"""NeuTRENO in a pretrained encoder that is fine-tuned to the similarity of sentences in STS-B."""

from __future__ import annotations

from headwise.lab.experiments.premises import better_than_untrained, learned
from headwise.study import Claim, ClaimTest, Premise, Scale, Study
from headwise_papers.tasks.sentence_similarity import SentenceSimilarity

TUNED = "NeuTRENO(strength=0.2, warmup_steps=20)"
OWN = "our own question, beside section G.9 of Nguyen et al. 2023, arXiv 2312.00751"


def ranked_better(source: str) -> Claim:
    """Return the claim that NeuTRENO raises the rank correlation."""
    return Claim(
        text="An encoder fine-tuned with NeuTRENO ranks pairs of sentences better.",
        source=source,
        tests=(ClaimTest(arm=TUNED, outcome="test/spearman", says="higher"),),
    )


def beats_untrained(spearman: float) -> Premise:
    """Return the premise that fine-tuning improved the plain model; loaded weights and test pairs are all seeds'."""
    text = f"The trained plain model beats the untrained one's {spearman:.4f} in test/spearman"
    return better_than_untrained("test/spearman", spearman).model_copy(update={"text": text})


OWN_CLAIMS = (
    Claim(
        text="Fine-tuning with NeuTRENO does no harm: the correlation falls by less than 0.01 (a weaker question of "
        "this study's own).",
        source=OWN,
        tests=(ClaimTest(arm=TUNED, outcome="test/spearman", says="higher", by=-0.01),),
    ),
    Claim(
        text="Tokens are less alike behind fine-tuning with NeuTRENO.",
        source=OWN,
        tests=(ClaimTest(arm=TUNED, outcome="heads/final_cosine/mean", says="lower"),),
    ),
)
PAPER = {"tokens": 64, "steps": 400, "batch_size": 64, "learning_rate": 5e-5, "test_size": None}
ABOUT_MINILM = (
    "MiniLM comes with a package; --set pretrained=FOLDER takes any encoder of transformers. It was trained for "
    "similarity of sentences already, on pairs of other sources, so that little is left to gain. Its word embeddings "
    "are not trained."
)

STUDY = Study(
    name="neutreno-bert-stsb",
    title="NeuTRENO in a pretrained encoder that tells how alike sentences are: STS-B",
    question="Does fine-tuning with NeuTRENO raise the rank correlation, or at least not lower it, and are tokens "
    "less alike?",
    task=SentenceSimilarity(steps=40, test_size=300),
    task_place="headwise_papers.tasks.sentence_similarity:SentenceSimilarity",
    methods=(TUNED,),
    # a constant answer has no rank correlation; the untrained model's was measured: see search.md
    premises=(learned("test/spearman", 0.0, 0.5), beats_untrained(0.8271)),
    claims=(ranked_better(OWN), *OWN_CLAIMS),
    seeds=12,
    scales={"small": Scale(settings={}, seeds=12), "paper": Scale(settings=PAPER, seeds=6)},
    notes=(
        ABOUT_MINILM,
        "A question of this project: the publication has SimCSE on STS-12. Here the cosine is fitted to the scores of "
        "STS-B; neutreno-bert-sts12 has the published objective and data.",
    ),
)
