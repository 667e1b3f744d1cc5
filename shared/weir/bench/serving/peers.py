"""`weir bench serve --peer …`: Weir and another server, in turns on one machine, under the same load over HTTP.

Turns go A B, B A, A B, …, so that a machine that slows down slows both. Each round has prompts of its own, the same for
both sides, and both are asked not to use what they have cached: a prompt may be one of an earlier comparison.
"""

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import httpx

from weir.bench.serving.config import LoadConfig
from weir.bench.serving.datasets import RandomPrompts
from weir.bench.serving.figures import summarize
from weir.bench.serving.load import COLD, in_turns, run_load
from weir.core.addresses import free_port

_SEED_STRIDE = 1000
_WARM_UP_PROMPTS = 4
_READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Tokens in and out of each request."""

    input_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> "RequestShape":
        """Of `128/64`. Raises ValueError."""
        input_len, _, output_len = text.partition("/")
        if not (input_len.isdigit() and output_len.isdigit() and int(input_len) > 0 and int(output_len) > 0):
            raise ValueError(f"shape {text!r}: expected INPUT/OUTPUT in tokens, such as 128/64")
        return cls(int(input_len), int(output_len))

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that runs already."""

    name: str
    base_url: str
    model: str
    extra_body: Mapping[str, object] = field(default_factory=dict)


