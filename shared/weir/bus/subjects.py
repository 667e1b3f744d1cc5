"""Every subject and bucket of the control bus, under one namespace an instance, so that two instances never meet."""

import re
from dataclasses import dataclass

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Subjects:
    """Names of one instance. Raises ValueError for a namespace that is not 1 to 64 of [A-Za-z0-9_-]."""

    namespace: str

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(f"namespace {self.namespace!r}: use 1 to 64 characters of A-Z a-z 0-9 _ -")

    @property
    def submit(self) -> str:
        """Gateway asks the scheduler to queue a request: Submit -> SubmitReply."""
        return f"weir.{self.namespace}.scheduler.submit"

    @property
    def cancel(self) -> str:
        """Gateway withdraws a request that is not wanted any more: Cancel -> Ack."""
        return f"weir.{self.namespace}.scheduler.cancel"

    @property
    def prefilled(self) -> str:
        """Gateway has the first token of a granted request: Prefilled, not answered."""
        return f"weir.{self.namespace}.scheduler.prefilled"

    @property
    def finish(self) -> str:
        """Gateway closes a granted request: Finish -> Ack."""
        return f"weir.{self.namespace}.scheduler.finish"

    @property
    def reconcile(self) -> str:
        """Gateway reports every second which requests it holds: Held -> HeldReply."""
        return f"weir.{self.namespace}.scheduler.reconcile"

    @property
    def prefixes(self) -> str:
        """KV events: what the prefix cache of an arena gained and lost: PrefixChanged, not answered."""
        return f"weir.{self.namespace}.scheduler.prefixes"

    @property
    def make_responses(self) -> str:
        """Gateway asks for a bucket of a tenant's kept answers: MakeResponses -> StoreReply."""
        return f"weir.{self.namespace}.scheduler.make_responses"

    @property
    def make_audit(self) -> str:
        """Gateway asks for the stream of life events: AuditBounds -> StoreReply."""
        return f"weir.{self.namespace}.scheduler.make_audit"

    def prefixes_of(self, arena_id: str) -> str:
        """Scheduler asks for the whole of a prefix cache: AskPrefixes -> PrefixSnapshot."""
        return f"weir.{self.namespace}.arena.{arena_id}.prefixes"

    @property
    def leader_changed(self) -> str:
        """A scheduler has begun to lead: LeaderChanged, to every gateway, not answered."""
        return f"weir.{self.namespace}.gateways.leader_changed"

    @property
    def queues(self) -> str:
        """Scheduler tells what waits: QueueReport, to every gateway, some times a second, not answered."""
        return f"weir.{self.namespace}.gateways.queues"

    def grant(self, gateway_id: str) -> str:
        """Scheduler lets a request start: Grant -> GrantReply."""
        return f"weir.{self.namespace}.gateway.{gateway_id}.grant"

    def revoke(self, gateway_id: str) -> str:
        """Scheduler gives a request up: Revoke -> Ack."""
        return f"weir.{self.namespace}.gateway.{gateway_id}.revoke"

    def migrate(self, gateway_id: str) -> str:
        """Scheduler has a request go on at another host: Migrate -> MigrateReply."""
        return f"weir.{self.namespace}.gateway.{gateway_id}.migrate"

    def drain(self, worker_id: str) -> str:
        """Scheduler has a worker take nothing new, or take work again: SetDrain -> WorkerAnswer."""
        return f"weir.{self.namespace}.worker.{worker_id}.drain"

    def role(self, worker_id: str) -> str:
        """Scheduler has a worker change its role: SetRole -> WorkerAnswer."""
        return f"weir.{self.namespace}.worker.{worker_id}.role"

    def key(self, gateway_id: str) -> str:
        """Gateway asks another one for a request by its idempotency key: AskHolder -> HolderReply."""
        return f"weir.{self.namespace}.gateway.{gateway_id}.key"

    @property
    def of_scheduler(self) -> str:
        """All that is sent to schedulers."""
        return f"weir.{self.namespace}.scheduler.>"

    @property
    def of_gateways(self) -> str:
        """All that is sent to every gateway."""
        return f"weir.{self.namespace}.gateways.>"

    def of_gateway(self, gateway_id: str) -> str:
        return f"weir.{self.namespace}.gateway.{gateway_id}.>"

    def of_arena(self, arena_id: str) -> str:
        return f"weir.{self.namespace}.arena.{arena_id}.>"

    def of_worker(self, worker_id: str) -> str:
        return f"weir.{self.namespace}.worker.{worker_id}.>"

    @property
    def audit(self) -> str:
        """Gateways' life events, which a stream keeps: `weir.bus.audit`."""
        return f"weir.{self.namespace}.audit"

    @property
    def audit_stream(self) -> str:
        """Name of that stream. Durable; bounded. Its name has the version of what is in it."""
        return f"weir_{self.namespace}_audit_v1"

    @property
    def workers_bucket(self) -> str:
        """Registry of workers with their load: worker id -> WorkerRecord; entries expire."""
        return f"weir_{self.namespace}_workers"

    @property
    def leader_bucket(self) -> str:
        """The key `leader`: who schedules, in which epoch. Durable, so that an epoch is never given twice."""
        return f"weir_{self.namespace}_leader"

    @property
    def configuration_bucket(self) -> str:
        """What gateways and workers go by, written by the scheduler: `weir.bus.configuration`. Durable."""
        return f"weir_{self.namespace}_configuration"

    @property
    def counters_bucket(self) -> str:
        """What tenants were served and owe, kept by the scheduler for the next one. Durable."""
        return f"weir_{self.namespace}_counters"

    @property
    def keys_bucket(self) -> str:
        """Requests by idempotency key, written by gateways: `weir.bus.keys`. Durable; entries expire; bounded. Its name
        has the version of what is in it."""
        return f"weir_{self.namespace}_keys_v1"

    def responses_bucket(self, tenant_name: str) -> str:
        """Answers of one tenant, kept by gateways: `weir.bus.responses`. Durable; entries expire; bounded. Its name has
        the version of what is in it, and the tenant in a token of its own, which a wildcard can stand for."""
        return f"weir_{self.namespace}_responses_v2.{tenant_name}"

    def inbox(self, role: str) -> str:
        """Answers to what processes of this role (`weir.bus.nats_users`) asked come on subjects that begin with it."""
        return f"_INBOX.weir.{self.namespace}.{role}"


