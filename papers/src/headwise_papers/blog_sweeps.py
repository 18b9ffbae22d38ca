"""Doses of the blog's methods on CIFAR-10: strengths, shares dropped, relaxation, and the unit of the noise.

The blog says that a stronger penalty would raise the loss, and that methods without an effect need other parameters. It
does not mention rescaling of the remaining heads, and uses the median as the unit of its noise.
"""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Study
from headwise_papers.tasks.blog_claims import RELAXED_BELOW_CHANCE, TEST_ACCURACY, Doses, doses
from headwise_papers.tasks.blog_images import NOTES, BlogImages, scales

AXES = Doses(
    decorrelation="Decorrelation(strength={0,1,10,100,1000,10000})",
    norm="AttentionNormPenalty(strength={0,1,10,100,1000,10000})",
    noise='InputNoise(scale={0.01,0.1,1}, unit="std")',
    relaxation="RelaxedAttention(gamma={0.1,0.3,0.6})",
    columns="DropColumn(p={0.1,0.2,0.4,0.6})",
    heads="DropHead(p={0.1,0.2,0.4,0.6})",
)
# margin in nats: 5 % of the plain model's test loss in the search
SIMILAR = 0.18
SCALES = scales(epochs=26, train_size=1000, test_size=2000)

STUDY = Study(
    name="blog-sweeps",
    title="Doses of the blog's regularizers of attention",
    question="How strong must the blog's methods be to change training and test, and does DropHead need its rescaling?",
    task=BlogImages(name="cifar10", **SCALES["small"].settings),
    task_place="headwise_papers.tasks.blog_images:BlogImages",
    methods=("DropHead(p=0.2)", "DropHead(p=0.2, rescale=False)", "InputNoise(scale=0.01)"),
    sweeps=AXES,
    margin=TEST_ACCURACY,
    premises=(learned("test/accuracy", 0.1, 0.1), RELAXED_BELOW_CHANCE),
    claims=doses(AXES, SIMILAR),
    seeds=6,
    scales=SCALES,
    notes=NOTES,
)
