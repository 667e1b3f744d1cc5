"""`weir status`: every process of an instance."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import NoReturn

import typer

from weir.cli import EXIT_FAILED, EXIT_NOT_RUNNING, options
from weir.cli.console import error_line, fail, stderr, stdout
from weir.core.errors import WeirError
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.observe import ProcessReport, StackReport, try_observe
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.processes import find_tagged
from weir.runtime.stack.state import STATE_VERSION, try_find_other_version

# What says most about a role; the others are in --json.
_KEY_METRICS: dict[str, tuple[str, ...]] = {
    "gateway": ("requests_in_flight", "finished_total", "failed_total"),
    "scheduler": ("is_leader", "workers", "queued", "granted", "reserved_pages"),
    "transfer": ("free_pages", "cached_pages", "total_pages", "prefix_hit_pages_total"),
    "prefill": ("num_running", "max_num_seqs", "num_waiting", "prompt_tokens_computed_total"),
    "decode": ("num_running", "max_num_seqs", "num_waiting", "decode_steps_total"),
}
_STYLES = {"ready": "green", "dead": "red", "silent": "red"}


def status(
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    as_json: options.AsJson = False,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Show every process of a stack. Exit code 0: all is well, 1: something is not, 3: not running.

    \b
    weir status
    weir status --json
    """
    try:
        paths = choose_instance(runtime_dir or default_runtime_dir(), instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))
    report = asyncio.run(try_observe(paths))
    if report is None:
        _exit_not_running(paths, as_json)
    if as_json:
        stdout.out(json.dumps(asdict(report), indent=1), highlight=False)
    else:
        _print_report(report)
    if not report.is_well:
        raise typer.Exit(EXIT_FAILED)


def _exit_not_running(paths: InstancePaths, as_json: bool) -> NoReturn:
    name = paths.folder.name
    pids = [process.identity.pid for process in find_tagged(paths.folder)]
    if pids:
        if as_json:
            stdout.out(json.dumps({"instance": name, "state": "lost", "pids": pids, "processes": []}))
        other_version = try_find_other_version(paths.state_file)
        problem = (
            f"{paths.state_file} is gone"
            if other_version is None
            else f"another Weir started them: its {paths.state_file.name} has version {other_version}, this one reads "
            f"{STATE_VERSION}; use that one to look at them"
        )
        processes = f"processes of it run ({' '.join(str(pid) for pid in pids)}), but {problem}"
        fail(f"{name}: {processes}; `weir down --instance {name}` ends them")
    if as_json:
        stdout.out(json.dumps({"instance": name, "state": "not running", "processes": []}))
    else:
        stderr.print(f"{name} is not running", markup=False)
    raise typer.Exit(EXIT_NOT_RUNNING)


def _print_report(report: StackReport) -> None:
    where = ", ".join(f"{what} {address}" for what, address in report.endpoints.items())
    stdout.print(
        f"{report.instance}: {report.state} for {report.uptime_s:.0f} s; {where}", markup=False, soft_wrap=True
    )
    width = max(len(process.address) for process in report.processes)
    header = f"{'process':<13}{'state':<12}{'pid':>8}{'restarts':>10}{'uptime':>9}  {'address':<{width}}  figures"
    stdout.print(header, markup=False, soft_wrap=True)
    for process in report.processes:
        _print_process(process, width)
    _print_warnings(report)


def _print_process(process: ProcessReport, width: int) -> None:
    # Not a rich table: that would fold addresses in the middle on a narrow terminal.
    stdout.print(f"{process.name:<13}", end="", markup=False)
    shown = process.duty if process.duty and process.state == "ready" else process.state
    stdout.print(f"{shown:<12}", end="", style=_STYLES.get(shown, "yellow"))
    stdout.print(
        f"{process.pid or '':>8}{process.num_restarts:>10}{process.uptime_s:>7.0f} s  {process.address:<{width}}  "
        + _role(process)
        + (f"model={process.model} " if process.model else "")
        + _metrics(process.role, process.metrics),
        markup=False,
        soft_wrap=True,
    )


def _print_warnings(report: StackReport) -> None:
    for process in report.processes:
        _print_integrity(process)
        if process.refusal:
            said = f"{process.name} tells nothing of itself: {process.refusal}"
            stderr.print(said, style="yellow", markup=False, soft_wrap=True)
    if report.state == "orphaned":
        stderr.print(
            "its supervisor was killed: nothing is restarted now; `weir up` replaces it, `weir down` removes it",
            style="yellow",
        )


def _print_integrity(process: ProcessReport) -> None:
    for error in process.integrity_errors:
        stderr.print(f"{process.name}: integrity: {error}", style="red", markup=False, soft_wrap=True)


def _role(process: ProcessReport) -> str:
    """Of a worker that was given another one than its name says."""
    return "" if process.name.startswith(process.role) else f"role={process.role} "


def _metrics(role: str, metrics: Mapping[str, float]) -> str:
    shown = [name for name in _KEY_METRICS.get(role, ()) if name in metrics]
    return " ".join(f"{name}={metrics[name]:g}" for name in shown)
