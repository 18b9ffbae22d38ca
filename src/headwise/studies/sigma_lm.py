"""SigmaReparam in a language model with norms behind each branch, at learning rates that are hard for it."""

from __future__ import annotations

from headwise.comparing.study import Study
from headwise.studies.tasks.language_model import LanguageModel

SIGMA = 'SigmaReparam(init="one", layers="all")'

STUDY = Study(
    name="sigma-lm",
    title="SigmaReparam in a language model with norms behind each branch",
    question="Does SigmaReparam let a post-norm language model train at rates at which the plain one does not?",
    task=LanguageModel(norm="post", test_size=300),
    task_place="headwise.studies.tasks.language_model:LanguageModel",
    methods=(SIGMA,),
)
