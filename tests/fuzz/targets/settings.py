"""Files of operators: settings, limits, models, changes of limits, keys; and files that Weir itself wrote and reads
again: changes, traces, life events."""

import asyncio
import base64
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.fuzz.choices import Choices, edited, mutated_json
from tests.fuzz.target import Check, Target, simple
from weir.bench.serving.datasets import TraceReplay
from weir.bus.audit import AuditStream
from weir.bus.protocol import BusError, BusMessage
from weir.bus.subjects import Subjects
from weir.core.credentials import key_digest, key_metadata, masked_url, try_read_key
from weir.core.errors import InvalidRequest
from weir.runtime.change_log import read_changes
from weir.runtime.config import ConfigError, ServiceConfig, resolve_config
from weir.runtime.stack.models import StackModel, parse_models
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import change_limits, format_limits, parse_limits
from weir.sim.workloads.trace_file import TraceError
from weir_gateway.config import GatewayConfig
from weir_scheduler.config import SchedulerConfig

_LIMITS = f"""default_lane = "standard"
max_queued = 100
admin_key_digests = ["{"ab" * 32}"]
[lanes.interactive]
max_queued = 4000
max_wait_s = 60
guaranteed_share = 0.3
[lanes.standard]
[tenants.search]
weight = 2
tokens_per_min = 600_000
key_digests = ["{"cd" * 32}"]
lanes = ["standard"]
[default_tenant]
requests_per_min = 60
[workers.decode]
max_num_seqs = 16
"""
_MODELS = """[models.a]
model = "smollm2-135m"
aliases = ["b"]
prefill = 1
decode = 2
arena_bytes = "1GiB"
[models."c/d"]
load = "dummy"
model_shape = "tiny"
"""
_CONFIG = """instance = "x"
log_level = "info"
grace_s = 3.5
[gateway]
listen = "127.0.0.1:0"
max_prompt_bytes = 1048576
[scheduler]
index = 1
"""
_CONFIGS = {"gateway": GatewayConfig, "scheduler": SchedulerConfig}


def _text(choices: Choices, valid: str) -> str:
    if choices.byte() % 8 == 1:
        return "x = " + choices.pick(("[", "{a=")) * choices.below(4000)
    return edited(choices, valid.encode()).decode("utf-8", "replace")


def check_limits(data: bytes) -> None:
    choices = Choices(data)
    limits = parse_limits(_text(choices, _LIMITS) if choices.byte() % 4 else _LIMITS, CoreLimits())
    assert parse_limits(format_limits(limits), CoreLimits()) == limits
    keys = ("lanes.interactive.max_queued", "tenants.new.weight", "max_queued", "workers.x.max_num_seqs", "lane_order")
    changes = [(choices.pick((*keys, choices.text())), choices.text() or "1") for _ in range(choices.below(3))]
    changed = change_limits(limits, changes)
    assert parse_limits(format_limits(changed), CoreLimits()) == changed


def check_models(data: bytes) -> None:
    parse_models(_text(Choices(data), _MODELS), StackModel("m"), "file")


@contextlib.contextmanager
def _configs() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weir.toml"

        def check(data: bytes) -> None:
            choices = Choices(data)
            role = choices.pick(list(_CONFIGS))
            raw = edited(choices, _CONFIG.encode())
            path.write_bytes(raw if choices.byte() % 4 else _text(choices, _CONFIG).encode())
            kind: type[ServiceConfig] = _CONFIGS[role]
            names = [name for name, each in kind.__dataclass_fields__.items() if each.init]
            environ = {f"WEIR_{choices.pick(names).upper()}": choices.text() for _ in range(choices.below(3))}
            flags = {choices.pick(names): choices.text() for _ in range(choices.below(2))}
            resolve_config(kind, role, flags=flags, environ=environ, toml_path=path)

        yield check


