"""The limits and the policy in force: what the file or the flags say, and over it what was changed at run time."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weir.bus.codec import MAX_STRING_CHARS, MessageTooLarge, encode
from weir.bus.configuration import (
    AccessRules,
    LaneCaps,
    LimitsInForce,
    LimitsOverride,
    PolicyChoice,
    TenantAccess,
    WorkerBounds,
    WorkerRules,
)
from weir.core.caps import NO_CAPS
from weir.core.errors import AlreadyExists, FieldViolation, InvalidRequest
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import change_limits, format_limits, parse_limits, try_value_of
from weir_scheduler.tuned_limits import TunedLimits

_MAX_KEPT_BYTES = 512 * 1024
"""Of a file that is kept for the next scheduler: well under what one message may have."""


@dataclass(frozen=True, slots=True)
class LimitChange:
    """Of one key, in TOML. `was` None: what it is about was not there. `now` empty: it is not there any more."""

    key: str
    was: str | None
    now: str


class EffectiveLimits:
    """Every change is checked whole before anything is changed; what cannot be raises InvalidRequest or ValueError."""

    def __init__(self, base: CoreLimits, policy: str, *, own_admin_digests: tuple[bytes, ...] = ()) -> None:
        """`own_admin_digests`: of operators' keys that are not in the limits."""
        self._base = base
        """What the flags say; the file goes over it."""
        self._own_admin_digests = own_admin_digests
        self._configured_policy = policy
        self._file_text = ""
        self._file_limits = base
        self._overrides: dict[str, str] = {}
        self._tuned = TunedLimits()
        self.limits = base
        self.policy = PolicySpec.parse(policy)

    @property
    def overrides(self) -> Mapping[str, str]:
        """Dotted key -> value in TOML."""
        return self._overrides

    @property
    def tuned(self) -> TunedLimits:
        """To be read only."""
        return self._tuned

    @property
    def file_digest(self) -> str:
        """SHA-256 of the file that is in force; empty: there is none."""
        return _digest(self._file_text) if self._file_text else ""

    @property
    def toml(self) -> str:
        """The limits in force, as a file that would say them."""
        return format_limits(self.limits)

    def take_file(self, text: str) -> bool:
        """A file that says something new goes over everything that was changed at run time. False: it says the same."""
        if text == self._file_text:
            return False
        limits = _checked(parse_limits(text, self._base))
        self._file_limits = self.limits = limits
        self._file_text = text
        self._overrides = {}
        self._tuned = TunedLimits()
        return True

    def change(
        self, changes: Sequence[tuple[str, str]], check: Callable[[CoreLimits], None] = lambda limits: None
    ) -> tuple[LimitChange, ...]:
        """(dotted key, value in TOML): all of them, or none; with a trial that ends by it. `check` raises
        InvalidRequest for what cannot be now."""
        before, overrides = self.limits, self._overrides | dict(changes)
        keys = [key for key, _ in changes]
        tuned = self._tuned
        if any(key.startswith("workers.") for key, _ in changes):
            keys += [key for key in tuned.trial if key not in keys]
            tuned = TunedLimits(tuned.kept)  # nobody can judge a trial whose workers somebody else changes
        limits = self._limits_with(tuned.under(overrides))
        self._check_keepable(overrides, tuned)
        self._check_operators_stay(limits)
        check(limits)
        self.limits, self._overrides, self._tuned = limits, overrides, tuned
        return changes_between(before, limits, keys)

    def tune(
        self,
        changes: Sequence[tuple[str, str]],
        check: Callable[[CoreLimits], None] = lambda limits: None,
        *,
        is_trial: bool = False,
    ) -> tuple[LimitChange, ...]:
        """As `change`, of bounds of workers: those that are kept, or tried for a while. Without `is_trial`
        nothing is tried any more. What says nothing new changes nothing, and () is returned. Raises AlreadyExists for a
        trial while another one goes on."""
        self._tuned.check_keys(changes, self._limits_with(self._overrides), is_trial=is_trial)
        if is_trial and self._tuned.trial not in ({}, dict(changes)):
            on_trial = ", ".join(f"{key} = {value}" for key, value in self._tuned.trial.items())
            raise AlreadyExists("settings", f"{on_trial} is on trial; end that first, or wait until its lease is over")
        tuned = TunedLimits(self._tuned.kept if is_trial else self._tuned.kept | dict(changes))
        tuned.trial = dict(changes) if is_trial else {}
        return self._take_tuned(tuned, check)

    def forget_tuned(self) -> tuple[LimitChange, ...]:
        """As if nothing had been tuned since the file was read."""
        return self._take_tuned(TunedLimits())

    def _take_tuned(
        self, tuned: TunedLimits, check: Callable[[CoreLimits], None] = lambda limits: None
    ) -> tuple[LimitChange, ...]:
        before, earlier = self.limits, self._tuned
        if (tuned.kept, tuned.trial) == (earlier.kept, earlier.trial):
            return ()
        limits = self._limits_with(tuned.under(self._overrides))
        self._check_keepable(self._overrides, tuned)
        check(limits)
        self.limits, self._tuned = limits, tuned
        keys = dict.fromkeys((*earlier.trial, *earlier.kept, *tuned.kept, *tuned.trial))
        return tuple(one for one in changes_between(before, limits, list(keys)) if one.was != one.now)

    def choose_policy(self, text: str) -> None:
        self.policy = PolicySpec.parse(text)

    def go_on_from(self, kept: LimitsInForce, *, has_read_file: bool) -> None:
        """Takes up what an earlier scheduler was at, unless the configuration has changed since.

        `has_read_file` False: the file cannot be read now, so the last one that could be goes on.
        """
        if not has_read_file and kept.file_text:
            self.take_file(kept.file_text.decode())
        if kept.file_digest == self.file_digest and (kept.overrides or kept.tuned):
            overrides = {entry.key: entry.value for entry in kept.overrides}
            tuned = TunedLimits({entry.key: entry.value for entry in kept.tuned})
            self.limits = self._limits_with(tuned.under(overrides))
            self._overrides, self._tuned = overrides, tuned

    def go_on_with(self, choice: PolicyChoice) -> None:
        """As `go_on_from`, of the policy."""
        if choice.configured == self._configured_policy:
            self.policy = PolicySpec.parse(choice.policy)

    def access_rules(self, epoch: int) -> AccessRules:
        """For gateways."""
        return _access_rules(self.limits, epoch, self._own_admin_digests)

    def worker_rules(self, epoch: int) -> WorkerRules:
        """For workers."""
        bounds = tuple(
            WorkerBounds(one.name, one.max_num_seqs, one.max_num_batched_tokens) for one in self.limits.workers
        )
        return WorkerRules(epoch, bounds, self.limits.step_shares)

    def policy_choice(self, epoch: int) -> PolicyChoice:
        """For workers and for the next scheduler."""
        return PolicyChoice(epoch, str(self.policy), self._configured_policy)

    def limits_in_force(self, epoch: int) -> LimitsInForce:
        """For the next scheduler."""
        return self._kept(epoch, self._overrides, self._tuned)

    def _limits_with(self, overrides: Mapping[str, str]) -> CoreLimits:
        """Raises InvalidRequest."""
        return _checked(change_limits(self._file_limits, list(overrides.items())))

    def _kept(self, epoch: int, overrides: Mapping[str, str], tuned: TunedLimits) -> LimitsInForce:
        text = self._file_text.encode()
        entries, kept = (
            tuple(LimitsOverride(key, value) for key, value in one.items()) for one in (overrides, tuned.kept)
        )
        return LimitsInForce(epoch, self.file_digest, text if len(text) <= _MAX_KEPT_BYTES else b"", entries, kept)

    def _check_operators_stay(self, limits: CoreLimits) -> None:
        """Raises InvalidRequest for a change that nobody could take back."""
        if self._lets_operators_in(self.limits) and not self._lets_operators_in(limits):
            problem = "would be empty while tenants have keys, and nobody could change limits; give one with them"
            raise InvalidRequest([FieldViolation("admin_key_digests", problem)])

    def _lets_operators_in(self, limits: CoreLimits) -> bool:
        has_admin_key = bool(self._own_admin_digests or limits.admin_key_digests)
        return has_admin_key or not limits.has_tenant_keys

    def _check_keepable(self, overrides: Mapping[str, str], tuned: TunedLimits) -> None:
        """Raises InvalidRequest for what the next scheduler could not read: it would start without any change."""
        for key, value in overrides.items():
            if len(value) > MAX_STRING_CHARS:
                problem = (
                    f"{len(value)} characters, at most {MAX_STRING_CHARS} at run time; put it into the limits file"
                )
                raise InvalidRequest([FieldViolation(key, problem)])
        try:
            encode(self._kept(0, overrides, tuned))
        except MessageTooLarge as error:
            problem = f"too many changes at run time, put them into the limits file: {error}"
            raise InvalidRequest([FieldViolation("settings", problem)]) from error


