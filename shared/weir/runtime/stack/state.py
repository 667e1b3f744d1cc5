"""What a supervisor writes down about its stack, so that others can find it, and find what is left if it was killed."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weir.core.process import ProcessIdentity

STATE_VERSION = 5
"""Of the file's form. A file of another version names no process here: the tags of the processes do."""

Phase = Literal["starting", "ready", "stopping"]
ProcessPhase = Literal["starting", "ready", "restarting", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process. `identity` is None while there is none; `started_at` is Unix time."""

    name: str
    role: str
    phase: ProcessPhase
    identity: ProcessIdentity | None
    num_restarts: int
    started_at: float
    address: str
    log_path: str
    metrics_url: str = ""
    """Of its own page of metrics; empty: none."""
    ready_file: str = ""
    """Says how it is reached with TLS."""
    model: str = ""
    """That it is for, by its name among several; empty: of the only one, or of all."""
    credentials: str = ""
    """Folder of those by which who asks it proves who he is; empty: he need not."""


@dataclass(frozen=True, slots=True)
class StackState:
    """One instance. `boot_id` tells pids of this boot from those of an earlier one.

    `notes`: what its processes say of themselves, a line each.
    `stop_limit_s`: how long its supervisor takes at most to end it.
    """

    instance: str
    boot_id: str
    supervisor: ProcessIdentity
    phase: Phase
    started_at: float
    stop_limit_s: float
    endpoints: Mapping[str, str]
    processes: tuple[ProcessState, ...]
    notes: tuple[str, ...] = ()


def read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_state(path: Path, state: StackState) -> None:
    """Replaces the file as a whole: a reader sees the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(json.dumps({"version": STATE_VERSION, **asdict(state)}, indent=1))
    unfinished.replace(path)


def try_read_state(path: Path) -> StackState | None:
    """None if there is no state file, none of this boot or version, or it is damaged: then it names no process to
    trust."""
    try:
        document = json.loads(path.read_text())
        if document.pop("version") != STATE_VERSION:
            return None
        state = _from_json(document)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if state.boot_id == read_boot_id() else None


def try_find_other_version(path: Path) -> int | None:
    """The version of a state file that is whole and not of this one; 0: of before there were versions."""
    try:
        version = json.loads(path.read_text()).get("version", 0)
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    return version if isinstance(version, int) and version != STATE_VERSION else None


def identities_of(state: StackState) -> list[ProcessIdentity]:
    """The processes that the supervisor had started, itself not included."""
    return [process.identity for process in state.processes if process.identity is not None]


def _from_json(document: Any) -> StackState:
    return StackState(
        **{
            **document,
            "supervisor": ProcessIdentity(**document["supervisor"]),
            "notes": tuple(document["notes"]),
            "processes": tuple(_process_from_json(entry) for entry in document["processes"]),
        }
    )


def _process_from_json(entry: Any) -> ProcessState:
    identity = entry["identity"]
    return ProcessState(**{**entry, "identity": None if identity is None else ProcessIdentity(**identity)})
