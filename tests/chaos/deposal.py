"""Whether a leader keeps its key on a machine that is overloaded: `python -m tests.chaos.deposal --minutes 60`.

Two schedulers, a gateway and a host serve a stream after the other while `--load` processes burn the CPU. Prints how
often the leader changed, which should be never; ends with 1 if it did, or a stream failed.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from tests.chaos.hosts import Cluster

from weir.testing.load import greedy_request, open_stub, stream

_BURN = "while True: pass"


def depositions(cluster: Cluster) -> tuple[float, float]:
    """(how often a scheduler was deposed, the epoch)"""
    metrics = [scheduler.metrics() for scheduler in cluster.schedulers]
    return sum(one["depositions_total"] for one in metrics), max(one.get("epoch", 0.0) for one in metrics)


async def serve(cluster: Cluster, ends_at_s: float) -> tuple[int, int]:
    """(streams, those that failed)"""
    num_streams = num_failed = 0
    channel, stub = open_stub(cluster.grpc_address)
    async with channel:
        while time.monotonic() < ends_at_s:
            record = await stream(stub, greedy_request([num_streams % 50] * 40, max_tokens=40), timeout_s=120)
            num_streams += 1
            num_failed += record.code is not grpc.StatusCode.OK
    return num_streams, num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--load", type=int, default=10)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), num_schedulers=2) as cluster:
        cluster.add_host("a")
        before = depositions(cluster)
        burners = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(flags.load)]
        try:
            num_streams, num_failed = asyncio.run(serve(cluster, time.monotonic() + flags.minutes * 60))
            load = os.getloadavg()[0]
            after = depositions(cluster)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
    print(f"{flags.minutes:g} minutes at load {load:.1f} on {len(os.sched_getaffinity(0))} cores")
    print(f"{num_streams} streams, {num_failed} failed; depositions {after[0] - before[0]:g}")
    print(f"epochs {before[1]:.0f} to {after[1]:.0f}")
    return 0 if after == before and num_failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
