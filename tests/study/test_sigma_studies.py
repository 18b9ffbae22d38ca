"""The studies of SigmaReparam on sequences and views: each at its least size, end to end, from data to the verdicts of its claims."""

import shutil
from pathlib import Path

import pytest
import torch
from made_up_data import WORDS, write_an4, write_multi30k
from small_studies import Silent

from headwise.comparing.arms.arm import read_arm
from headwise.comparing.choosing import choose_study
from headwise.comparing.compare import compare
from headwise.comparing.comparison import Comparison
from headwise.comparing.engines.in_process import HereEngine
from headwise.comparing.request import Request
from headwise.comparing.results.analysis import analyse
from headwise.comparing.task_source import build_task
from headwise.studies.registry import BuiltIn
from headwise.studies.tasks.contrast import Contrast

NAMES = ("sigma-speech", "sigma-translation", "sigma-simclr")
