import pytest
import statistic_definitions
from statistic_calls import call_names, reading
from statistic_definitions import Whole

from headwise.health.statistics import STATISTICS, read, reasons, scan


def assert_exact(name, tally, expected):
    value = STATISTICS[name]().finish(tally).double()
    assert value.shape == expected.shape, name
    excess = (value - expected).abs() - (1e-4 * expected.abs() + 1e-6)
    same = (excess <= 0) | (value.isnan() & expected.isnan())
    assert same.all(), f"{name}: {value.tolist()} is not {expected.tolist()}"


@pytest.mark.parametrize("kind", call_names())
def test_every_statistic_equals_its_definition_on_the_whole_matrix(kind):
    here, before = reading(kind), reading(kind, seed=7)
    tallies = read(here, previous=before)
    skipped = reasons(here.facts(previous=True))
    assert set(tallies) | set(skipped) == set(STATISTICS)
    whole, previous = Whole(here), Whole(before)
    for name, tally in tallies.items():
        if kind == "soft capped" and "top_key" in STATISTICS[name].needs:
            # fp32 rounds several logits to the cap, and which is the largest is lost
            continue
        assert_exact(name, tally, getattr(statistic_definitions, name)(whole, previous))


@pytest.mark.parametrize("sizes", [{"BLOCK": 37 * 4 * 5, "FEWEST_ROWS": 2}, {"JOINED": 2 * 37 * 37 * 4}])
def test_every_statistic_is_exact_in_blocks_of_few_rows_or_samples(monkeypatch, sizes):
    for name, size in sizes.items():
        monkeypatch.setattr(scan, name, size)
    for kind in call_names():
        test_every_statistic_equals_its_definition_on_the_whole_matrix(kind)
