"""How far one call goes through the house: counts that may only fall."""

import csv
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
# The most rooms with a door, files and folders of each way. A number that is too high goes down.
MOST = {"a Llama's forward with three methods": (1, 23, 7), "a study, from `compare` to its page": (3, 155, 20)}


@pytest.fixture(scope="module")
def flow():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        import flow
    return flow


def _counts(row):
    return len(row["rooms"].split()), int(row["files"]), int(row["folders"])


@pytest.mark.parametrize("way", MOST)
def test_a_call_goes_no_farther_than_its_limit(flow, way):
    found, limits = _counts(flow.counted(way)), MOST[way]
    assert all(count <= limit for count, limit in zip(found, limits, strict=True)), (found, limits)
    assert found[1] > limits[1] - 20, "the limit is too high"


def test_the_counts_that_the_page_shows_are_within_the_limits(flow):
    with (DOCS / "flow.csv").open(encoding="utf-8", newline="") as file:
        kept = {row["way"]: _counts(row) for row in csv.DictReader(file)}
    assert flow.WAYS.keys() == kept.keys() == MOST.keys()
    for way, counts in kept.items():
        assert all(count <= limit for count, limit in zip(counts, MOST[way], strict=True)), way
