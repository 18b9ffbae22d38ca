"""The blog's methods on the sentiment of SST-2's sentences: its block, with words in place of patches."""

from __future__ import annotations

from typing import Any

from headwise.lab.experiments.premises import learned, memorised
from headwise.study import Scale, Study
from headwise_papers.tasks.blog_claims import TEST_ACCURACY, below_chance, on_text
from headwise_papers.tasks.blog_text import Sentiment

# margin in nats: 5 % of the plain model's test loss
SIMILAR = 0.11
SMALL: dict[str, Any] = {
    "epochs": 14,
    "batch_size": 64,
    "learning_rate": 3e-3,
    "betas": (0.9, 0.95),
    "schedule": "linear",
    "warmup": 0.1,
    "train_size": 1000,
    "vocabulary": 6000,
    "test_size": None,
}

STUDY = Study(
    name="blog-text-sst2",
    title="The blog's regularizers of attention on the sentiment of sentences",
    question="Does what the blog finds on images hold for sentences: dropout methods lower the test loss, and noise, "
    "norm and relaxation change nothing?",
    task=Sentiment(**SMALL),
    task_place="headwise_papers.tasks.blog_text:Sentiment",
    margin=TEST_ACCURACY,
    # ln 2
    premises=(learned("test/accuracy", 0.5, 0.05), memorised(), below_chance(0.693)),
    claims=on_text("SST-2", SIMILAR),
    scales={"small": Scale(settings=SMALL, seeds=10)},
    notes=("The blog asks for text as further research and publishes nothing on it: there is no paper scale.",),
)
