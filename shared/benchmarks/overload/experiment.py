"""The experiment, on a stack of its own with two tenants.

peak of `flood` ─> `other` alone ─> flood at ten times the peak, `other` beside it ─> normal? ─> burst ─> idle ─> peak
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overload.client import Shot, Target
from benchmarks.overload.loads import Sender, idle_connections, wait_normal
from benchmarks.overload.memory import watched
from weir.bench.serving.figures import p99
from weir.core.credentials import key_digest
from weir.testing.stack import Stack

FLOOD, OTHER = "flood", "other"
_WARM_UP_S = 5.0
_NORMAL_TIMEOUT_S = 120.0
_NORMAL_FACTOR = 2.0
"""A first token within this many times the slowest (p99) before the flood is normal."""


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """Lengths in tokens. `factor`: the flood's rate over what can be served; `max_wait_s`: of the one lane."""

    model: str = "smollm2-135m"
    input_len: int = 64
    output_len: int = 32
    peak_s: float = 20.0
    flood_s: float = 120.0
    factor: float = 10.0
    other_part: float = 0.1
    """Of what can be served: the other tenant's rate."""
    other_s: float = 30.0
    burst: int = 1500
    num_idle: int = 5000
    max_wait_s: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """What was sent and came back. Rates are of requests a second; peaks were measured before and after."""

    peak_rates_a_s: tuple[float, float]
    alone: list[Shot]
    """The other tenant's before the flood."""
    flood: list[Shot]
    flood_s: float
    beside: list[Shot]
    """The other tenant's while the flood was sent."""
    normal_after_s: tuple[float, float]
    """Of the other tenant, and of the one that flooded, from the flood's last request on."""
    burst: list[Shot]
    num_idle_held: int
    idle: list[Shot]
    """The other tenant's beside idle connections."""
    max_bytes: dict[str, int]
    """Anonymous memory by process, at most."""


def run(config: OverloadConfig, say: Callable[[str], None]) -> OverloadRun:
    """Starts a stack and ends it. Raises RuntimeError for one that does not start, or serves nobody."""
    keys = {tenant: f"weir-{secrets.token_hex(16)}" for tenant in (FLOOD, OTHER)}
    with tempfile.TemporaryDirectory(prefix="weir-overload-") as folder:
        limits = Path(folder) / "limits.toml"
        limits.write_text(_limits(config, keys))
        flags = ("--model", config.model, "--limits-file", str(limits))
        with Stack(Path(folder), flags=flags) as stack:
            target = Target(stack.http_port, config.model, keys, config.output_len)
            return asyncio.run(_Experiment(config, stack, target, say).run())


def _limits(config: OverloadConfig, keys: dict[str, str]) -> str:
    tenants = "".join(
        f'[tenants.{tenant}]\napi_key_digests = ["{key_digest(key).hex()}"]\n' for tenant, key in keys.items()
    )
    lane = f"[lanes.standard]\nmax_queued = 8000\nmax_wait_s = {config.max_wait_s:g}\n"
    return f'default_lane = "standard"\n{lane}{tenants}'


class _Experiment:
    """One stack under load."""

    def __init__(self, config: OverloadConfig, stack: Stack, target: Target, say: Callable[[str], None]) -> None:
        self._config = config
        self._stack = stack
        self._say = say
        self._flood = Sender(target, config.input_len, config.seed)
        self._other = Sender(target, config.input_len, config.seed + 1)
        self._other_rate_a_s = 0.0

    async def run(self) -> OverloadRun:
        config = self._config
        views = await asyncio.to_thread(self._stack.processes)
        async with watched({view.name: view.pid for view in views}) as max_bytes:
            await self._flood.closed_loop(FLOOD, 32, _WARM_UP_S)
            before = await self._peak()
            self._say(f"the other tenant alone (peak: {before:.1f} requests/s)")
            self._other_rate_a_s = config.other_part * before
            alone = await self._other.open_loop(OTHER, self._other_rate_a_s, config.other_s)
            flood, beside, flood_s, normal_after_s = await self._overload(before, _slowest(alone))
            self._say(f"{config.burst} at once")
            burst = await self._flood.burst(FLOOD, config.burst)
            idle, num_held = await self._idle()
            after = await self._peak()
        return OverloadRun(
            peak_rates_a_s=(before, after),
            alone=alone,
            flood=flood,
            flood_s=flood_s,
            beside=beside,
            normal_after_s=normal_after_s,
            burst=burst,
            num_idle_held=num_held,
            idle=idle,
            max_bytes=max_bytes,
        )

    async def _peak(self) -> float:
        """Requests served a second while as many wait as a worker runs."""
        self._say("as much as can be served")
        began_s = time.monotonic()
        shots = await self._flood.closed_loop(FLOOD, 40, self._config.peak_s)
        num_whole = sum(shot.is_whole for shot in shots)
        if not num_whole:
            raise RuntimeError("the stack served no request")
        return num_whole / (time.monotonic() - began_s)

    async def _overload(
        self, peak_a_s: float, slowest_s: float
    ) -> tuple[list[Shot], list[Shot], float, tuple[float, float]]:
        config = self._config
        self._say(f"flood of {config.factor * peak_a_s:.0f} requests/s for {config.flood_s:g} s")
        began_s = time.monotonic()
        flooding = asyncio.create_task(self._flood.open_loop(FLOOD, config.factor * peak_a_s, config.flood_s))
        beside = asyncio.create_task(self._other.open_loop(OTHER, self._other_rate_a_s, config.flood_s))
        await asyncio.sleep(max(0.0, began_s + config.flood_s - time.monotonic()))
        within_s = _NORMAL_FACTOR * slowest_s
        normal_after_s = await asyncio.gather(
            wait_normal(self._other, OTHER, within_s, _NORMAL_TIMEOUT_S),
            wait_normal(self._flood, FLOOD, within_s, _NORMAL_TIMEOUT_S),
        )
        return await flooding, await beside, time.monotonic() - began_s, normal_after_s

    async def _idle(self) -> tuple[list[Shot], int]:
        config = self._config
        self._say(f"{config.num_idle} idle connections on each port")
        ports = (self._stack.http_port, self._stack.grpc_port)
        async with idle_connections(ports, config.num_idle) as writers:
            shots = await self._other.open_loop(OTHER, self._other_rate_a_s, config.other_s)
            num_held = sum(not writer.transport.is_closing() for writer in writers)
        return shots, num_held


def _slowest(shots: list[Shot]) -> float:
    ttfts_s = [shot.first_s - shot.sent_s for shot in shots if shot.is_whole]
    if not ttfts_s:
        raise RuntimeError("the other tenant was not served, alone on the stack")
    return p99(ttfts_s)