WORKER_TTL_S = 3.0
"""A worker puts its record every second; one that is silent for this long is lost. `ttl_s` of the workers bucket."""


def stream_of(bucket: str) -> str:
    """Name of the stream that a bucket is in JetStream, which has one token, unlike the bucket's."""
    return f"KV_{bucket.replace('.', '_')}"


def entries_of(bucket: str) -> str:
    """Subject of all entries of a bucket."""
    return f"$KV.{bucket}.>"


def subject_template(subject: str) -> str:
    """The subject without the ids in it, for names that must be few: those of spans and metrics."""
    match subject.split("."):
        case ["weir", _, "scheduler", verb]:
            return f"weir.{{instance}}.scheduler.{verb}"
        case ["weir", _, "gateways", verb]:
            return f"weir.{{instance}}.gateways.{verb}"
        case ["weir", _, "arena", _, verb]:
            return f"weir.{{instance}}.arena.{{arena_id}}.{verb}"
        case ["weir", _, "worker", _, verb]:
            return f"weir.{{instance}}.worker.{{worker_id}}.{verb}"
        case ["weir", _, "gateway", _, verb]:
            return f"weir.{{instance}}.gateway.{{gateway_id}}.{verb}"
        case _:
            return "other"


def is_worker_named(worker_id: str, name: str) -> bool:
    """Whether a name of workers is this one's: its role (decode), its role and number (decode-0), or its id."""
    return worker_id == name or worker_id.startswith(f"{name}-")
