"""What nobody but who asks may see is in no log file, no span and no command line of a running stack; and where keys
are in force, `weir status` still sees all of it."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.marked import ANSWER, MARKS, PROMPT, ask_everything

from weir.bus.nats_users import NATS_ROLES
from weir.core.credentials import key_digest, make_key
from weir.runtime.change_log import read_changes
from weir.runtime.stack.paths import InstancePaths
from weir.testing.otlp import OtlpReceiver
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

TENANT_KEY, ADMIN_KEY = make_key(), make_key()
KEYS = f"""
admin_key_digests = ["{key_digest(ADMIN_KEY).hex()}"]
[tenants.acme]
api_key_digests = ["{key_digest(TENANT_KEY).hex()}"]
"""


@pytest.fixture
def keyed(stack: Stack, limits_path: Path) -> Iterator[Stack]:
    """With keys in force, and without them afterwards."""

    def status_without_a_key() -> int:
        return httpx.get(f"{stack.http_url}/v1/models", timeout=30).status_code

    limits_path.write_text(KEYS)
    wait_until(lambda: status_without_a_key() == 401, timeout_s=30, what="keys are asked for")
    yield stack
    limits_path.write_text("")
    wait_until(lambda: status_without_a_key() == 200, timeout_s=30, what="no key is asked for")


def command_lines(stack: Stack) -> str:
    found = ""
    for process in stack.processes():
        with contextlib.suppress(FileNotFoundError):
            found += Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/comm").read_text()
    return found


def all_command_lines() -> str:
    """Of helpers and of supervisors too."""
    found = ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_text(errors="replace")
    return found


async def test_prompts_answers_and_keys_are_in_no_log_no_span_and_no_command_line(
    keyed: Stack, otlp_receiver: OtlpReceiver
) -> None:
    paths = InstancePaths(keyed.runtime_dir.resolve() / keyed.instance)
    own_key = paths.try_read_admin_key()
    assert own_key
    seeds = [paths.nats_seed_file(role).read_text().strip() for role in NATS_ROLES]
    secrets = (*MARKS, TENANT_KEY, ADMIN_KEY, own_key, *seeds)
    refused = keyed.weir(
        "limits", "set", "lanes.batch.max_queued=7", "--instance", keyed.instance, "--admin-key", TENANT_KEY
    )
    assert "tenant's key" in refused.stderr
    statuses, said = await ask_everything(keyed.http_url, keyed.grpc_address, TENANT_KEY)
    seen = command_lines(keyed) + all_command_lines()
    assert {200, 400, 401} <= statuses, statuses
    assert 500 not in statuses
    assert PROMPT in said
    assert ANSWER in said
    wait_until(keyed.is_idle, timeout_s=60, what="all requests have ended")
    await asyncio.sleep(2.0)  # spans are sent every second
    spans = [span.raw for span in otlp_receiver.spans]
    assert len(spans) > 50
    logs = {path.name: path.read_bytes() for path in paths.logs.iterdir()}
    assert {"gateway-0.log", "scheduler-0.log", "decode-0.log", "nats.log"} <= logs.keys()
    for secret in secrets:
        mark = secret.encode()
        assert [name for name, content in logs.items() if mark in content] == []
        assert not [span for span in spans if mark in span]
        assert secret not in seen
    denied = [change for change in read_changes(paths.logs) if change["result"] == "denied"]
    assert denied[-1]["actor"] == f"tenant-key:{key_digest(TENANT_KEY).hex()[:8]}"


def test_status_and_changes_work_where_keys_are_in_force(keyed: Stack) -> None:
    shown = keyed.weir("status", "--json", "--instance", keyed.instance)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    gateways = [one for one in json.loads(shown.stdout)["processes"] if one["role"] == "gateway"]
    assert gateways
    assert all(one["metrics"] and not one["refusal"] for one in gateways)
    changes = keyed.weir("audit", "--changes", "--instance", keyed.instance)
    lines = [json.loads(line) for line in changes.stdout.splitlines()]
    made = next(line for line in lines if line["action"] == "make admin key")
    assert (made["actor"], made["process"], len(made["after"])) == ("here", "supervisor", 8)
    assert any(line["actor"] == "file" and line["result"] == "done" for line in lines)
