"""All policies by name. One name selects all three seams, in the scheduler, in the batchers and in the simulator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weir.policy import (
    bucketed,
    edf,
    fcfs,
    hybrid,
    ltr,
    magnus,
    nested_wait,
    shortest_prompt,
    slai,
    srtf,
    steps,
    wait,
)
from weir.policy.installed import installed_policies, load_policy
from weir.policy.params import NoParams, describe, make_params, parse_values
from weir.policy.seams import Policy
from weir.policy.starvation import StarvationParams


@dataclass(frozen=True, slots=True)
class _Entry:
    params: type
    make: Callable[[Any], Policy]


_ENTRIES: Mapping[str, _Entry] = {
    "fcfs": _Entry(NoParams, fcfs.make),
    "shortest-prompt": _Entry(StarvationParams, shortest_prompt.make),
    "bucketed": _Entry(bucketed.BucketedParams, bucketed.make),
    "ltr": _Entry(StarvationParams, ltr.make),
    "magnus": _Entry(magnus.MagnusParams, magnus.make),
    "srtf": _Entry(srtf.SrtfParams, srtf.make),
    "edf": _Entry(edf.EdfParams, edf.make),
    "hybrid": _Entry(hybrid.HybridParams, hybrid.make),
    "slai": _Entry(slai.SlaiParams, slai.make),
    "wait": _Entry(wait.WaitParams, wait.make),
    "nested-wait": _Entry(wait.WaitParams, nested_wait.make),
    "prefill-first": _Entry(NoParams, steps.make_prefill_first),
    "unchunked": _Entry(NoParams, steps.make_unchunked),
}


def policy_names() -> tuple[str, ...]:
    """Those of this room, then those of other distributions."""
    return (*_ENTRIES, *(name for name in installed_policies() if name not in _ENTRIES))


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by its name, with parameters in place of its defaults. `str` gives what `parse` takes."""

    name: str
    params: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """`name` or `name:key=value,key=value`, checked as `make` does. Raises ValueError."""
        name, _, rest = text.strip().partition(":")
        entry = _entry(name)
        try:
            params = parse_values(rest)
            make_params(entry.params, params)
        except ValueError as error:
            raise ValueError(f"policy {name}: {error}") from error
        return cls(name, params)

    def make(self) -> Policy:
        """A fresh policy, for one user: policies hold state. Raises ValueError that says what is allowed."""
        entry = _entry(self.name)
        try:
            return entry.make(make_params(entry.params, self.params))
        except ValueError as error:
            raise ValueError(f"policy {self.name}: {error}") from error

    def __str__(self) -> str:
        params = ",".join(f"{name}={value!r}" for name, value in sorted(self.params.items()))
        return f"{self.name}:{params}" if params else self.name


def describe_policy(name: str) -> str:
    """Its parameters, their limits and defaults."""
    return describe(_entry(name).params)


def _entry(name: str) -> _Entry:
    if name in _ENTRIES:
        return _ENTRIES[name]
    if name in installed_policies():
        return _Entry(*load_policy(installed_policies()[name]))
    raise ValueError(f"policy {name!r}: must be one of {', '.join(policy_names())}")
