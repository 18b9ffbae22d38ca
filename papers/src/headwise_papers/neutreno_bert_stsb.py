"""NeuTRENO in a pretrained encoder that is fine-tuned to the similarity of sentences in STS-B."""

from __future__ import annotations

from headwise.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.sentence_similarity import SentenceSimilarity

TUNED = "NeuTRENO(strength=0.2, warmup_steps=20)"
SOURCE = "Nguyen et al. 2023, arXiv 2312.00751, section G.9"
CLAIMS = (
    Claim(
        text="An encoder fine-tuned with NeuTRENO ranks pairs of sentences better.",
        source=f"{SOURCE}, of SimCSE on STS-12, in words",
        tests=(ClaimTest(arm=TUNED, outcome="test/spearman", says="higher"),),
    ),
    Claim(
        text="Fine-tuning with NeuTRENO does no harm: the correlation stays within 0.01 (a weaker question of this "
        "study's own).",
        source=SOURCE,
        tests=(ClaimTest(arm=TUNED, outcome="test/spearman", says="same", margin=0.01),),
    ),
    Claim(
        text="Tokens are less alike behind fine-tuning with NeuTRENO.",
        source=SOURCE,
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
    # a constant answer has no rank correlation
    premises=(learned("test/spearman", 0.0, 0.5),),
    claims=CLAIMS,
    seeds=12,
    scales={"small": Scale(settings={}, seeds=12), "paper": Scale(settings=PAPER, seeds=6)},
    notes=(
        ABOUT_MINILM,
        "The published encoder is SimCSE; here the cosine is fitted to the scores. neutreno-bert-sts12 has its "
        "contrastive objective.",
    ),
)
