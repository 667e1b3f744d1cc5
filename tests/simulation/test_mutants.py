"""Each defect on purpose is found, by what it breaks."""

import pytest

from tests.simulation.campaign import try_find
from tests.simulation.mutants import MUTANTS

_MAX_WORLDS = 1000
"""Several times what the rarest takes."""


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    assert try_find(name, 1, _MAX_WORLDS, 2) is not None
