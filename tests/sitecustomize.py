"""Let subprocesses of the tests import torchvision: its operators are stubbed only when it is imported."""

import sys

import tests_only  # noqa: F401


class _StubFirst:
    """Imports the stub just before torchvision itself is searched for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torchvision_stub  # noqa: F401
        return


sys.meta_path.insert(0, _StubFirst())
