"""The README's example runs as it stands, and names only what exists."""

import re
from pathlib import Path

import pytest

import headwise

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs(capsys):
    code = re.search(r"<!-- example.*?-->\s*```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len(code.strip().splitlines()) <= 30
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "regularized" in printed and "NeuTRENO(strength=0.6)" in printed and "statistic" in printed


def test_linked_files_exist():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (root / target).exists(), target


def test_unknown_public_names_are_refused():
    with pytest.raises(AttributeError, match="DropHed"):
        _ = headwise.DropHed
    assert "DropHead" in dir(headwise)


def test_functions_are_not_hidden_by_modules_of_their_names():
    from headwise.regularizing.handle import Regularized
    from headwise.regularizing.plan import plan  # noqa: F401

    assert headwise.Regularized is Regularized and callable(headwise.regularize) and callable(headwise.sites)
