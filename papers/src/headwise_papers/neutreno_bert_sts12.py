"""NeuTRENO in a pretrained encoder that SimCSE's contrastive objective fine-tunes on the sentences of STS 2012."""

from __future__ import annotations

from headwise_papers.neutreno_bert_stsb import ABOUT_MINILM, OWN_CLAIMS, beats_untrained, ranked_better
from headwise_papers.neutreno_bert_stsb import STUDY as STSB
from headwise_papers.tasks.sentence_similarity import SentenceSimilarity

SOURCE = "Nguyen et al. 2023, arXiv 2312.00751, section G.9, of SimCSE on STS-12, in words"

STUDY = STSB.model_copy(
    update={
        "name": "neutreno-bert-sts12",
        "title": "NeuTRENO in a pretrained encoder of sentences, fine-tuned by contrast: STS 2012",
        "task": SentenceSimilarity(
            data_set="sts2012", objective="contrast", batch_size=16, steps=40, test_size=300, learning_rate=3e-5
        ),
        # the untrained model's correlation was measured: see search.md
        "premises": (STSB.premises[0], beats_untrained(0.6394)),
        "claims": (ranked_better(SOURCE), *OWN_CLAIMS),
        "notes": (
            ABOUT_MINILM,
            "The objective is SimCSE's without supervision, on the first sentences of the training pairs; the "
            "published encoder is BERT-base, trained on a million sentences.",
            "Trained and judged on STS 2012's own splits without its part MSRvid, which may not be copied: the "
            "figures do not compare with those over five parts.",
        ),
    }
)
