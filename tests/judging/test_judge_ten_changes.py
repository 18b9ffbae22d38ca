"""The worked example: the documented loop keeps the two true gains alone, and "keep if better" false ones too."""

import runpy
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "judge_ten_changes.py"


def test_the_documented_loop_keeps_the_true_gains_alone(capsys):
    example = runpy.run_path(str(EXAMPLE))
    example["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "headwise.judge: 2 of 2 true gains, 0 false gains",
        "keep if better: 2 of 2 true gains, 1 false gains",
    ]
    changes, helps, keep = example["CHANGES"], example["HELP"], example["keep_if_better"]
    # over seeds, half of the changes that do nothing are kept
    false = [sum(keep(change, seed) for change in set(changes) - helps) for seed in range(20)]
    assert 3 < np.mean(false) < 5
