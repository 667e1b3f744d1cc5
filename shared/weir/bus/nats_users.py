"""Users of the NATS server of one stack: a key for each role, and what no process of that role may send or hear.

Keys are NKEYs (Ed25519): the server knows the public half, and a client proves that it has the seed by signing what the
server draws, so that no secret goes over the wire.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from weir.bus.subjects import Subjects

NatsRole = Literal["gateway", "scheduler", "transfer", "worker", "operator"]
"""`worker`: of either role, which may change while it runs. `operator`: commands of the stack's user."""
NATS_ROLES: tuple[NatsRole, ...] = get_args(NatsRole)
_CHANGES_OF_STREAMS = tuple(
    f"$JS.API.STREAM.{call}.>" for call in ("UPDATE", "DELETE", "PURGE", "RESTORE", "MSG.DELETE")
)


@dataclass(frozen=True, slots=True)
class Denied:
    """Subjects that a role may not publish to, and those that it may not subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def make_seed() -> str:
    """The private half of a new key."""
    import nkeys  # noqa: PLC0415 - here and where a client proves its key: processes without one do not load it

    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)).decode()


def public_key(seed: str) -> str:
    import nkeys  # noqa: PLC0415

    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def denied(role: NatsRole, subjects: Subjects) -> Denied:
    """What others say and hear: a worker cannot grant, a gateway cannot write rules, nobody asks in another's name."""
    said: dict[NatsRole, tuple[str, ...]] = {
        "scheduler": (
            subjects.grant("*"),
            subjects.revoke("*"),
            subjects.queues,
            subjects.leader_changed,
            subjects.drain("*"),
            subjects.role("*"),
            subjects.prefixes_of("*"),
            *(
                _writes(bucket)
                for bucket in (subjects.leader_bucket, subjects.configuration_bucket, subjects.counters_bucket)
            ),
        ),
        "gateway": (
            subjects.submit,
            subjects.cancel,
            subjects.prefilled,
            subjects.finish,
            subjects.reconcile,
            subjects.key("*"),
            subjects.audit,
            _writes(subjects.keys_bucket),
        ),
        "transfer": (subjects.prefixes,),
        "worker": (_writes(subjects.workers_bucket),),
    }
    heard: dict[NatsRole, tuple[str, ...]] = {
        "scheduler": (subjects.of_scheduler,),
        "gateway": (subjects.of_gateways, subjects.of_gateway("*")),
        "transfer": (subjects.of_arena("*"),),
        "worker": (subjects.of_worker("*"),),
    }
    changes = () if role in ("scheduler", "gateway") else _CHANGES_OF_STREAMS
    return Denied(
        publish=(*_of_others(said, role), *changes),
        subscribe=_of_others(heard, role),
    )


def server_config(seeds: Mapping[NatsRole, str], subjects: Subjects) -> str:
    """Text of a nats-server's configuration: who may connect, and what each is denied. No secret is in it."""
    users = []
    for role, seed in seeds.items():
        found = denied(role, subjects)
        permissions = {"publish": {"deny": found.publish}, "subscribe": {"deny": found.subscribe}}
        users.append({"nkey": public_key(seed), "permissions": permissions})
    return json.dumps({"authorization": {"users": users}}, indent=2)


def _writes(bucket: str) -> str:
    """Subject of all entries of a key-value bucket."""
    return f"$KV.{bucket}.>"


def _of_others(by_role: Mapping[NatsRole, tuple[str, ...]], role: NatsRole) -> tuple[str, ...]:
    return tuple(subject for other, found in by_role.items() if other != role for subject in found)
