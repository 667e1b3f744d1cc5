"""A folder for the processes of one test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.runtime.services import kill_all


@pytest.fixture
def service_folder(tmp_path: Path) -> Iterator[Path]:
    """Whatever service a test started there is gone afterwards."""
    yield tmp_path
    kill_all(tmp_path)
