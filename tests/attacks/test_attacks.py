"""Each attempt against a running stack is refused, with the status that its row names."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attacks.__main__ import ATTEMPTS
from tests.attacks.attempt import Attempt, Scene, open_scene
from tests.attacks.networks import attack_from_another_network, is_possible

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(tmp_path_factory.mktemp("scene")) as opened:
        yield opened


@pytest.mark.skipif(os.getuid() != 0 or not is_possible(), reason="only root, with `ip`, can make networks")
def test_a_stranger_in_another_network_is_refused_with_stolen_certificates_too(tmp_path: Path) -> None:
    rows = attack_from_another_network(tmp_path)
    assert len(rows) > 15
    assert [row for row in rows if row[2] != row[3]] == []


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: f"{attempt.finding[0]} {attempt.what}")
async def test_it_is_refused(scene: Scene, attempt: Attempt) -> None:
    if attempt.needs_root and os.getuid() != 0:
        pytest.skip("only root can be another user")
    assert await attempt.run(scene) == attempt.expected
