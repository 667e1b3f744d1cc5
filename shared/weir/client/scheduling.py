"""The client of the leading scheduler's operators: lanes, tenants, policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from weir.client.leader import LeaderCalls
from weir.rpc.tls.certificates import Certificate
from weir.wire.v1 import scheduling_pb2, scheduling_pb2_grpc


@dataclass(frozen=True, slots=True)
class SchedulingView:
    """What is in force, and the live figures of lanes and tenants by name."""

    epoch: int
    policy: str
    limits_toml: str
    limits_path: str
    limits_digest: str
    limits_error: str
    """Why the file as it is now is not in force. Empty: it is."""
    overrides: Mapping[str, str]
    lanes: Mapping[str, Mapping[str, float]]
    """From the most to the least urgent."""
    tenants: Mapping[str, Mapping[str, float]]
    tuned: Mapping[str, str] = field(default_factory=dict)
    """Bounds of workers that a tuner has kept."""
    trial: Mapping[str, str] = field(default_factory=dict)
    """Those that it tries now."""

    @classmethod
    def from_pb(cls, response: scheduling_pb2.DescribeSchedulingResponse) -> "SchedulingView":
        return cls(
            epoch=response.epoch,
            policy=response.policy,
            limits_toml=response.limits_toml,
            limits_path=response.limits_path,
            limits_digest=response.limits_digest,
            limits_error=response.limits_error,
            overrides={setting.key: setting.value for setting in response.overrides},
            lanes={lane.name: dict(lane.metrics) for lane in response.lanes},
            tenants={tenant.name: dict(tenant.metrics) for tenant in response.tenants},
            tuned={setting.key: setting.value for setting in response.tuned},
            trial={setting.key: setting.value for setting in response.trial},
        )


@dataclass(frozen=True, slots=True)
class LimitChanged:
    """One limit, in TOML. `was` None: what it is about was not there."""

    key: str
    was: str | None
    now: str

    @classmethod
    def from_pb(cls, change: scheduling_pb2.LimitChange) -> "LimitChanged":
        return cls(change.key, change.was if change.HasField("was") else None, change.now)


class SchedulingClient:
    """Talks to whichever of the schedulers leads. Every method raises an error of `weir.core.errors`."""

    def __init__(
        self, addresses: Sequence[str], *, admin_key: str = "", certificate: Certificate | None = None
    ) -> None:
        """HOST:PORT of each scheduler: the leader and those that stand by. `admin_key`: needed where anybody has keys.
        `certificate`: an operator's, where the stack has certificates.

        Raises ValueError for a key that no header can carry.
        """
        self._calls = LeaderCalls(addresses, admin_key, certificate)

    def describe(self) -> SchedulingView:
        return SchedulingView.from_pb(
            self._ask_leader("DescribeScheduling", scheduling_pb2.DescribeSchedulingRequest())
        )

    def set_limits(self, changes: Mapping[str, str]) -> str:
        """Dotted key -> value in TOML. All are changed or none; returns the limits in force, in TOML."""
        return self._set_limits(changes).limits_toml

    def change_limits(self, changes: Mapping[str, str]) -> tuple[LimitChanged, ...]:
        """As `set_limits`; returns what each was and is now."""
        return tuple(map(LimitChanged.from_pb, self._set_limits(changes).changes))

    def try_limits(self, changes: Mapping[str, str], *, lease_s: float, reason: str) -> tuple[LimitChanged, ...]:
        """Of workers by their ids: for `lease_s`, and for as long again each time that the same is asked for. Raises
        InvalidRequest for what an operator has set by hand, AlreadyExists while something else is tried."""
        return self._tune(scheduling_pb2.TUNING_DEED_TRY, changes, reason, lease_s)

    def keep_limits(self, changes: Mapping[str, str], *, reason: str) -> tuple[LimitChanged, ...]:
        """Of roles, from now on; what is tried ends. Raises as `try_limits`."""
        return self._tune(scheduling_pb2.TUNING_DEED_KEEP, changes, reason)

    def end_trial(self, *, reason: str) -> tuple[LimitChanged, ...]:
        """Nothing is tried any more."""
        return self._tune(scheduling_pb2.TUNING_DEED_END, {}, reason)

    def revert_tuned(self, *, reason: str) -> tuple[LimitChanged, ...]:
        """All that was kept or is tried is taken back."""
        return self._tune(scheduling_pb2.TUNING_DEED_REVERT, {}, reason)

    def _tune(
        self, deed: "scheduling_pb2.TuningDeed.ValueType", changes: Mapping[str, str], reason: str, lease_s: float = 0.0
    ) -> tuple[LimitChanged, ...]:
        settings = [scheduling_pb2.LimitSetting(key=key, value=value) for key, value in changes.items()]
        request = scheduling_pb2.TuneLimitsRequest(
            deed=deed, settings=settings, lease_ms=round(lease_s * 1e3), reason=reason
        )
        response: scheduling_pb2.TuneLimitsResponse = self._ask_leader("TuneLimits", request)
        return tuple(map(LimitChanged.from_pb, response.changes))

    def _set_limits(self, changes: Mapping[str, str]) -> scheduling_pb2.SetLimitsResponse:
        settings = [scheduling_pb2.LimitSetting(key=key, value=value) for key, value in changes.items()]
        response: scheduling_pb2.SetLimitsResponse = self._ask_leader(
            "SetLimits", scheduling_pb2.SetLimitsRequest(settings=settings)
        )
        return response

    def set_policy(self, policy: str) -> str:
        """`NAME` or `NAME:KEY=VALUE,…`. Returns the policy in force."""
        response: scheduling_pb2.SetPolicyResponse = self._ask_leader(
            "SetPolicy", scheduling_pb2.SetPolicyRequest(policy=policy)
        )
        return response.policy

    def close(self) -> None:
        self._calls.close()

    def __enter__(self) -> "SchedulingClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask_leader(self, method: str, request: object) -> Any:
        return self._calls.ask(scheduling_pb2_grpc.SchedulingStub, method, request)
