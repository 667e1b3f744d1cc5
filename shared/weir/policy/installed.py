"""Policies of other distributions, by the entry points that they declare in the group `weir.policies`.

    [project.entry-points."weir.policies"]
    longest-prompt = "weir_longest_prompt:make"

An entry point names a function `make(params: P) -> Policy`, `P` a frozen dataclass of bounded numbers, as each file of
this room has one. Only what is installed can be named: an operator who sets a policy makes no process import anything
else. What is installed while a process runs, the next process knows.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from weir.policy.seams import Policy

GROUP = "weir.policies"
_WANTED = "must be a function make(params: P) -> Policy of a dataclass P"


@cache
def installed_policies() -> Mapping[str, EntryPoint]:
    """By name, none of them imported yet."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def load_policy(entry: EntryPoint) -> tuple[type, Callable[[Any], Policy]]:
    """The dataclass of its parameters, and the function that makes a policy of them.

    Raises ValueError, naming the entry point, for what cannot be imported or is no such function.
    """
    try:
        make = entry.load()
        (parameter,) = inspect.signature(make).parameters
        params = get_type_hints(make)[parameter]
    except Exception as error:  # the boundary to code of others, which may raise anything
        raise ValueError(f"entry point {entry.value}: {_WANTED} ({type(error).__name__}: {error})") from error
    if not (isinstance(params, type) and is_dataclass(params)):
        raise ValueError(f"entry point {entry.value}: {_WANTED}, not of a {params!r}")
    return params, make
