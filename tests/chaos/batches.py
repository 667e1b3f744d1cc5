"""Whether a batch outlives all that answers it: `python -m tests.chaos.batches --lines 2000`.

Two gateways answer a file of requests. Once a third of it is answered, and again at two thirds, every process is killed
at once, the supervisor, NATS and the transfer service among them, and `weir up` starts them again. Prints what was
killed when, and how often each line was answered; ends with 1 unless that is once for every line.

    python -m tests.chaos.batches --lines 2000
    python -m tests.chaos.batches --lines 500 --kills 4 --lease 2
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from weir.core.process import ProcessIdentity
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.processes import find_tagged, is_running, send_signal
from weir.runtime.stack.state import identities_of, try_read_state
from weir.testing.stack import Stack, wait_until

_WAIT_S = 1800.0
_POLL_S = 0.05
_GONE_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A file of chats, as `vllm run-batch` reads it too, and what comes of it."""

    folder: Path
    num_lines: int
    max_tokens: int = 2

    def submit(self, stack: Stack) -> str:
        """The batch's id."""
        source = self.folder / "in.jsonl"
        source.write_text("".join(f"{json.dumps(entry)}\n" for entry in self._entries()))
        done = stack.weir("batch", "submit", str(source), "--url", stack.http_url, timeout_s=_WAIT_S)
        if done.returncode != 0:
            raise RuntimeError(f"weir batch submit ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def fetch(self, stack: Stack, batch_id: str) -> list[dict[str, Any]]:
        """Every line of the output and the error file, once the batch has ended."""
        paths = output, errors = self.folder / "out.jsonl", self.folder / "out.errors.jsonl"
        words = ("batch", "fetch", batch_id, "--wait", "--output", str(output), "--errors", str(errors))
        stack.weir(*words, "--url", stack.http_url, timeout_s=_WAIT_S)
        return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]

    def problems(self, found: list[dict[str, Any]]) -> list[str]:
        """What is wrong with the answers: nothing, where each line has one and no line failed."""
        counts = Counter(entry["custom_id"] for entry in found)
        expected = [entry["custom_id"] for entry in self._entries()]
        missing = [name for name in expected if not counts[name]]
        wrong = [f"{name} is answered {count} times" for name, count in counts.items() if count > 1]
        wrong += [f"{len(missing)} lines have no answer, {missing[0]} first"] if missing else []
        wrong += [f"{name}: nobody asked that" for name in counts.keys() - set(expected)]
        wrong += [f"{entry['custom_id']} failed: {entry}" for entry in found if not _is_answer(entry)]
        in_order = [entry["custom_id"] for entry in found if _is_answer(entry)]
        return wrong + (["answers are not in the order of the lines"] if not wrong and in_order != expected else [])

    def _entries(self) -> Iterator[dict[str, Any]]:
        for index in range(self.num_lines):
            body = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": f"Say {index}."}],
                "max_completion_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,  # so that each takes its time
            }
            yield {"custom_id": f"request-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def _is_answer(entry: dict[str, Any]) -> bool:
    response = entry["response"]
    return response is not None and response["status_code"] == 200 and bool(response["body"]["choices"])


def num_answered(url: str, batch_id: str) -> int:
    """Of the batch's lines; 0 while no gateway answers there."""
    try:
        answer = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=30)
    except httpx.HTTPError:
        return 0
    return int(answer.json()["request_counts"]["completed"]) if answer.status_code == 200 else 0


def wait_answered(url: str, batch_id: str, num_lines: int) -> int:
    """Returns how many were answered when it were at least so many."""
    seen = 0

    def are_enough() -> bool:
        nonlocal seen
        seen = num_answered(url, batch_id)
        return seen >= num_lines

    wait_until(are_enough, timeout_s=_WAIT_S, what=f"{num_lines} lines are answered", interval_s=_POLL_S)
    return seen


def kill_everything(stack: Stack) -> int:
    """SIGKILL to every process of the stack, the supervisor first, which would start the others again. Returns their
    number when all are gone."""
    paths = InstancePaths(stack.runtime_dir / stack.instance)
    state = try_read_state(paths.state_file)
    assert state is not None, "the stack runs"
    _kill([state.supervisor])
    processes = {*identities_of(state), *(process.identity for process in find_tagged(paths.folder))}
    _kill(list(processes - {state.supervisor}))
    return len(processes | {state.supervisor})


def _kill(processes: list[ProcessIdentity]) -> None:
    for process in processes:
        send_signal(process, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, processes)), timeout_s=_GONE_S, what="all are dead")


def run(stack: Stack, job: BatchJob, num_kills: int) -> list[str]:
    """What is wrong with the answers. Prints each kill."""
    began_s = time.monotonic()
    batch_id = job.submit(stack)
    for index in range(1, num_kills + 1):
        seen = wait_answered(stack.http_url, batch_id, job.num_lines * index // (num_kills + 1))
        num_killed = kill_everything(stack)
        killed_s = time.monotonic()
        if seen >= job.num_lines:
            return [f"all lines were answered before kill {index}: give more"]
        stack.start()
        up_s = time.monotonic() - killed_s
        _say(f"kill -9 of {num_killed} processes after {seen:,} of {job.num_lines:,} lines; up again in {up_s:.1f} s")
    found = job.fetch(stack, batch_id)
    problems = job.problems(found)
    _say(f"{len(found):,} lines of output after {time.monotonic() - began_s:.0f} s, {len(problems)} problems")
    return problems


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--lease", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    environ = {"WEIR_BATCH_LEASE_S": str(options.lease)}
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), flags=("--gateways", str(options.gateways)), environ=environ) as stack,
    ):
        problems = run(stack, BatchJob(Path(folder), options.lines), options.kills)
    for problem in problems[:20]:
        _say(problem)
    _say(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    if not problems:
        _say(f"each of {options.lines:,} lines is answered once, though everything was killed {options.kills} times")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
