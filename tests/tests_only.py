"""Put packages that only the tests need on the path: `make test` installs them next to the user's environment, not in
it.

torchvision without operators for the installed torch breaks `import transformers` for a user; with the stub of
`torchvision_stub` the tests can use it.
"""

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "tests-only"


def on_path() -> None:
    """Put the folder on the path, once; pytest-xdist sets the path of its workers after this file was
    imported."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


on_path()
