"""Each defect on purpose is found."""

import pytest

from tests.simulation.campaign import try_find
from tests.simulation.mutants import MUTANTS

_MAX_SEEDS = 400


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    assert try_find(name, 1, _MAX_SEEDS, 2) is not None
