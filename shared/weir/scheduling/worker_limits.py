"""Bounds of workers that can be changed while they run: of all of a role, or of one of them.

What a worker was started with is the most that it can do: its buffers and captured graphs have that size. A lower bound
ends nothing that runs; sequences over it go on, and nobody joins them until enough have ended.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from weir.bus.messages import WorkerRecord
from weir.bus.subjects import is_worker_named
from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.fields import check_range

_NAME = re.compile(r"(prefill|decode)(-[0-9]{1,4}(-[0-9a-f]{8})?)?")
_MAX_BOUND = 10**6
BOUNDS = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """0: what the worker was started with. Raises ValueError that names the field, its value and what it must be.

    `name`: a role (decode), a worker (decode-0), or one life of it by its process id; the longest name that fits goes
    before the others, bound by bound.
    """

    name: str
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            problem = "must be prefill, decode, or one of them with its number, such as decode-0"
            raise ValueError(f"worker {self.name!r}: {problem}")
        for name in BOUNDS:
            check_range(self, name, 0, _MAX_BOUND, of=f"worker {self.name}")


def check_workers_can(keys: Iterable[str], limits: Sequence[WorkerLimits], records: Collection[WorkerRecord]) -> None:
    """Raises InvalidRequest for a bound over what a worker of `records` was started with, naming both.

    `keys`: those that change (`workers.decode.max_num_seqs`). Workers that come later take as much as they can.
    """
    by_name = {one.name: one for one in limits}
    for key in keys:
        match key.split("."):
            case ["workers", name, bound] if name in by_name and bound in BOUNDS:
                value = getattr(by_name[name], bound)
                for record in records:
                    most = getattr(record, f"most_{bound.removeprefix('max_')}")
                    if most and value > most and is_worker_named(record.worker_id, name):
                        problem = f"is {value}; {record.worker_id} has room for {most}, with which it was started"
                        raise InvalidRequest([FieldViolation(key, problem)])
            case _:
                pass
