"""Fields of a body that it does not declare. Nobody may take an answer for what they asked for if it is not.

near a known name    refused, with the name that was meant: a slip of the pen changes the answer
known, not served    refused with the reason, but for values with which it changes nothing
known, never matters ignored
known to nobody here ignored and named in the answer's header `X-Weir-Ignored-Fields`; or refused, by a setting

null is always as good as absent.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from urllib.parse import quote

from weir.core.errors import FieldViolation
from weir_gateway.frontends.bodies.checks import MAX_SHOWN_CHARS, shown

UnknownFields = Literal["ignore", "refuse"]
"""What happens to a field that is known to nobody here."""
IGNORED_HEADER = "X-Weir-Ignored-Fields"

_MAX_NAMED = 16
_MAX_FIELDS = 32
"""That are looked at: some 0.1 ms each in the event loop."""
_MIN_CHARS = 3
"""Of a name that may be a slip of the pen."""
_LEAST_LIKENESS = 0.75
"""As difflib measures it: one letter of four exchanged."""


@dataclass(frozen=True)
class KnownFields:
    """Beside those that a body declares (`declared`).

    `neutral`: the values with which a field that is not served changes nothing; of other values the field is refused,
    for the reason in `reasons` if there is one. `ignored`: whatever their values.
    """

    declared: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    @cached_property
    def _served(self) -> Mapping[str, str]:
        return {_plain(name): name for name in self.declared}

    @cached_property
    def _not_served(self) -> Mapping[str, str]:
        return {_plain(name): name for name in self.neutral}

    def try_find_meant(self, name: str) -> str | None:
        """maxTokens, max-tokens and max_token are all `max_tokens`. What is not served has relatives (mirostat,
        mirostat_tau) and is only found by its own name."""
        if not _MIN_CHARS <= len(name) <= MAX_SHOWN_CHARS:
            return None
        plain = _plain(name)
        nearest = difflib.get_close_matches(plain, self._served, n=1, cutoff=_LEAST_LIKENESS)
        return self._served[nearest[0]] if nearest else self._not_served.get(plain)


def check_undeclared(
    extra: Mapping[str, Any] | None, known: KnownFields, unknown_fields: UnknownFields, violations: list[FieldViolation]
) -> tuple[str, ...]:
    """The names that are ignored though nobody here knows them; adds to `violations` what is refused."""
    unknown = []
    given = {name: value for name, value in (extra or {}).items() if value is not None and name not in known.ignored}
    if len(given) > _MAX_FIELDS:
        violations.append(FieldViolation("body", f"has {len(given)} fields that are not known; at most {_MAX_FIELDS}"))
        return ()
    for name, value in given.items():
        if name in known.neutral:
            if not _is_among(value, known.neutral[name]):
                reason = known.reasons.get(name, "is not served")
                violations.append(FieldViolation(name, f"{reason}; leave it out"))
            continue
        meant = known.try_find_meant(name)
        if meant is not None:
            problem = f"is not a field of this request; {meant!r} is one"
            violations.append(FieldViolation(shown(name), problem))
        elif unknown_fields == "refuse":
            violations.append(FieldViolation(shown(name) or "''", "is not a field of this request"))
        else:
            unknown.append(name)
    return tuple(unknown)


def ignored_header(names: Collection[str]) -> str:
    """The header's value: names in the order in which they came, percent-encoded where they are no plain words."""
    quoted = [quote(shown(name), safe="") for name in list(names)[:_MAX_NAMED]]
    rest = len(names) - len(quoted)
    return ", ".join([*quoted, f"and {rest} more"] if rest else quoted)


def _is_among(value: object, neutral: tuple[Any, ...]) -> bool:
    """JSON's true is not its 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
