"""Write docs/which_method.md and its tables from the runs that are kept in docs/league/second.

python docs/league_page.py --keep results/league     add the worlds of this folder to the kept ones
python docs/league_page.py                           write the page and its tables
python docs/league_page.py --check                   check whether they are current
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import sys
from importlib import resources
from pathlib import Path

from headwise_papers.league.contest import Contest
from headwise_papers.league.contest_files import read_contestants, read_small_worlds
from headwise_papers.league.contest_page import page
from headwise_papers.league.contest_tables import tables
from headwise_papers.league.run_ledger import FILE, WORLD_FILE

from headwise_verdict.files.ownership import claim

DOCS = Path(__file__).resolve().parent
OF_PAPERS = Path(str(resources.files("headwise_papers"))) / "league"
KEPT, PAGE = DOCS / "league" / "second", DOCS / "which_method.md"

LEAD = """# Which method?

<!-- by python docs/league_page.py -->
"""
CHANGED = """## What changed, and why

This is the second edition. The first advised by world, and its two strongest recommendations did not survive a \
world that it had not seen:

- *Few training examples → weight decay, +11.75 points* came from the plain model's learning rate: its six trials \
never drew the range in which most "better" entries sat. Against a plain model at 0.0072, a rate in its range, \
weight decay gains 6.0 points on the same seeds, and the plain model's own gain by that rate is 4.3 points [2.0, \
6.5]; 15 of 25 "better" entries vanish. On a sentence task that the league had not seen: +1.7 points [−1.7, 4.6].
- *Stands still or explodes → LayerScale*: on another deep post-LN model without warm-up (a vision transformer) it \
is worse by 7.7 points [1.5, 14.0].
- *Memorises images → augmentation*: on other memorised images worse by 3.6 points [2.3, 4.8].
- *Memorised words* had no room for a gain: the plain model (32.6 %) was below the constant answer (33.2 %). \
*Little data* (speech) was too little training: its training errors, 66.7 %, exceeded its test errors, 64.5 %. \
Both worlds left.

So a world now has premises that are tested; all contestants share one grid of rates; the plain model also runs at \
every rate that a contestant chose, and a gain is against the best of these; and advice on a symptom needs three \
unlike worlds, and a gain in each world that it was not taken from. [How it works](league.md). The first edition's \
forty entries are kept as [a dated table without advice](wide_league.md).

### Worlds that failed

A world whose premises fail is not in the league. These failed before any final seed, on 28 November 2026, and were \
changed or left out; the first figure is what the plain model makes, the second what the premise asks:

- *Memorised utterances* with 150 and 200 of them: 0.210 against 0.204, 0.194 against 0.192 errors (a tenth fewer \
than the nearest class mean). It has 380 now. *Few digits* with 200 images seen 10 times each: twice as many left \
0.164 errors, against 0.143 (a tenth fewer). It has 250, seen 12 times.
- *Few cells* (24 of 169 patients): 0.079 against 0.064 (the same). *Few verses* (200 windows of characters): 0.762 \
against 0.675 (a tenth fewer than the most frequent character after each). *Deep post-LN on text* (80 steps): no rate \
above 0.25 right, where the most frequent character after each is right in 0.254. All three left. No world reads \
text, for a model of a few seconds does not beat such counts.
- *No norms on images* (six layers of width 32, 60 steps): 0.417 against 0.198. *Deep post-LN on speech* (40 steps): \
0.323 against 0.186. Both have 120 steps now, and the first four layers of width 64.
- Depth: two layers, at their own best rate, should make a tenth fewer errors. Ten layers of a vision transformer \
without norms before attention: 0.142 against 0.112. Twelve post-LN layers on tables: 0.049 against 0.046. Eight on \
speech: 0.194 against 0.160. Depth does no harm there. It does where MLPs have one hidden unit, as in the three worlds \
of depth now; of these, eight and twelve layers on tables for 100 steps (0.050 against 0.043, 0.050 against 0.047) \
left too, and ten for 60 and 80 steps on tables and for 60 on speech and ten digits, which the simplest learned \
predictor beats. Until 28 November 2026 two layers were tried at the deep model's rate, which is too low for them; the \
rule changed before any final seed of a world of depth but *Eight layers of recall*, whose premise holds either way.

The runs are in `docs/league/second`, a line each; [gains.csv](league/second/gains.csv), \
[symptoms.csv](league/second/symptoms.csv), [transfer.csv](league/second/transfer.csv) and \
[premises.csv](league/second/premises.csv) hold every figure. `python docs/recompute.py` computes them again, by \
other code.
"""


def contests(kept: Path = KEPT) -> list[Contest]:
    """Return the contests of all worlds, with the runs that are kept."""
    contestants = read_contestants([OF_PAPERS])
    return [Contest.kept(world, contestants, kept / name) for name, world in read_small_worlds([OF_PAPERS]).items()]


def keep(folder: Path) -> None:
    """Copy the journals of a league's worlds; those of worlds that headwise-papers lacks are refused."""
    known = read_small_worlds([OF_PAPERS])
    for journal in sorted(folder.glob(f"*/{FILE}")):
        name = journal.parent.name
        if name not in known:
            raise SystemExit(f"{name} is not a world of headwise-papers. Known: {', '.join(known)}.")
        # its marker is kept too, so that a copy of the journals is resumed
        claim(KEPT / name, (FILE, WORLD_FILE))
        for part in (FILE, WORLD_FILE):
            shutil.copy(journal.parent / part, KEPT / name / part)


def written() -> dict[Path, str]:
    """Return every generated file with its text."""
    found = contests()
    files = {PAGE: f"{LEAD}\n{page(found)}\n\n{CHANGED}"}
    for name, rows in tables(found).items():
        stream = io.StringIO()
        if rows:
            writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: f"{v:.8g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows)
        files[KEPT / f"{name}.csv"] = stream.getvalue()
    return files


def main() -> None:
    """Keep, write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep)
    old = []
    for path, text in written().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path.relative_to(DOCS.parent))
            if not options.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if options.check and old:
        sys.exit(f"{', '.join(map(str, old))} not current: run python docs/league_page.py")


if __name__ == "__main__":
    main()
