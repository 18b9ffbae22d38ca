"""A warning names the user's line, whether headwise was called directly, in a hook of torch, or by a Trainer."""

import re
import types
import warnings
from pathlib import Path

import pytest
import torch

import headwise
from headwise.files.user_warnings import warn

SOURCE = Path(headwise.__file__).parent


def places(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [(Path(one.filename).name, str(one.message)) for one in seen]


def test_a_warning_in_a_hook_of_torch_points_at_this_file():
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(types.FunctionType(hook.__code__, {"__name__": "headwise.hooks", "warn": warn}))
    assert places(lambda: layer(torch.ones(1, 2))) == [(Path(__file__).name, "told")]


def hook(module, inputs, outputs):
    warn("told")


def test_a_line_is_warned_about_once_and_filters_apply():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("once")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="told"):
            warn("told", RuntimeWarning)


def test_watching_warns_at_the_line_that_calls_step():
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    watch = headwise.watch(model, every=1)
    found = places(lambda: watch.step())
    assert found and {name for name, _ in found} == {Path(__file__).name}


def test_every_warning_of_the_library_finds_the_line_itself():
    direct = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"warnings\.warn\(", path.read_text(encoding="utf-8"))
    ]
    assert direct == []
