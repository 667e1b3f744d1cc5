"""All policies by name. One name selects all three seams, in the scheduler, in the batchers and in the simulator.

A name stands for a function `make(params: P) -> Policy`, `P` a frozen dataclass of bounded numbers. Weir's own are
here; other distributions declare theirs as entry points of the group `weir.policies`:

    [project.entry-points."weir.policies"]
    longest-prompt = "weir_longest_prompt:make"

Only what is installed can be named: an operator who sets a policy makes no process import anything else. What is
installed while a process runs, the next process knows.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from weir.policy.bucketed import make_bucketed
from weir.policy.hybrid import make_hybrid
from weir.policy.keyed_orders import make_edf, make_fcfs, make_ltr, make_shortest_prompt
from weir.policy.magnus import make_magnus
from weir.policy.nested_wait import make_nested_wait
from weir.policy.params import describe, make_params, parse_values
from weir.policy.seams import Policy
from weir.policy.srtf import make_srtf
from weir.policy.step_budgets import make_prefill_first, make_slai, make_unchunked
from weir.policy.wait import make_wait

GROUP = "weir.policies"
_WANTED = "must be a function make(params: P) -> Policy of a dataclass P"

Make = Callable[[Any], Policy]

_OWN: Mapping[str, Make] = {
    "fcfs": make_fcfs,
    "shortest-prompt": make_shortest_prompt,
    "bucketed": make_bucketed,
    "ltr": make_ltr,
    "magnus": make_magnus,
    "srtf": make_srtf,
    "edf": make_edf,
    "hybrid": make_hybrid,
    "slai": make_slai,
    "wait": make_wait,
    "nested-wait": make_nested_wait,
    "prefill-first": make_prefill_first,
    "unchunked": make_unchunked,
}


def policy_names() -> tuple[str, ...]:
    """Weir's own, then those of other distributions."""
    return (*_OWN, *(name for name in installed_policies() if name not in _OWN))


@cache
def installed_policies() -> Mapping[str, tuple[EntryPoint, ...]]:
    """By name, none of them imported yet; more than one of a name can be used by none."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=GROUP):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by its name, with parameters in place of its defaults. `str` gives what `parse` takes."""

    name: str
    params: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """`name` or `name:key=value,key=value`, checked as `make` does. Raises ValueError."""
        name, _, rest = text.strip().partition(":")
        params_type, _ = _entry(name)
        try:
            params = parse_values(rest)
            make_params(params_type, params)
        except ValueError as error:
            raise ValueError(f"policy {name}: {error}") from error
        return cls(name, params)

    def make(self) -> Policy:
        """A fresh policy, for one user: policies hold state. Raises ValueError that says what is allowed."""
        params_type, make = _entry(self.name)
        try:
            return make(make_params(params_type, self.params))
        except ValueError as error:
            raise ValueError(f"policy {self.name}: {error}") from error

    def __str__(self) -> str:
        params = ",".join(f"{name}={value!r}" for name, value in sorted(self.params.items()))
        return f"{self.name}:{params}" if params else self.name


def describe_policy(name: str) -> str:
    """Its parameters, their limits and defaults."""
    return describe(_entry(name)[0])


def _entry(name: str) -> tuple[type, Make]:
    """The dataclass of its parameters, and the function that makes a policy of them.

    Raises ValueError for a name that nobody has or that is declared twice; naming the entry point, for what cannot be
    imported or is no such function.
    """
    if name in _OWN:
        return _params_of(_OWN[name]), _OWN[name]
    declared = installed_policies().get(name, ())
    if not declared:
        raise ValueError(f"policy {name!r}: must be one of {', '.join(policy_names())}")
    if len(declared) > 1:
        who = " and ".join(f"{entry.value} of {entry.dist.name if entry.dist else '?'}" for entry in declared)
        raise ValueError(f"policy {name!r}: is declared {len(declared)} times, by {who}; install one of them")
    (entry,) = declared
    try:
        make: Make = entry.load()
        params = _params_of(make)
    except Exception as error:  # the boundary to code of others, which may raise anything
        raise ValueError(f"entry point {entry.value}: {_WANTED} ({type(error).__name__}: {error})") from error
    if not (isinstance(params, type) and is_dataclass(params)):
        raise ValueError(f"entry point {entry.value}: {_WANTED}, not of a {params!r}")
    return params, make


def _params_of(make: Make) -> Any:
    (parameter,) = inspect.signature(make).parameters
    return get_type_hints(make)[parameter]
