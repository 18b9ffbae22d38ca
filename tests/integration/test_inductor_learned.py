"""torch.compile with its default backend, for methods that learn or penalize: what it runs gives eager's numbers."""

import pytest
from inductor import assert_inductor_gives_the_numbers_of_eager

from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

# A file of its own: files are what test workers share out, and a compilation takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.grid]
NAMES = [name for name in shelf.__all__ if REGISTRY[name].penalizes or REGISTRY[name].learns]


@pytest.mark.parametrize("name", NAMES)
def test_inductor_gives_the_numbers_of_eager(name):
    assert_inductor_gives_the_numbers_of_eager(name)
