"""A run that spans several processes gives the numbers of one process on the whole batches."""

import subprocess
import sys

import pytest
from small_studies import PLACE, all_numbers, carry, tiny_study

ARM = "NeuTRENO(strength=0.5) + AttentionNormPenalty(strength=1.0, per_map=True)"


def test_two_processes_train_to_the_numbers_of_one(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command = [*launch, "headwise.cli", "compare", "--task", f"{PLACE}:Still", "--seeds", "1", "--method", ARM]
    command += ["--device", "cpu", "--out", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    carry(tiny_study("Still", methods=(ARM,)), tmp_path / "one")
    two, one = (
        {result["method"]: (lines, result["metrics"]) for lines, result in all_numbers(tmp_path / name).values()}
        for name in ("two", "one")
    )
    assert two.keys() == one.keys()
    for method, (lines, metrics) in one.items():
        for ours, theirs in zip(two[method][0], lines, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5), method
        # each process holds half of a batch
        assert two[method][1].pop("peak_memory_bytes") < metrics.pop("peak_memory_bytes")
        assert two[method][1] == pytest.approx(metrics, abs=2e-5), method


def test_tuning_over_several_processes_is_refused(tmp_path):
    from headwise.files.errors import StudyError

    with pytest.raises(StudyError, match="--tune works with one process a run"):
        carry(tiny_study().model_copy(update={"processes": 2}), tmp_path, trials=1)
