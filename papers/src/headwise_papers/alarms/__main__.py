"""Run the study on its own: python -m headwise_papers.alarms --out FOLDER [--data FOLDER] [--seeds N] [--jobs N]."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from headwise.files.provenance import describe_environment
from headwise_papers.alarms import run
from headwise_verdict.files.durable import write_json


def main() -> None:
    """Execute the missing runs, and write findings.json and the report."""
    parser = argparse.ArgumentParser(prog="python -m headwise_papers.alarms", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the study; existing runs are not repeated")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--seeds", type=int, help="seeds of each family with faults")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    start = time.monotonic()
    say = lambda text: print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
    content = run(options.out, seeds=options.seeds, jobs=options.jobs, progress=say, data=options.data)
    seconds = {"seconds": time.monotonic() - start}
    command = "headwise compare alarms" + (f" --seeds {options.seeds}" if options.seeds else "")
    write_json(options.out / "findings.json", {**describe_environment(), "command": command, **seconds, **content})
    from headwise_verdict.reporting import write

    print(write(options.out))


if __name__ == "__main__":
    main()