def changes_between(before: CoreLimits, after: CoreLimits, keys: Sequence[str]) -> tuple[LimitChange, ...]:
    """Of these keys."""
    return tuple(LimitChange(key, try_value_of(before, key), try_value_of(after, key) or "") for key in keys)


def _access_rules(limits: CoreLimits, epoch: int, own_admin_digests: tuple[bytes, ...] = ()) -> AccessRules:
    lanes = tuple(lane.name for lane in limits.lanes)
    tenants = tuple(
        TenantAccess(
            tenant.name,
            tuple(bytes.fromhex(digest) for digest in tenant.api_key_digests),
            tenant.lanes,
            tenant.isolates_cache,
            tenant.caps,
            tenant.requests_per_min,
        )
        for tenant in (*limits.tenants, limits.default_tenant)
    )
    caps = tuple(LaneCaps(lane.name, lane.caps) for lane in limits.lanes if lane.caps != NO_CAPS)
    admins = (*own_admin_digests, *map(bytes.fromhex, limits.admin_key_digests))
    asks_operators = bool(limits.has_tenant_keys or limits.admin_key_digests)
    default_tenant = limits.default_tenant.name
    return AccessRules(epoch, lanes, limits.default_lane, default_tenant, tenants, caps, admins, asks_operators)


def _checked(limits: CoreLimits) -> CoreLimits:
    """Raises InvalidRequest where they do not fit into the message that gateways get."""
    try:
        encode(_access_rules(limits, 0))
    except MessageTooLarge as error:
        raise InvalidRequest(
            [FieldViolation("tenants", f"too many tenants and keys for one message: {error}")]
        ) from error
    return limits


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
