"""The client of the leading scheduler's operators: lanes, tenants, policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        )


@dataclass(frozen=True, slots=True)
class LimitChanged:
    """One limit, in TOML. `was` None: what it is about was not there."""

    key: str
    was: str | None
    now: str


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
        return tuple(
            LimitChanged(one.key, one.was if one.HasField("was") else None, one.now)
            for one in self._set_limits(changes).changes
        )

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
