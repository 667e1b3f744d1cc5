"""`weir up --device cuda` with a dummy model: a worker is killed while it answers, and the answer is the same.

Needs what a whole Weir needs; where something of it is missing the part is skipped and says what.
"""

import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from benchmarks.gpu.case_loop import CaseLoop, CaseSkipped
from benchmarks.gpu.output import Record
from benchmarks.gpu.session import LIMIT_VARIABLE

if TYPE_CHECKING:
    from weir.testing.stack import Stack

_NEEDED = (
    *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.protobuf", "msgpack", "nats", "numba"),
    *("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc", "pydantic", "rich", "starlette", "tokenizers"),
    *("typer", "uvicorn", "uvloop", "xxhash", "yaml", "jinja2", "gguf", "safetensors", "httpx"),
)
_PROMPT = [(11 * number + 3) % 1024 for number in range(37)]
_NUM_TOKENS = 900
"""More than a second of them: the worker that answers has to be found before it is done."""
_KILLED_AFTER = 20
_LEAST_DIFFERENT_IDS = 50  # an answer of one token would be the same whatever happened
_DOWN_S = 15.0
# fp32: a sequence that is computed again from its prompt adds in another order, which bf16 may show in a token
_FLAGS = ("--device", "cuda", "--precision", "fp32", "--load", "dummy", "--model-shape", "tiny")


class _OutOfTime(Exception):
    """The part's time is nearly over: what is started is ended now."""


def missing_packages() -> list[str]:
    """Of those that `weir up` imports."""
    return [name for name in _NEEDED if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a package that it is in
        return False


def _need_everything() -> None:
    missing = missing_packages()
    if missing:
        raise CaseSkipped(f"not installed: {', '.join(missing)}")
    from weir.bus.server import NatsServerMissing, find_nats_server  # noqa: PLC0415

    try:
        find_nats_server()
    except NatsServerMissing as error:
        raise CaseSkipped(str(error)) from error


def kill_and_compare(folder: Path) -> Iterator[Record]:
    """One answer undisturbed, one whose decode worker is killed after some tokens, one after it has come back."""
    _need_everything()
    from weir.testing.stack import Stack, wait_until  # noqa: PLC0415 - not everywhere

    started_s = time.monotonic()
    with Stack(folder, num_decode=2, flags=_FLAGS, environ={"WEIR_SERVES_LOCALLY": "false"}) as stack:
        yield {"ready_after_s": time.monotonic() - started_s}
        expected = _answer(stack)
        found = _answer(stack, kill_after=_KILLED_AFTER)
        num_equal = sum(left == right for left, right in zip(expected, found, strict=False))
        yield {
            "verdict": "ok" if found == expected and len(set(expected)) > _LEAST_DIFFERENT_IDS else "failed",
            "tokens": len(expected),
            "equal_after_kill": num_equal,
            "different_ids": len(set(expected)),
        }
        wait_until(lambda: all(each.state == "ready" for each in stack.processes()), timeout_s=30, what="all are ready")
        is_equal = _answer(stack) == expected
        errors = stack.integrity_errors()
        yield {
            "verdict": "ok" if is_equal and not errors else "failed",
            "equal_after_restart": is_equal,
            "integrity_errors": len(errors),
        }


def _answer(stack: "Stack", kill_after: int = 0) -> list[int]:
    """The tokens; with `kill_after`, the decode worker that answers is killed once so many have come."""
    from weir.client import GenerateOptions, WeirClient  # noqa: PLC0415

    options = GenerateOptions(temperature=1.0, seed=77, max_tokens=_NUM_TOKENS, ignore_eos=True)
    token_ids: list[int] = []
    workers = stack.processes("decode")  # now: it takes a second
    with WeirClient(stack.grpc_address) as client:
        for chunk in client.generate(_PROMPT, options):
            token_ids += chunk.token_ids
            if kill_after and len(token_ids) >= kill_after:
                kill_after = 0
                busy = [each for each in workers if stack.metrics(each).get("num_live")]
                for process in busy:
                    stack.kill(process, signal.SIGKILL)
                if not busy:
                    raise RuntimeError("no decode worker has the request: nothing was killed")
    return token_ids


def _end_in_time() -> None:
    """The stack is detached: who is killed with it still running leaves it behind."""

    def on_alarm(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTime("the part's time is nearly over")

    limit_s = float(os.environ.get(LIMIT_VARIABLE, "0"))
    if limit_s:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, max(1.0, limit_s - _DOWN_S))


def main() -> int:
    loop = CaseLoop.from_command_line("stack", __doc__)
    _end_in_time()
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        loop.run("weir up, kill -9 of a decode worker", partial(kill_and_compare, Path(folder)))
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())
