"""torch.compile with its default backend, for methods that learn or penalize: what it runs gives eager's numbers."""

import pytest
from grids import part_of_grid
from inductor import assert_inductor_gives_the_numbers_of_eager

from headwise import methods as shelf
from headwise.core.method import REGISTRY

# A file of its own: files are what test workers share out, and a compilation takes seconds.
pytestmark = pytest.mark.slow
NAMES = [name for name in shelf.__all__ if REGISTRY[name].penalizes or REGISTRY[name].learns]

KEPT = ("EntropyPenalty",)


@pytest.mark.parametrize("name", part_of_grid(NAMES, KEPT))
def test_inductor_gives_the_numbers_of_eager(name):
    assert_inductor_gives_the_numbers_of_eager(name)
