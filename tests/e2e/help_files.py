"""The files that examples of help texts name, small, and the `weir` that they call."""

import json
import os
import sys
from importlib import resources
from pathlib import Path

import numpy as np

from weir.policy.predictors.log_record import LogRecord

MODEL = "dummy:tiny"
_NUM_ROWS = 120


def write_files(folder: Path) -> None:
    """All but the predictor, whose training takes a second or two."""
    rows = [f"2023-11-16 18:15:{at // 2:02d}.{at % 2 * 5}000000,{20 + at},{4 + at % 5}" for at in range(_NUM_ROWS)]
    for name in ("azure_2023_code.csv", "trace.csv"):
        _write(folder / name, "TIMESTAMP,ContextTokens,GeneratedTokens", *rows)
    _write(folder / "lengths.csv", "num_prefill_tokens,num_decode_tokens", *(f"{32 + at},{8 + at}" for at in range(32)))
    for name in ("capture.jsonl", "events.jsonl"):
        _write(folder / name, *(_captured(at) for at in range(_NUM_ROWS)))
    _write(folder / "prompts.jsonl", *(json.dumps({"prompt": f"{at} and {at} is"}) for at in range(4)))
    _write(folder / "tools.json", json.dumps([{"type": "function", "function": {"name": "get_weather"}}]))
    _write(folder / "batch.jsonl", *(_batch_line(at) for at in range(48)))
    _write(folder / "long_batch.jsonl", *(_batch_line(at) for at in range(500)))  # runs still when it is cancelled
    _write(folder / "keys.txt", "a=key-of-tenant-a-0001", "b=key-of-tenant-b-0001")
    _write(folder / "key.txt", "key-of-tenant-a-0001")
    _write(
        folder / "limits.toml",
        'default_lane = "interactive"',
        "[lanes.interactive]",
        "max_queued = 100",
        "max_wait_s = 60",
    )
    _write(
        folder / "hosts.toml",
        'instance = "lab"',
        "[hosts.a]",
        'address = "10.0.0.1"',
        "serve_nats = true",
        "schedulers = 1",
        "gateways = 1",
    )
    profile = resources.files("weir.sim.profiles") / "a100-llama3-8b.yaml"
    (folder / "measured.yaml").write_text(profile.read_text())
    source = np.random.default_rng(2)
    for name in ("requests.jsonl.1", "requests.jsonl"):
        (folder / name).write_text("".join(_logged(source) for _ in range(_NUM_ROWS)))


def write_predictor(folder: Path) -> None:
    """`lengths.npz`, of the request logs."""
    from weir.training.make import train_from_logs  # noqa: PLC0415 - takes seconds, in each worker of pytest

    train_from_logs([folder / "requests.jsonl"], folder / "lengths.npz", MODEL, "ranking", 0)


def write_program(folder: Path) -> dict[str, str]:
    """An environment whose `weir` is the one under test."""
    program = folder / "bin" / "weir"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weir.cli.main "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def _write(path: Path, *lines: str) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _batch_line(at: int) -> str:
    body = {"messages": [{"role": "user", "content": f"Count from {at}."}], "max_tokens": 8}
    return json.dumps({"custom_id": f"line-{at}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def _captured(at: int) -> str:
    return json.dumps({"arrival_s": at / 2, "num_prompt_tokens": 20 + at, "num_output_tokens": 4 + at % 5})


def _logged(source: np.random.Generator) -> str:
    is_long = bool(source.integers(2))
    prompt = (200 if is_long else 20, *source.integers(3, 250, 6).tolist())
    return LogRecord(0.0, MODEL, 7, 300 if is_long else 20, 512, is_cut=False, prompt_token_ids=prompt).to_line()
