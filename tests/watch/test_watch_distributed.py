import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import Own

import headwise

VECTORS = torch.randn(8, 9, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("distributed_watch.py")
    runs = [
        subprocess.Popen([sys.executable, str(script), str(rank), "2", str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert all(run.returncode == 0 for run in runs), "\n".join(errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(0)
    model = Own().train()
    watch = headwise.watch(model, every=2, on_alert=None)
    model(VECTORS)
    watch.step()
    watch.remove()
    return watch.records()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_ranks_together_read_what_one_process_reads_of_the_whole_batch(ranks, whole, kind):
    for rank in ranks:
        first = [r for r in rank[kind]["records"] if r["step"] == 0]
        found = {(r["site"], r["head"], r["statistic"]): r["value"] for r in first}
        expected = {(r["site"], r["head"], r["statistic"]): r["value"] for r in whole}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert ranks[0][kind]["records"] == ranks[1][kind]["records"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_reading_is_one_collective_and_changes_no_bit(ranks, kind):
    for rank in ranks:
        assert rank[kind]["gathered"] == [0, 2]
        assert rank[kind]["losses"] == rank[kind]["plain"]