def check_keys(data: bytes) -> None:
    """Of headers and of files."""
    text = data.decode("utf-8", "surrogateescape")
    key = try_read_key(text, text)
    assert len(key_digest(text)) == 32
    assert key is None or key.strip() == key
    secret = "s3cret-of-somebody"
    assert secret not in masked_url(f"{text}:{secret}@host")
    key_metadata(text)


@contextlib.contextmanager
def _changes() -> Iterator[Check]:
    valid = json.dumps({"time": "2026-01-01T00:00:00.000+00:00", "process": "p", "actor": "here", "action": "drain"})
    with tempfile.TemporaryDirectory() as folder:

        def check(data: bytes) -> None:
            choices = Choices(data)
            lines = [choices.pick((valid.encode(), mutated_json(choices, json.loads(valid)), choices.some_bytes(20)))]
            (Path(folder) / "changes-p.jsonl").write_bytes(b"\n".join([*lines, valid.encode(), choices.rest()]))
            assert {"drain"} <= {str(change.get("action")) for change in read_changes(Path(folder))}

        yield check


_TRACES: Mapping[str, bytes] = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    "mooncake": b'{"timestamp": 0, "input_length": 675, "output_length": 5, "hash_ids": [0, 1]}\n',
    "arena": b"arrival_s,tenant,prompt_len,output_len\n0.5,1,20,30\n",
    "aibrix": b'{"timestamp": 5, "requests": [{"Prompt Length": 3, "Output Length": 4}]}\n',
    "lengths": b"num_prefill_tokens,num_decode_tokens\n5,6\n",
    "capture": b'{"arrival_s": 1.5, "num_prompt_tokens": 4, "num_output_tokens": 5, "lane": "l", "deadline_s": 3}\n',
}


@contextlib.contextmanager
def _traces() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:

        def check(data: bytes) -> None:
            choices = Choices(data)
            content = _TRACES[choices.pick(list(_TRACES))] * (1 + choices.below(3))
            if choices.byte() % 3 == 0 and content.startswith(b"{"):
                content = mutated_json(choices, json.loads(content.splitlines()[0]))
            path = Path(folder) / choices.pick(("trace.csv", "trace.jsonl", "trace.jsonl.gz"))
            path.write_bytes(edited(choices, content) if choices.byte() % 3 else content)
            for request in TraceReplay(path).requests(3, seed=1):
                assert request.output_len > 0

        yield check


class _Answers:
    """A server that says what the fuzzer wants it to."""

    def __init__(self, payloads: list[bytes]) -> None:
        self._payloads = payloads

    async def request(self, *_: object, **__: object) -> BusMessage:
        end = b'{"error": {"code": 404, "err_code": 10037}}'
        return BusMessage("s", self._payloads.pop(0) if self._payloads else end, {})


def check_events(data: bytes) -> None:
    choices = Choices(data)
    line = base64.b64encode(edited(choices, b'{"v": 1, "request_id": "r"}\n')).decode()
    answer: dict[str, Any] = {"message": {"seq": 1, "data": line}}
    payloads = [mutated_json(choices, answer) if choices.byte() % 4 else choices.some_bytes(30) for _ in range(3)]
    stream = AuditStream(_Answers(payloads), Subjects("x"))  # type: ignore[arg-type]

    async def read() -> None:
        async for found in stream.lines():
            assert isinstance(found, str)

    asyncio.run(read())


TARGETS = (
    Target("limits", simple(check_limits), (InvalidRequest,), max_bytes=256, ci_examples=100),
    Target("models_file", simple(check_models), (ConfigError,), max_bytes=256, ci_examples=100),
    Target("configs", _configs, (ConfigError,), max_bytes=256, ci_examples=100),
    Target("keys", simple(check_keys), (ValueError,), lambda: (b"Bearer weir-abc",), max_bytes=128),
    Target("change_log", _changes, (), max_bytes=256),
    Target("traces", _traces, (TraceError,), max_bytes=256, ci_examples=100),
    Target("life_events", simple(check_events), (BusError,), max_bytes=256),
)
