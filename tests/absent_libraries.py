"""Run code as if libraries were not installed."""

from __future__ import annotations

import subprocess
import sys


def run_without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process in which these libraries can be neither found nor imported."""
    program = f"import sys\nsys.modules.update(dict.fromkeys({sorted(names)!r}))\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
