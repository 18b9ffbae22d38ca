"""NeuTRENO in incremental learning of CIFAR-100: final accuracy and forgetting of five tasks of twenty classes."""

from __future__ import annotations

from headwise.lab.experiments.premises import learned
from headwise.study import Claim, ClaimTest, Scale, Study
from headwise_papers.tasks.incremental import Incremental

NEUTRENO = "NeuTRENO(strength=0.6)"
# section G.7 of arXiv 2312.00751 is on incremental understanding of sentences: see neutreno-prefixes
SOURCE = "our own question"

STUDY = Study(
    name="neutreno-incremental",
    title="NeuTRENO in incremental learning",
    question="Does a model with NeuTRENO learn five tasks one after the other better, and forget less of them?",
    task=Incremental(
        dim=48,
        heads=3,
        mlp_dim=96,
        patch=8,
        steps=80,
        batch_size=32,
        learning_rate=2e-3,
        warmup=0.1,
        schedule="cosine",
        test_each=500,
    ),
    task_place="headwise_papers.tasks.incremental:Incremental",
    methods=(NEUTRENO, "FeatScale()"),
    # chance for twenty classes, on the last trained task
    premises=(learned("after 4/task 4/accuracy", 0.05, 0.05),),
    claims=(
        Claim(
            text="NeuTRENO raises the final accuracy of incremental learning.",
            source=SOURCE,
            published={"figures": "not published"},
            tests=(ClaimTest(arm=NEUTRENO, outcome="final/accuracy", says="higher"),),
        ),
        Claim(
            text="NeuTRENO forgets less.",
            source=SOURCE,
            published={"figures": "not published"},
            tests=(ClaimTest(arm=NEUTRENO, outcome="final/forgetting", says="lower"),),
        ),
    ),
    scales={
        "small": Scale(settings={}, seeds=10),
        "paper": Scale(
            settings={
                "dim": 192,
                "mlp_dim": 768,
                "patch": 4,
                "steps": None,
                "epochs": 100,
                "batch_size": 256,
                "test_each": None,
                "learning_rate": 5e-4,
                "weight_decay": 0.05,
                "augment": True,
                "dtype": "bfloat16",
            },
            seeds=5,
        ),
    },
    notes=(
        "The task of an image is known in training and evaluation, data of earlier tasks are not seen again, and no "
        "method against forgetting acts.",
        "The project's own question: the paper's incremental learning refers to sentences, see neutreno-prefixes. "
        "The scale paper is DeiT-tiny's shape, 100 epochs per task.",
    ),
)
