"""What the crossing of prompts adds to the first token: `python -m tests.hosts.measure_crossing`, as root.

Host a has a prefill and a decode worker, host b a decode worker alone. Of prompts of each length, in turns:

on one host   computed and answered at a
crossing      computed at a for b: pages cross while later ones are computed      exposed with overlap:    - on one host
brought       cached at a, answered at b: all pages cross, then its end is read
cached        cached at b                                                         exposed without: brought - cached
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.hosts.lab import Host
from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, WEIR, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

_MAX_NUM_SEQS, _TOKENS_A_LINE = 4, 16
_SIZES = ("--arena-bytes", "640MiB", "--max-context-tokens", "8192")
_SHM_BYTES = 900 << 20
_CLIENT = """
import asyncio, sys, time
from weir.testing.load import greedy_request, open_stub, stream

async def main(prompt_ids):
    channel, stub = open_stub("a:50051")
    async with channel:
        record = await stream(stub, greedy_request(prompt_ids, max_tokens=1, ignore_eos=True), timeout_s=100)
        print(1000 * record.elapsed_s)

asyncio.run(main([int(one) for one in sys.argv[1].split(",")]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="of each host's link; default: what there is")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 4000])
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_two_hosts(
            Path(folder),
            _MAX_NUM_SEQS,
            b_has="prefill = 0\ndecode = 1",
            rate_mbit=asked.rate_mbit,
            sizes=_SIZES,
            shm_bytes=_SHM_BYTES,
        ) as two,
    ):
        two.start(two.b)
        wait_until(lambda: two.num_workers() == 3, timeout_s=TIMEOUT_S, what="both hosts' workers are known")
        for num_tokens in asked.tokens:
            _measure(two, num_tokens, asked.rounds)


def _measure(two: TwoHosts, num_tokens: int, num_rounds: int) -> None:
    found: dict[str, list[float]] = {"on one host": [], "crossing": [], "brought": [], "cached": []}
    cpu_s = num_bytes = 0.0
    for number in range(num_rounds):
        here, crossing = (_prompt(num_tokens, 2 * number + kind) for kind in range(2))
        _drain(two, "--host", "b")
        found["on one host"].append(_first_token_ms(two.a, here))
        _drain(two, "--host", "b", "--undo")
        _drain(two, "decode-0")
        pages_before = _pages_here(two)
        before_s, began_s = _transfer_cpu_s(), time.monotonic()
        found["crossing"].append(_first_token_ms(two.a, crossing))
        found["brought"].append(_first_token_ms(two.a, here))
        busy_s, wall_s, before_s = _transfer_cpu_s() - before_s, time.monotonic() - began_s, _transfer_cpu_s()
        time.sleep(wall_s)
        cpu_s += busy_s - (_transfer_cpu_s() - before_s)  # what they need when nothing crosses
        num_bytes += (_pages_here(two) - pages_before) * (360 << 10)
        found["cached"].append(_first_token_ms(two.a, here))
        _drain(two, "decode-0", "--undo")
    for what, values in found.items():
        print(f"{num_tokens} tokens, {what}: {median(values):.0f} ms ({min(values):.0f} to {max(values):.0f})")
    middle = {what: median(values) for what, values in found.items()}
    print(
        f"{num_tokens} tokens: exposed with overlap {middle['crossing'] - middle['on one host']:.0f} ms, without "
        f"{middle['brought'] - middle['cached']:.0f} ms; {num_bytes / 1e6:.0f} MB crossed, "
        f"{cpu_s / max(num_bytes, 1) * 1e9:.2f} CPU s a GB of both transfer services",
        flush=True,
    )


def _prompt(num_tokens: int, number: int) -> list[int]:
    """That no other one begins like."""
    return [100 + (number * 7919 + index * 31) % 20_000 for index in range(num_tokens)]


def _first_token_ms(host: Host, prompt_ids: Sequence[int]) -> float:
    time.sleep(0.5)  # what is cached is told by then
    text = ",".join(map(str, prompt_ids))
    return float(json.loads(host.run(sys.executable, "-c", _CLIENT, text, timeout_s=TIMEOUT_S)))


def _pages_here(two: TwoHosts) -> float:
    """That came to b."""
    return two.figures(two.b)["transfer-0"]["remote_pages_received_total"]


def _transfer_cpu_s() -> float:
    """Of the transfer services of all hosts."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"weir_transfer" in (folder / "cmdline").read_bytes():
                times = (folder / "stat").read_text().rpartition(")")[2].split()
                total += int(times[11]) + int(times[12])
        except OSError:  # it has just ended
            continue
    return total / os.sysconf("SC_CLK_TCK")


def _drain(two: TwoHosts, *what: str) -> None:
    flags = () if "--undo" in what else ("--grace-s", "0", "--wait", "--force")
    two.a.run(*WEIR, "drain", *what, *RUNTIME, *flags, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    main()
