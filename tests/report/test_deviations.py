"""Standard deviations over seeds, from the intervals that were kept."""

import csv
import statistics
from pathlib import Path

import pytest

from headwise_verdict.results.intervals import interval

ROOT = Path(__file__).parents[2]


def test_the_deviation_behind_a_kept_interval_is_found_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import deviations

    seeds = {"baseline": [0.31, 0.28, 0.35, 0.3], "NeuTRENO": [0.4, 0.38, 0.41, 0.47]}
    (tmp_path / "study").mkdir()
    with (tmp_path / "study" / "table.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, ["arm", "outcome", "mean", "low", "high", "finished"])
        table.writeheader()
        for arm, values in seeds.items():
            kept = interval(values)
            row = {"arm": arm, "outcome": "test/accuracy", "mean": kept.mean, "low": kept.low, "high": kept.high}
            table.writerow(row | {"finished": len(values)})
    monkeypatch.setattr(deviations, "RESULTS", tmp_path)
    mean, deviation, count = deviations.kept("study", "NeuTRENO", "test/accuracy")
    assert (mean, count) == (pytest.approx(statistics.fmean(seeds["NeuTRENO"])), 4)
    assert deviation == pytest.approx(statistics.stdev(seeds["NeuTRENO"]))
    row = deviations.Row("1", (50.0, 1.0), (53.0, 2.0), "study", "test/accuracy", "NeuTRENO")
    gain = (statistics.fmean(seeds["NeuTRENO"]) - statistics.fmean(seeds["baseline"])) / statistics.fmean(
        statistics.stdev(values) for values in seeds.values()
    )
    assert "| 50.00 ± 1.00 | 53.00 ± 2.00 | +2.0 |" in deviations.line(row)
    assert f"| {gain:+.1f} | 4 |" in deviations.line(row)
    with pytest.raises(LookupError, match="keeps no test/loss of baseline"):
        deviations.kept("study", "baseline", "test/loss")
