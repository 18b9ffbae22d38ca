"""torch.compile with its default backend, for methods that draw or edit a call: what it runs gives eager's numbers."""

import pytest
from grids import part_of_grid
from inductor import assert_inductor_gives_the_numbers_of_eager

from headwise import methods as shelf
from headwise.core.method import REGISTRY

pytestmark = pytest.mark.slow
NAMES = [name for name in shelf.__all__ if not (REGISTRY[name].penalizes or REGISTRY[name].learns)]


@pytest.mark.parametrize("name", part_of_grid(NAMES, ("DropHead",)))
def test_inductor_gives_the_numbers_of_eager(name):
    assert_inductor_gives_the_numbers_of_eager(name)
