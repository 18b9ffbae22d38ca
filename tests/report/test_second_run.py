"""A second run of a study is compared with what was kept, on the seeds that both have."""

import csv
from pathlib import Path

from report.synthetic_study import write_study

from headwise_verdict.results.folder import read_study

ROOT = Path(__file__).parents[2]
ARMS = ("baseline", "DropHead(p=0.2)")


def test_equal_differences_are_counted_and_a_changed_one_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import second_run

    study = read_study(write_study(tmp_path / "study", methods=ARMS, effects=(0, 0.03), epochs=3))
    measured = second_run.measured_differences(study, "test/accuracy")
    first = min(measured[ARMS[1]])
    with (tmp_path / "differences.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["outcome", "arm", "seed", "difference"])
        for seed, value in measured[ARMS[1]].items():
            rows.writerow(["test/accuracy", ARMS[1], seed, repr(value + 0.1 * (seed == first))])
    kept = second_run.kept_differences(tmp_path)["test/accuracy"]
    seeds = len(measured[ARMS[1]])
    found = second_run.agreement(study, "test/accuracy", kept)
    line = second_run.row(study, "test/accuracy", found)
    # one seed moved by ten points, the mean by ten over the number of seeds
    assert line.startswith(f"| test/accuracy | 1 | {seeds - 1} of {seeds} | {10 / seeds:.2f} points | ")
    assert second_run.agreement(study, "test/miou", {}) is None
    [(change, error)] = found.changes
    row = second_run.summary("toy", seeds, {"test/accuracy": found})
    assert row == f"| toy | {seeds} | 1 | {seeds - 1} of {seeds} | {change / error:.2g}, {change / error:.2g} |"
    # a figure without spread over the kept seeds must not hide its change
    hidden = second_run.summary("toy", 3, {"test/loss": second_run.Agreement(0, 3, [(5.0, 0.0)])})
    assert hidden.endswith("| –; of figures that are the same for all kept seeds, test/loss changes most, by 5 |")
    assert second_run.summary("toy", 3, {"test/loss": second_run.Agreement(3, 3, [(0.0, 0.0)])}).endswith("| 0, 0 |")
