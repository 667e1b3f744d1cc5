"""What is asked of a running stack, through the ports that it publishes."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import httpx
from tests.containers.stack import ROOT, ComposeStack, Container

PROMPT = "The capital of France is"
NUM_TOKENS = 24
ANSWER = " Paris.\n\nThe United States has a population of approximately 311 million people.\n\nThe United States"
"""Greedy, by int8 kernels, which are exact: the same text as without containers."""
KERNELS = "/opt/weir-models/kernels"
_REQUEST_TIMEOUT_S = 120.0
_ARRIVAL_TIMEOUT_S = 90.0
_COUNT = "import pathlib, sys; print(*sorted(map(str, pathlib.Path(sys.argv[1]).rglob('*.nb*'))), sep='\\n')"
_WARM_UP = (
    "python3 -c 'import time; began = time.monotonic(); import compile_kernels; compile_kernels.main(); "
    "print(time.monotonic() - began)' smollm2-135m"
)


class Wrong(AssertionError):
    """The stack did something else than it should."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A line of the report."""

    done: str
    seen: str


def ask_http(port: int, *, trace_id: str = "", timeout_s: float = _REQUEST_TIMEOUT_S) -> str:
    """The text of a greedy completion. Raises httpx.HTTPError."""
    headers = {"traceparent": f"00-{trace_id}-{trace_id[:16]}-01"} if trace_id else {}
    body = {"model": "", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=timeout_s)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def ask_grpc(port: int) -> str:
    """The same by `weir generate`. Raises Wrong with what it said."""
    command = [sys.executable, "-m", "weir.cli.main", "generate", "--address", f"127.0.0.1:{port}", "--json"]
    command += ["--temperature", "0", "--max-tokens", str(NUM_TOKENS), PROMPT]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_REQUEST_TIMEOUT_S,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise Wrong(f"weir generate ended with {done.returncode}: {done.stderr}")
    return str(json.loads(done.stdout)["text"])


def check_answers(stack: ComposeStack) -> Seen:
    """Both gateways, both ways, the same text as anywhere."""
    asked: dict[str, Callable[[], str]] = {}
    for number in (0, 1):
        http, grpc = stack.ports.http + number, stack.ports.grpc + number
        asked[f"HTTP of gateway {number + 1}"] = partial(ask_http, http)
        asked[f"gRPC of gateway {number + 1}"] = partial(ask_grpc, grpc)
    began_s = time.monotonic()
    wrong = {name: text for name, ask in asked.items() if (text := ask()) != ANSWER}
    if wrong:
        raise Wrong(f"not {ANSWER!r}: {wrong}")
    return Seen(
        "greedy text by HTTP and by `weir generate`, of both gateways",
        f"four times {ANSWER[:7]!r}…, as outside containers; {time.monotonic() - began_s:.1f} s for all",
    )


def check_trace(stack: ComposeStack) -> Seen:
    """One request's trace is whole in the store."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    ask_http(stack.ports.http, trace_id=trace_id)
    wanted = {"weir-gateway", "weir-scheduler", "weir-prefill"}
    url = f"http://127.0.0.1:{stack.ports.traces}/api/traces/{trace_id}"
    found: set[str] = set()

    def arrived() -> bool:
        answer = httpx.get(url, timeout=10)
        if answer.status_code == httpx.codes.OK:
            found.update(process["serviceName"] for process in answer.json()["data"][0]["processes"].values())
        return wanted <= found

    waited_s = _wait(arrived, lambda: f"of the trace's services only {sorted(found)}")
    return Seen(
        "a request with a `traceparent`", f"its trace in the store, of {', '.join(sorted(found))}: {waited_s:.1f} s"
    )


def check_metrics(stack: ComposeStack) -> Seen:
    """Prometheus scrapes every process and has what the requests before left."""
    counts: dict[str, float] = {}

    def arrived() -> bool:
        counts["processes"] = _query(stack, 'sum(up{job="weir"})')
        counts["requests"] = _query(stack, "sum(weir_gateway_requests_finished_total)")
        return counts["processes"] == 7 and counts["requests"] >= 5

    waited_s = _wait(arrived, lambda: f"Prometheus has {counts}")
    return Seen(
        "Prometheus' API",
        f"{counts['processes']:.0f} processes are up, {counts['requests']:.0f} requests finished: {waited_s:.1f} s",
    )


def _query(stack: ComposeStack, expression: str) -> float:
    """0 where there is no such series yet."""
    url = f"http://127.0.0.1:{stack.ports.prometheus}/api/v1/query"
    found = httpx.get(url, params={"query": expression}, timeout=10).raise_for_status().json()["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def check_kernels(stack: ComposeStack) -> list[Seen]:
    """The workers have compiled nothing beside what the image brought; and what that saves."""
    inside = set(stack.run_image("python3", "-c", _COUNT, KERNELS).split())
    now = set(stack.exec("decode", "python3", "-c", _COUNT, KERNELS).split())
    if not inside or now - inside:
        raise Wrong(f"the image has {len(inside)} files of kernels; workers added {sorted(now - inside)}")
    copy_model = 'mkdir -p /tmp/c && cp -r "$WEIR_CACHE/models" /tmp/c && export WEIR_CACHE=/tmp/c && '
    found_s = float(stack.run_image("sh", "-c", _WARM_UP))
    compiled_s = float(stack.run_image("sh", "-c", copy_model + _WARM_UP))
    return [
        Seen("kernels on the workers' volume after the start", f"the image's {len(inside)} files, none added"),
        Seen(
            "load and warm-up of int8 in a container of its own",
            f"{found_s:.1f} s with the image's kernels, {compiled_s:.1f} s where they are compiled",
        ),
    ]


def leader(stack: ComposeStack) -> Container | None:
    """The scheduler that says that it leads; None while there is not exactly one."""
    found = []
    for container in stack.containers("scheduler"):
        try:
            page = httpx.get(f"http://{container.address}:9464/metrics", timeout=5).text
        except httpx.TransportError:
            continue
        if re.search(r"^weir_scheduler_is_leader(\{.*\})? 1(\.0)?$", page, re.MULTILINE):
            found.append(container)
    return found[0] if len(found) == 1 else None


def _wait(holds: Callable[[], bool], missing: Callable[[], str]) -> float:
    """Seconds. Raises Wrong with what is missing."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > _ARRIVAL_TIMEOUT_S:
            raise Wrong(f"after {_ARRIVAL_TIMEOUT_S:.0f} s {missing()}")
        time.sleep(0.5)
    return time.monotonic() - began_s
