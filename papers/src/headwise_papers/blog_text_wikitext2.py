"""The blog's methods on the next word of WikiText-2: its block, made causal, with words in place of patches."""

from __future__ import annotations

from typing import Any

from headwise.lab.experiments.premises import learned, memorised
from headwise.study import Scale, Study
from headwise_papers.tasks.blog_claims import below_chance, on_text
from headwise_papers.tasks.blog_text import NextWord

# margin in nats: 5 % of the plain model's test loss
SIMILAR = 0.25
# accuracy and loss (nats) of a predictor that knows only the words' frequencies in the training text
MAJORITY, UNIGRAM = 0.3375, 3.658
SMALL: dict[str, Any] = {
    "epochs": 30,
    "batch_size": 16,
    "learning_rate": 5e-3,
    "betas": (0.9, 0.95),
    "schedule": "linear",
    "warmup": 0.1,
    "train_size": 200,
    "test_size": 500,
    "vocabulary": 500,
    "longest": 24,
}

STUDY = Study(
    name="blog-text-wikitext2",
    title="The blog's regularizers of attention on the next word",
    question="Does what the blog finds on images hold for a language model: dropout methods lower the test loss, and "
    "noise, norm and relaxation change nothing?",
    task=NextWord(**SMALL),
    task_place="headwise_papers.tasks.blog_text:NextWord",
    premises=(learned("test/accuracy", MAJORITY, 0.05), memorised(), below_chance(UNIGRAM)),
    claims=on_text("WikiText-2", SIMILAR),
    scales={"small": Scale(settings=SMALL, seeds=10)},
    notes=("The blog asks for text as further research and publishes nothing on it: there is no paper scale.",),
)
