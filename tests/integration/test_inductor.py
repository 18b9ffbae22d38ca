"""torch.compile with its default backend, for methods that draw or edit a call: what it runs gives eager's numbers."""

import re

import pytest
import torch
from inductor import assert_inductor_gives_the_numbers_of_eager
from torch._inductor.utils import run_and_get_code

from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY
from headwise.attend.core.random_draws import GOLDEN, uniform, uniform_matrix

# of draws, in blocks of rows
SHAPE = (2, 4, 8)
NAMES = [name for name in shelf.__all__ if not (REGISTRY[name].penalizes or REGISTRY[name].learns)]


# one that penalizes runs in every test run: test_inductor_learned.py
@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_inductor_gives_the_numbers_of_eager(name):
    assert_inductor_gives_the_numbers_of_eager(name)


@pytest.mark.parametrize("draw", [uniform, uniform_matrix])
def test_the_compiler_does_not_multiply_positions_as_indices(draw):
    """On a GPU an index is of 32 bits where the sizes allow it, and the hash of a draw does not fit."""
    torch._dynamo.reset()
    key = torch.tensor(77)
    compiled = torch.compile(lambda key: draw(key, 5, SHAPE, key.device), fullgraph=True)
    drawn, (code, *_) = run_and_get_code(compiled, key)
    torch._dynamo.reset()
    assert re.search(rf"static_cast<int64_t>\({GOLDEN}\)", code)
    assert not re.search(rf"{GOLDEN}L?\*", code)
    torch.testing.assert_close(drawn, draw(key, 5, SHAPE, key.device), rtol=0, atol=0)
