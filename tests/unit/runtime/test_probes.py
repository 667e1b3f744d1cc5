"""What the supervisor of a host answers to probes by HTTP."""

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.unit.runtime.drive_stack import LineReporter
from tests.unit.runtime.stacks import FAST, fake_plan, fake_spec

from weir.core.addresses import LOOPBACK, free_port
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.instances import serve_probes
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.supervisor import Supervisor


class ReadyReporter(LineReporter):
    """Sets `is_ready` when the stack is."""

    def __init__(self) -> None:
        self.is_ready = asyncio.Event()

    def stack_ready(self, endpoints: Mapping[str, str], after_s: float) -> None:
        self.is_ready.set()


@dataclass(frozen=True)
class ProbedConfig(StackConfig):
    @property
    def probe_address(self) -> tuple[str, int]:
        return LOOPBACK, self.http_port


async def test_probes_of_a_host_say_whether_all_of_its_processes_serve(tmp_path: Path) -> None:
    paths, reporter = InstancePaths(tmp_path / "instance"), ReadyReporter()
    paths.make()
    supervisor = Supervisor(fake_plan(paths, [fake_spec(paths, "decode-0")]), reporter, os.environ, FAST)
    config = ProbedConfig(http_port=free_port(), runtime_dir=tmp_path)
    url = f"http://{LOOPBACK}:{config.http_port}"
    async with serve_probes(config, supervisor), httpx.AsyncClient(base_url=url) as probe:

        async def statuses() -> list[int]:
            return [(await probe.get(path)).status_code for path in ("/live", "/ready")]

        assert await statuses() == [200, 503]
        running = asyncio.create_task(supervisor.run())
        await asyncio.wait_for(reporter.is_ready.wait(), 20)
        assert await statuses() == [200, 200]
        [state] = supervisor.states
        assert state.identity is not None
        os.kill(state.identity.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while supervisor.is_serving:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 20)
        assert await statuses() == [200, 503]
