"""Break the source in one place after another, and see whether the tests named for that place fail.

    make mutations                        every row of tests/mutations/*.toml: about 20 minutes of one core
    make mutations ARGS=results/power     the rows whose file contains this text

A row says what is broken and which tests must notice (`file` from the root; `tests` under tests/, or from
the root where they begin with verdict/tests; `::name` allowed):

    [[mutation]]
    file = "verdict/src/headwise_verdict/results/power.py"
    old = "low, high = max(least, 2) - 1, max(least, 2)"    # occurs exactly once in the file
    new = "low, high = max(least, 2), max(least, 2) + 1"
    tests = ["verdict/tests/study_analysis/test_oracles.py::test_the_seeds_needed_are_the_fewest_that_do"]
    lives = ""                                               # optional: why no test can tell the two apart

The tests run against a copy of the packages in a temporary folder. They must pass on the copy as it is, and then fail
with each row in turn; one that still passes is a survivor, unless its row says why it may live.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES, TABLES = ("src", "verdict/src", "papers/src"), Path(__file__).parent
# seconds after which a broken program counts as noticed
LIMIT = 300
PASSED, FAILED = 0, 1


def place(test: str) -> str:
    """Return the path of a row's test from the root."""
    return test if test.startswith("verdict/tests/") else f"tests/{test}"


@dataclass(frozen=True)
class Mutation:
    """One place of the source with what stands there, what breaks it, and the tests that must fail then."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    lives: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} → {self.new.strip()!r}"

    def broken(self, source: str) -> str:
        """Return the source with this mutation; raise ValueError unless the old text occurs exactly once."""
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} contains {self.old!r} {times} times: write more or less of the line")
        return source.replace(self.old, self.new)


def read(folder: Path = TABLES) -> list[Mutation]:
    """Return the rows of all tables; raise TypeError for a row with an entry that has no meaning."""
    rows = []
    for table in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(table.read_text(encoding="utf-8"))["mutation"]:
            rows.append(Mutation(**row | {"tests": tuple(row["tests"])}))
    return rows


class Copy:
    """A copy of the packages, on which tests are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in SOURCES:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))

    def run(self, tests: Sequence[str]) -> int | None:
        """Return pytest's exit status on the copy, None if it took too long."""
        paths = [*(str(self.folder / part) for part in SOURCES), os.environ.get("PYTHONPATH", "")]
        # bytecode is not written: a file that changes twice in a second would be taken for its older self
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        try:
            return subprocess.run(
                [*command, *map(place, tests)],
                cwd=ROOT,
                env=environment,
                timeout=LIMIT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ).returncode
        except subprocess.TimeoutExpired:
            return None

    def outcome(self, mutation: Mutation) -> str:
        """Return "killed", "survived", or why the row says nothing."""
        path = self.folder / mutation.file
        whole = path.read_text(encoding="utf-8")
        path.write_text(mutation.broken(whole), encoding="utf-8")
        try:
            status = self.run(mutation.tests)
        finally:
            path.write_text(whole, encoding="utf-8")
        if status in (FAILED, None):
            return "killed"
        return "survived" if status == PASSED else f"no test ran (pytest ended with {status})"


def main() -> None:
    """Apply the rows one after another; print each outcome, and exit with 1 if any is not as its row says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("only", nargs="*", help="texts of which a row's file must contain one; none: all rows")
    only = parser.parse_args().only
    rows = [row for row in read() if not only or any(text in row.file for text in only)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        tests = sorted({test for row in rows for test in row.tests})
        if not rows or copy.run(tests) != PASSED:
            sys.exit(f"These tests do not pass on the source as it is: {' '.join(tests) or 'no row was chosen'}")
        wrong = 0
        for row in rows:
            outcome = copy.outcome(row)
            expected = "survived" if row.lives else "killed"
            wrong += outcome != expected
            remark = f" ({row.lives})" if row.lives and outcome == expected else ""
            print(f"{'' if outcome == expected else '!!! '}{outcome}{remark}  {row}", flush=True)
    print(f"{len(rows)} mutations, {wrong} not as expected")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
