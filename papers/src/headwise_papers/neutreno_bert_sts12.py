"""NeuTRENO in a pretrained encoder that is fine-tuned to the similarity of sentences in STS 2012."""

from __future__ import annotations

from headwise_papers.neutreno_bert_stsb import STUDY as STSB
from headwise_papers.tasks.sentence_similarity import SentenceSimilarity

STUDY = STSB.model_copy(
    update={
        "name": "neutreno-bert-sts12",
        "title": "NeuTRENO in a pretrained encoder that tells how alike sentences are: STS 2012",
        "task": SentenceSimilarity(data_set="sts2012", steps=40, test_size=300),
        "notes": (
            *STSB.notes,
            "Trained and judged on STS 2012's own splits without its part MSRvid, which may not be copied: the "
            "figures do not compare with those over five parts.",
        ),
    }
)
