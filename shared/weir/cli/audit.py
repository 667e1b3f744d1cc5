"""`weir audit`: the life events of an instance's requests, as a trace; or what its operators changed."""

import asyncio
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from weir.bus.audit import AuditStream
from weir.bus.nats import NatsBus
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.cli import EXIT_NOT_RUNNING, EXIT_USAGE, options
from weir.cli.console import error_line, fail, stderr
from weir.core.errors import WeirError
from weir.runtime.change_log import read_changes
from weir.runtime.config import NATS_SCHEMES, check_instance, check_url, default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.state import try_read_state

_CONNECT_TIMEOUT_S = 5.0


def audit(
    out: Annotated[Path | None, typer.Option(help="File to write, for its owner alone. Default: stdout.")] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="Instead: who changed limits, policy, workers, models, keys.")
    ] = False,
    instance: options.Instance = "",
    nats_url: Annotated[
        str, typer.Option(envvar="WEIR_NATS_URL", help="Its NATS server. Default: that of the stack that runs here.")
    ] = "",
    nats_seed_file: Annotated[
        str,
        typer.Option(envvar="WEIR_NATS_SEED_FILE", help="File with the seed of the NKEY that it knows operators by."),
    ] = "",
    nats_ca_file: Annotated[
        str, typer.Option(envvar="WEIR_NATS_CA_FILE", help="File with the authorities of its certificate.")
    ] = "",
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Write the life events of requests, one JSON line each: who, when, how many tokens, how it ended; no texts.

    Gateways keep them with the setting audit (WEIR_AUDIT=true). The lines are a trace for the simulator.

    With --changes: what operators changed, or were denied, from the files in the instance's logs folder.

    \b
    weir audit --out events.jsonl
    weir simulate events.jsonl --local 1
    weir audit --changes
    """
    if changes:
        if nats_url:
            fail(
                "--changes reads files of this machine, and no NATS server: leave out --nats-url (WEIR_NATS_URL)",
                code=EXIT_USAGE,
            )
        _print_changes(instance, out, runtime_dir)
        return
    try:
        source = _source(instance, nats_url, nats_seed_file, runtime_dir)
        num_events = asyncio.run(_export(source, nats_ca_file, out))
    except (ValueError, OSError, BusError) as error:
        fail(f"weir audit: {error}")
    if out is not None:
        stderr.print(f"{out}: {num_events} events of {source.instance}", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Source:
    """An instance, its server, and the file with what proves there who asks; empty: nothing does."""

    instance: str
    nats_url: str
    seed_file: str


def _print_changes(instance: str, out: Path | None, runtime_dir: Path | None) -> None:
    """Also of an instance that does not run: the files stay."""
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, None)
        num_changes = 0
        with nullcontext(sys.stdout) if out is None else _private(out) as file:
            for change in read_changes(paths.logs):
                file.write(f"{json.dumps(change)}\n")
                num_changes += 1
    except WeirError as error:
        fail(error_line(error))
    except OSError as error:
        fail(f"weir audit --changes: {error}")
    if out is not None:
        stderr.print(f"{out}: {num_changes} changes of {paths.folder.name}", markup=False, soft_wrap=True)


def _source(instance: str, nats_url: str, seed_file: str, runtime_dir: Path | None) -> _Source:
    """Raises ValueError."""
    if nats_url:
        name = instance or "default"
        check_instance(name)
        check_url("nats_url", nats_url, NATS_SCHEMES)
        return _Source(name, nats_url, seed_file)
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, None)
    except WeirError as error:
        fail(error_line(error))
    state = try_read_state(paths.state_file)
    if state is None:
        fail(f"{paths.folder.name} is not running here: give --nats-url with its --instance", code=EXIT_NOT_RUNNING)
    address = state.endpoints["NATS"]
    url = address if "://" in address else f"nats://{address}"
    own_seed = paths.nats_seed_file("operator")
    return _Source(paths.folder.name, url, seed_file or (str(own_seed) if own_seed.exists() else ""))


async def _export(source: _Source, ca_file: str, out: Path | None) -> int:
    bus = await NatsBus.connect(
        source.nats_url,
        name="weir audit",
        timeout_s=_CONNECT_TIMEOUT_S,
        seed_file=source.seed_file,
        ca_file=ca_file,
        inbox=Subjects(source.instance).inbox("operator"),
    )
    try:
        num_events = 0
        with nullcontext(sys.stdout) if out is None else _private(out) as file:
            async for line in AuditStream(bus, Subjects(source.instance)).lines():
                file.write(f"{line}\n")
                num_events += 1
        return num_events
    finally:
        await bus.close()


def _private(path: Path) -> TextIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii")
