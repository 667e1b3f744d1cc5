"""Bounds of workers that a tuner keeps, or tries: under what an operator has set by hand, which it never touches."""

import re
from collections.abc import Iterator, Mapping, Sequence

from weir.bus.subjects import is_worker_named
from weir.core.errors import FieldViolation, InvalidRequest
from weir.scheduling.limits import CoreLimits
from weir.scheduling.worker_limits import BOUNDS

_ROLE = re.compile(r"prefill|decode")
_WORKER_ID = re.compile(r"(prefill|decode)-[0-9]{1,4}-[0-9a-f]{8}")
_MAX_SHOWN_CHARS = 100


class TunedLimits:
    """Dotted keys (`workers.decode.max_num_seqs`) and their values in TOML. What is tried is of single workers by their
    ids, which no later life of a worker has."""

    def __init__(self, kept: Mapping[str, str] | None = None) -> None:
        self.kept = dict(kept or {})
        self.trial: dict[str, str] = {}

    def check_keys(self, changes: Sequence[tuple[str, str]], by_hand: CoreLimits, *, is_trial: bool) -> None:
        """Raises InvalidRequest for what is no bound, and for what `by_hand`, the limits without these, says."""
        for key, _ in changes:
            match key.split("."):
                case ["workers", name, bound] if bound in BOUNDS:
                    form = _WORKER_ID if is_trial else _ROLE
                    if not form.fullmatch(name):
                        wanted = "the id of a worker" if is_trial else "prefill or decode"
                        raise _bad(key, f"names {name!r}; what is {'tried' if is_trial else 'kept'} is of {wanted}")
                    holder = next(_set_by_hand(by_hand, name, bound, is_trial=is_trial), None)
                    if holder is not None:
                        raise _bad(key, f"workers.{holder}.{bound} is set by hand, and is not tuned")
                case _:
                    raise _bad(key, f"cannot be tuned; give workers.NAME.BOUND, with one of {', '.join(BOUNDS)}")

    def under(self, overrides: Mapping[str, str]) -> dict[str, str]:
        """What is in force over the file: kept, then by hand, then tried. A 0 by hand gives a bound back."""
        by_hand = {key: value for key, value in overrides.items() if not (key in self.kept and value.strip() == "0")}
        return self.kept | by_hand | self.trial


def _set_by_hand(limits: CoreLimits, name: str, bound: str, *, is_trial: bool) -> Iterator[str]:
    """Names under which an operator bounds this worker, or exactly this role."""
    for one in limits.workers:
        is_meant = is_worker_named(name, one.name) if is_trial else one.name == name
        if is_meant and getattr(one, bound):
            yield one.name


def _bad(key: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(key[:_MAX_SHOWN_CHARS], description)])
