"""One row of the table of figures."""

import re
from dataclasses import dataclass
from functools import cached_property

_UNIT = re.compile(r"_(s|ms)(?=_total$|$)")
_SECONDS = {"s": 1.0, "ms": 1e-3}


@dataclass(frozen=True)
class FigureEntry:
    """How one figure of a process is exported.

    `source`: as the process names it, with a `*` where `label` varies. `own_name`: where it is not made of the source.
    """

    role: str
    source: str
    help: str
    own_name: str = ""
    label: str = ""

    @cached_property
    def name(self) -> str:
        """As exported, in base units."""
        return self.own_name or generic_name(self.role, self.source)

    @cached_property
    def scale(self) -> float:
        """From the source's unit to that of the name."""
        return scale_of(self.source)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """With the label's value as its group, where there is one."""
        return re.compile("([a-z0-9_-]+)".join(map(re.escape, self.source.split("*"))))


def generic_name(role: str, source: str) -> str:
    """`weir_ROLE_`, the source without `num_`, and seconds for whatever unit of time it had."""
    return f"weir_{role}_{_UNIT.sub('_seconds', source.removeprefix('num_'))}"


def scale_of(source: str) -> float:
    """To seconds from the unit of time that the name ends in; 1 for all else."""
    unit = _UNIT.search(source)
    return 1.0 if unit is None else _SECONDS[unit[1]]


def rows(role: str, text: str) -> tuple[FigureEntry, ...]:
    """Of lines `source [> name] [by label]: help`."""
    return tuple(_row(role, line) for line in text.strip().splitlines())


def _row(role: str, line: str) -> FigureEntry:
    head, _, words = line.strip().partition(": ")
    head, _, label = head.partition(" by ")
    source, _, own_name = head.partition(" > ")
    return FigureEntry(role, source, words, own_name, label)