class LlamaServer:
    """A context manager that gives the server's base URL; every slot holds `max_context_tokens`."""

    def __init__(self, binary: str, model_path: Path, *, num_slots: int, max_context_tokens: int) -> None:
        found = shutil.which(binary)
        if found is None:
            raise ValueError(f"--peer-binary {binary!r}: no such program; llama.cpp builds it")
        port = free_port()
        self._base_url = f"http://127.0.0.1:{port}"
        # a slot takes a little more than its request's tokens
        context = num_slots * (max_context_tokens + 64)
        self._command = [found, "-m", str(model_path), "-t", str(os.cpu_count() or 1), "--parallel", str(num_slots)]
        self._command += ["-c", str(context), "--port", str(port), "--no-webui"]
        self._environ = os.environ | {"LD_LIBRARY_PATH": str(Path(found).resolve().parent)}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            self._command, env=self._environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self._base_url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_ready(self) -> None:
        assert self._process is not None, "called after the start"
        ends_at_s = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < ends_at_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended with {self._process.returncode}: {' '.join(self._command)}")
            try:
                if httpx.get(f"{self._base_url}/health", timeout=1.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        raise RuntimeError(f"not ready within {_READY_TIMEOUT_S:.0f} s: {' '.join(self._command)}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared. Each cell of shapes x concurrencies is run `rounds` times on both sides."""

    weir: LoadConfig
    shapes: tuple[RequestShape, ...]
    concurrencies: tuple[int, ...]
    rounds: int

    @property
    def max_context_tokens(self) -> int:
        return max(shape.input_len + shape.output_len for shape in self.shapes)

    def loads(self, peer: Peer, shape: RequestShape, concurrency: int) -> Iterator[tuple[str, LoadConfig]]:
        """Every run of one cell, in its turn: whose it is, and the load."""
        for number, side in in_turns(("weir", peer.name), self.rounds):
            load = replace(
                self.weir,
                dataset=RandomPrompts(shape.input_len, shape.output_len),
                max_concurrency=concurrency,
                num_prompts=max(2 * concurrency, _WARM_UP_PROMPTS),
                seed=self.weir.seed + _SEED_STRIDE * number + concurrency,
            )
            if side == peer.name:
                load = replace(load, base_url=peer.base_url, model=peer.model, extra_body=peer.extra_body)
            yield side, load


def parse_comparison(weir: LoadConfig, shapes: str, concurrencies: str, rounds: int) -> Comparison:
    """Of lists with commas. Raises ValueError naming the bad part."""
    levels = concurrencies.split(",")
    for level in levels:
        if not level.isdigit() or int(level) < 1:
            raise ValueError(f"concurrencies {concurrencies!r}: {level!r} is not a positive number")
    return Comparison(
        replace(weir, extra_body=COLD),
        tuple(RequestShape.parse(shape) for shape in shapes.split(",")),
        tuple(int(level) for level in levels),
        rounds,
    )


def compare(comparison: Comparison, peer: Peer) -> list[dict[str, object]]:
    """One entry a cell, printed as it is done: medians over the rounds of both sides, and their ratio.

    Raises RuntimeError when a request failed: a figure of half the load says nothing.
    """
    print(_HEADER)
    cells = []
    for shape in comparison.shapes:
        for concurrency in comparison.concurrencies:
            results: dict[str, list[dict[str, float]]] = {"weir": [], peer.name: []}
            for name, load in comparison.loads(peer, shape, concurrency):
                records, duration_s = asyncio.run(run_load(load))
                errors = sorted({record.error for record in records if record.error})
                if errors:
                    raise RuntimeError(f"{name} at {shape}, {concurrency} concurrent: {errors[0]}")
                results[name].append(summarize(records, duration_s))
            cell = _cell(shape, concurrency, results, peer.name)
            cells.append(cell)
            print(_row(cell, results, peer.name), flush=True)
    return cells


def main(
    comparison: Comparison, peer: str, *, binary: str, model_path: Path | None, peer_url: str, out: Path | None
) -> int:
    """`peer` is llama-server (started here, unless `peer_url` is given) or vllm (runs already at `peer_url`). Returns 1
    if it does not start, or a request fails. Raises ValueError for what cannot be compared."""
    try:
        with ExitStack() as stack:
            if peer_url:
                base_url = peer_url
            else:
                server = _server(comparison, peer, binary=binary, model_path=model_path)
                base_url = stack.enter_context(server)
            found = Peer(peer, base_url, comparison.weir.model, COLD if peer == "llama-server" else {})
            _warm_up(comparison, found)
            cells = compare(comparison, found)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if out is not None:
        out.write_text(json.dumps(cells, indent=2) + "\n")
    return 0


def _server(comparison: Comparison, peer: str, *, binary: str, model_path: Path | None) -> LlamaServer:
    if peer != "llama-server":
        raise ValueError(f"--peer {peer}: start it yourself and say where it is by --peer-url")
    if model_path is None:
        raise ValueError("--peer-model: expected the GGUF file that llama-server is to serve")
    slots, tokens = max(comparison.concurrencies), comparison.max_context_tokens
    return LlamaServer(binary, model_path, num_slots=slots, max_context_tokens=tokens)


def _warm_up(comparison: Comparison, peer: Peer) -> None:
    for _, load in replace(comparison, rounds=1).loads(peer, RequestShape(32, 8), _WARM_UP_PROMPTS):
        asyncio.run(run_load(load))


def _cell(
    shape: RequestShape, concurrency: int, results: Mapping[str, Sequence[dict[str, float]]], peer: str
) -> dict[str, object]:
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    ratio = medians["weir"]["output_throughput"] / medians[peer]["output_throughput"]
    return {"shape": str(shape), "concurrency": concurrency, "ratio": ratio, "medians": medians, "runs": dict(results)}


_HEADER = (
    "| in/out | concurrent | side | output tokens/s (runs) | TTFT p50 / p99 ms | ITL p50 / p99 ms | ratio |\n"
    "|---|---|---|---|---|---|---|"
)


def _row(cell: Mapping[str, object], results: Mapping[str, Sequence[dict[str, float]]], peer: str) -> str:
    lines = []
    for name, runs in results.items():
        rates = ", ".join(f"{run['output_throughput']:.1f}" for run in runs)
        ttft, itl = (_percentiles(runs, metric) for metric in ("ttft", "itl"))
        ratio = f"{cell['ratio']:.2f}" if name != peer else ""
        lines.append(f"| {cell['shape']} | {cell['concurrency']} | {name} | {rates} | {ttft} | {itl} | {ratio} |")
    return "\n".join(lines)


def _percentiles(runs: Sequence[dict[str, float]], metric: str) -> str:
    return " / ".join(
        f"{statistics.median(run[f'{key}_{metric}_ms'] for run in runs):.0f}" for key in ("median", "p99")
    )
