"""Cost profiles: what a step, a message and a decision take on some hardware, read from YAML and written to it.

Profiles that come with Weir are in `profiles/`, with the sources of their figures; `weir profile` writes measured ones.
"""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from weir.core.cost import StepCost

_PROFILES = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile that cannot be used; the message names file and field."""


@dataclass(frozen=True, slots=True)
class CostProfile:
    """One model on one kind of worker."""

    name: str
    step: StepCost
    num_pages: int
    """Of one worker's own memory."""
    kv_bytes_per_token: int
    max_context_tokens: int = 131_072
    bus_ms: float = 0.5
    """One way between gateway and scheduler."""
    stream_ms: float = 0.5
    """One way between gateway and worker."""
    hand_off_ms: float = 1.5
    """From the end of a prompt to the decode worker's inbox, without the copying of bytes."""
    decision_us: float = 50.0
    """The scheduler's time for each message that it takes."""
    contention: float = 0.0
    """By what part longer a step takes for each other worker of its host that computes: they share its cores."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: is empty")
        for name in ("num_pages", "kv_bytes_per_token", "max_context_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} {value!r}: must be a whole number of at least 1")
        for name in ("bus_ms", "stream_ms", "hand_off_ms", "decision_us", "contention"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} {value!r}: must be finite and at least 0")


def profile_names() -> tuple[str, ...]:
    """Those that come with Weir."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.yaml")))


def load_profile(name_or_path: str | Path) -> CostProfile:
    """One of `profile_names`, or a file. Raises ProfileError."""
    path = _PROFILES / f"{name_or_path}.yaml"
    if str(name_or_path) not in profile_names():
        path = Path(name_or_path)
        if not path.is_file():
            known = ", ".join(profile_names())
            raise ProfileError(f"profile {str(name_or_path)!r}: is no file, and none of {known}")
    try:
        return _profile_of(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ProfileError(f"profile {path}: {error}") from error


def save_profile(profile: CostProfile, path: Path, comment: str = "") -> None:
    """`comment`: where the figures come from; one line of the file for each of its own."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    text = yaml.safe_dump(asdict(profile), sort_keys=False)
    path.write_text("\n".join([*lines, text]), encoding="utf-8")


def _profile_of(data: Any) -> CostProfile:
    table = _checked(data, "the file", [entry.name for entry in fields(CostProfile)])
    step = _checked(table.pop("step", None), "step", [entry.name for entry in fields(StepCost)])
    missing = [name for name in ("name", "num_pages", "kv_bytes_per_token") if name not in table]
    missing += [f"step.{entry.name}" for entry in fields(StepCost) if entry.name not in step]
    if missing:
        raise ValueError(f"{missing[0]}: is missing")
    for prefix, values in (("step.", step), ("", table)):
        for name, value in values.items():
            if name != "name" and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{prefix}{name} {value!r}: must be a number")
    try:
        cost = StepCost(**step)
    except ValueError as error:
        raise ValueError(f"step.{error}") from error
    return CostProfile(step=cost, **table | {"name": str(table["name"])})


def _checked(data: Any, what: str, known: list[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what}: must be a table of {', '.join(known)}")
    unknown = [str(name) for name in data if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown, known are {', '.join(known)}")
    return dict(data)
