"""A store of pages with a fault of its own is told, and ends nothing else."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.unit.transfer.pages import compute, num_found
from tests.unit.transfer.test_tier_keeper import World, written

from weir.kv.tiers.file_store import PageFileStore


@pytest.mark.parametrize("call", ["try_get", "try_put", "close"])
async def test_a_store_with_a_fault_of_its_own_is_told_and_all_else_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    async with AsyncExitStack() as closing:
        world = World(tmp_path, closing, on_device=True)
        await written(world)
        host, client = await world.host()

        def fails(*arguments: object) -> bool:
            raise ZeroDivisionError("a fault")

        monkeypatch.setattr(PageFileStore, call, fails)
        assert await num_found(client) == (0 if call == "try_get" else 10)
        await compute(client, 12)
        assert host.service._memory_server is not None
        path = host.service._memory_server.path
        assert path.exists()
    assert not path.exists()
    assert "ZeroDivisionError: a fault" in caplog.text
