"""Check in one process that every generated page is current, and that kept results follow from what is kept with them.

python docs/check.py

Prints what is not current, and the command that renews it, of all pages; exits with 1 if there is any.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

DOCS = Path(__file__).parent
GENERATED = (
    "claims_table.py",
    "source_pages.py",
    "deviations.py",
    "methods_table.py",
    "retrofit_table.py",
    "retrofit_elsewhere.py",
    "which_method.py",
    "league_page.py",
    "catalogue.py",
    "citation.py",
    "quoted.py",
    "method_contract.py",
    "judge_simulations.py",
    "pictures.py",
    "draw_house.py",
)


def fails(script: str, *arguments: str) -> bool:
    """Run a script of this folder as a command in this process; return whether it failed, and print why."""
    sys.argv = [f"docs/{script}", *arguments]
    try:
        runpy.run_path(str(DOCS / script), run_name="__main__")
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code not in (None, 0, False)
    except Exception:
        traceback.print_exc()
        return True
    return False


def main() -> None:
    """Check everything, so that one call names all that is not current."""
    sys.path.insert(0, str(DOCS))
    failed = [script for script in GENERATED if fails(script, "--check")]
    if fails("recompute.py"):
        failed.append("recompute.py")
    if failed:
        sys.exit(f"not current: {', '.join(failed)}")


if __name__ == "__main__":
    main()
