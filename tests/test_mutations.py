"""The tables of mutations name places and tests that exist; `make mutations` applies them."""

import re

import pytest
from mutations.run import ROOT, Mutation, place, read

ROWS = read()


def test_every_row_breaks_one_place_that_exists():
    for row in ROWS:
        source = (ROOT / row.file).read_text(encoding="utf-8")
        broken = row.broken(source)
        assert broken != source, row
        compile(broken, row.file, "exec")


def test_every_row_names_tests_that_exist():
    for row in ROWS:
        assert row.tests, row
        for test in row.tests:
            name, _, function = test.partition("::")
            source = (ROOT / place(name)).read_text(encoding="utf-8")
            assert not function or re.search(rf"^def {re.escape(function)}\(", source, re.MULTILINE), test


def test_no_place_is_broken_twice_in_the_same_way():
    places = [(row.file, row.old, row.new) for row in ROWS]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(("source", "times"), [("a = 2\n", 0), ("a = 1\nb = a = 1\n", 2)])
def test_a_row_whose_text_is_gone_or_stands_twice_is_refused(source, times):
    with pytest.raises(ValueError, match=rf"x.py contains 'a = 1' {times} times"):
        Mutation("x.py", "a = 1", "a = 3", ("test_mutations.py",)).broken(source)
