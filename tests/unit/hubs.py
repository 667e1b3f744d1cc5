"""A hub for tests of one kind of process, as it is once a scheduler has made what it makes."""

from weir.bus.in_memory import InMemoryHub
from weir.bus.keys import KEY_BUCKET_BYTES, KEY_TTL_S
from weir.bus.responses import MAX_RESPONSES, RESPONSE_BUCKET_BYTES, RESPONSE_TTL_S, tenant_name
from weir.bus.subjects import WORKER_TTL_S, Subjects


def made_hub(instance: str, *tenants: str) -> InMemoryHub:
    """`tenants`: those that have buckets of kept answers."""
    hub, subjects = InMemoryHub(), Subjects(instance)
    hub.bucket_state(subjects.workers_bucket, WORKER_TTL_S, False, None, None)
    hub.bucket_state(subjects.keys_bucket, KEY_TTL_S, True, KEY_BUCKET_BYTES, None)
    for name in (subjects.leader_bucket, subjects.configuration_bucket):
        hub.bucket_state(name, None, True, None, None)
    for tenant in tenants:
        bucket = subjects.responses_bucket(tenant_name(tenant))
        hub.bucket_state(bucket, RESPONSE_TTL_S, True, RESPONSE_BUCKET_BYTES, MAX_RESPONSES)
    return hub
