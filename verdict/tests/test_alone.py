"""The environment of `make verdict`: what runs there runs without torch, headwise and what only they need."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages

import pytest

import headwise_verdict


@pytest.mark.parametrize("name", ["torch", "transformers", "pandas", "headwise", "headwise_papers"])
def test_what_a_verdict_does_not_need_is_not_there(name):
    assert find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        import_module(name)


def test_every_module_can_be_imported_here():
    modules = [found.name for found in walk_packages(headwise_verdict.__path__, "headwise_verdict.")]
    assert len(modules) > 40
    for name in modules:
        import_module(name)
    assert not {"torch", "headwise"} & sys.modules.keys()
