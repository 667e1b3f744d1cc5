"""Users of the NATS server of one stack: a key for each role, and all that a process of that role may send and hear.

Keys are NKEYs (Ed25519): the server knows the public half, and a client proves that it has the seed by signing what the
server draws, so that no secret goes over the wire.

The server checks neither where a consumer delivers to (nats-server issue 8274) nor where an answer is to go: a client
can have it send what it answers, or what a stream holds, to any subject. So nobody but the scheduler makes streams,
nobody else makes consumers of what he writes, and nobody who may answer wherever he is asked to can ask himself.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from weir.bus.subjects import Subjects, entries_of, stream_of

NatsRole = Literal["gateway", "scheduler", "transfer", "worker", "operator"]
"""`worker`: of either role, which may change while it runs. `operator`: commands of the stack's user."""
NATS_ROLES: tuple[NatsRole, ...] = get_args(NatsRole)
_ANSWER_WITHIN = "60s"
_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a role may publish and subscribe to; it may nothing else."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    not_publish: tuple[str, ...] = ()
    """Of those in `publish`."""
    answers: bool = False
    """Whether it may publish once to each subject that a message which it heard names for an answer."""


def make_seed() -> str:
    """The private half of a new key."""
    import nkeys  # noqa: PLC0415 - here and where a client proves its key: processes without one do not load it

    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)).decode()


def public_key(seed: str) -> str:
    import nkeys  # noqa: PLC0415

    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def rights_of(role: NatsRole, subjects: Subjects) -> Rights:
    """A worker cannot grant, a gateway cannot write rules, nobody asks in another's name."""
    return {
        "scheduler": _of_scheduler,
        "gateway": _of_gateway,
        "transfer": _of_transfer,
        "worker": _of_worker,
        "operator": _of_operator,
    }[role](subjects)


def server_config(
    public_keys: Mapping[NatsRole, str], subjects: Subjects, *, cert_file: str = "", key_file: str = ""
) -> str:
    """Text of a nats-server's configuration: who may connect, what each may do, and by which certificate they know the
    server (none: TLS is not spoken)."""
    users = [{"nkey": key, "permissions": _permissions(rights_of(role, subjects))} for role, key in public_keys.items()]
    tls = {"tls": {"cert_file": cert_file, "key_file": key_file}} if cert_file else {}
    return json.dumps({"authorization": {"users": users}, **tls}, indent=2)


def _of_scheduler(subjects: Subjects) -> Rights:
    own = (subjects.leader_bucket, subjects.configuration_bucket, subjects.counters_bucket)
    return Rights(
        publish=(
            subjects.grant("*"),
            subjects.revoke("*"),
            subjects.migrate("*"),
            subjects.queues,
            subjects.leader_changed,
            subjects.drain("*"),
            subjects.role("*"),
            subjects.prefixes_of("*"),
            *(entries_of(bucket) for bucket in own),
            *(_get(stream_of(bucket)) for bucket in own),
            *_list_and_watch(subjects.workers_bucket),
            *_list_and_watch(subjects.counters_bucket),  # the one that both writes and lists
            f"{_API}.STREAM.CREATE.*",
            f"{_API}.STREAM.INFO.*",
            f"{_API}.STREAM.UPDATE.{subjects.audit_stream}",
        ),
        subscribe=(subjects.of_scheduler, _inboxes(subjects, "scheduler")),
        answers=True,
    )


def _of_gateway(subjects: Subjects) -> Rights:
    """It asks other gateways, and so itself: it answers into the inboxes of those who ask it, not wherever it is asked
    to. Of kept answers' buckets, one a tenant, a wildcard names the entries, but not the streams: it may read every
    stream but those named."""
    return Rights(
        publish=(
            subjects.submit,
            subjects.cancel,
            subjects.prefilled,
            subjects.finish,
            subjects.reconcile,
            subjects.key("*"),
            subjects.audit,
            subjects.make_responses,
            subjects.make_audit,
            _inboxes(subjects, "scheduler"),
            _inboxes(subjects, "gateway"),
            entries_of(subjects.keys_bucket),
            entries_of(subjects.responses_bucket("*")),
            *_list_and_watch(subjects.workers_bucket),
            *_list_and_watch(subjects.configuration_bucket),
            _get("*"),
            f"{_API}.STREAM.INFO.*",
        ),
        subscribe=(subjects.of_gateways, subjects.of_gateway("*"), _inboxes(subjects, "gateway")),
        not_publish=(_get(stream_of(subjects.counters_bucket)), _get(subjects.audit_stream)),
    )


def _of_transfer(subjects: Subjects) -> Rights:
    return Rights(
        publish=(subjects.prefixes,),
        subscribe=(subjects.of_arena("*"), _inboxes(subjects, "transfer")),
        answers=True,
    )


def _of_worker(subjects: Subjects) -> Rights:
    return Rights(
        publish=(
            entries_of(subjects.workers_bucket),
            f"{_API}.STREAM.INFO.{stream_of(subjects.workers_bucket)}",
            f"{_API}.STREAM.INFO.{stream_of(subjects.configuration_bucket)}",
            *_list_and_watch(subjects.configuration_bucket),
        ),
        subscribe=(subjects.of_worker("*"), _inboxes(subjects, "worker")),
        answers=True,
    )


def _of_operator(subjects: Subjects) -> Rights:
    return Rights(publish=(_get(subjects.audit_stream),), subscribe=(_inboxes(subjects, "operator"),))


def _list_and_watch(bucket: str) -> tuple[str, ...]:
    """A consumer's subject names what it reads, and the server holds it to that."""
    stream = stream_of(bucket)
    return (f"{_API}.CONSUMER.CREATE.{stream}.*.{entries_of(bucket)}", f"{_API}.CONSUMER.INFO.{stream}.*")


def _get(stream: str) -> str:
    """One message. Not `DIRECT.GET`: that would have the server say what a client wrote, just as it is, anywhere."""
    return f"{_API}.STREAM.MSG.GET.{stream}"


def _inboxes(subjects: Subjects, role: NatsRole) -> str:
    return f"{subjects.inbox(role)}.>"


def _permissions(rights: Rights) -> dict[str, Any]:
    publish = {"allow": rights.publish, "deny": rights.not_publish}
    found: dict[str, Any] = {"publish": publish, "subscribe": {"allow": rights.subscribe}}
    if rights.answers:
        found["allow_responses"] = {"max": 1, "expires": _ANSWER_WITHIN}
    return found
