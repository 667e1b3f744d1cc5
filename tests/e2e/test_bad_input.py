"""Bad input gets a status that names the field; bytes that mean nothing are counted and ignored."""

from collections.abc import Callable
from itertools import product

import grpc
import msgpack
import nats
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from weir.bus.nats_users import NatsRole
from weir.bus.subjects import Subjects
from weir.testing.load import greedy_request
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.stack

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
Change = Callable[[inference_pb2.GenerateRequest], None]


def set_sampling(**values: float) -> Change:
    def change(request: inference_pb2.GenerateRequest) -> None:
        for name, value in values.items():
            setattr(request.options.sampling, name, value)

    return change


def set_option(name: str, value: object) -> Change:
    return lambda request: setattr(request.options, name, value)


def set_prompt(prompt: str | list[int]) -> Change:
    def change(request: inference_pb2.GenerateRequest) -> None:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids[:] = prompt

    return change


def refusal(stack: Stack, change: Change) -> tuple[grpc.StatusCode, str, list[str]]:
    request = greedy_request("Hello", max_tokens=2)
    change(request)
    options = [("grpc.max_send_message_length", 64 * 2**20)]
    with grpc.insecure_channel(stack.grpc_address, options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=30)
        with pytest.raises(grpc.RpcError):
            list(call)
        status = rpc_status.from_call(call)
    fields: list[str] = []
    for detail in status.details if status is not None else ():
        violations = error_details_pb2.BadRequest()
        if detail.Unpack(violations):
            fields.extend(violation.field for violation in violations.field_violations)
    return call.code(), call.details() or "", fields


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        pytest.param(set_prompt(""), INVALID, "text", id="empty prompt"),
        pytest.param(set_prompt([]), INVALID, "token_ids", id="no token ids"),
        pytest.param(set_prompt([5] * 9000), INVALID, "token_ids", id="prompt beyond the context"),
        pytest.param(set_prompt([49_152]), INVALID, "token_ids", id="token id out of range"),
        pytest.param(set_prompt("x" * 3_000_000), INVALID, "text", id="3 MB prompt"),
        pytest.param(set_sampling(temperature=-1.0), INVALID, "temperature", id="negative temperature"),
        pytest.param(set_sampling(temperature=float("nan")), INVALID, "temperature", id="temperature not a number"),
        pytest.param(set_sampling(top_p=1.5), INVALID, "top_p", id="top_p above 1"),
        pytest.param(set_sampling(top_p=0.0), INVALID, "top_p", id="top_p of 0"),
        pytest.param(set_option("lane", "no-such-lane"), INVALID, "lane", id="unknown lane"),
        pytest.param(set_option("model", "no-such-model"), NOT_FOUND, "model", id="unknown model"),
        pytest.param(set_option("request_id", "not allowed!"), INVALID, "request_id", id="bad request id"),
    ],
)
def test_a_wrong_field_is_named(stack: Stack, change: Change, code: grpc.StatusCode, field: str) -> None:
    found_code, message, fields = refusal(stack, change)
    assert found_code is code, message
    assert field in message
    if code is INVALID:
        assert any(field in name for name in fields), fields


def test_a_message_that_is_absurdly_large_is_refused_with_the_limit_of_the_port(stack: Stack) -> None:
    code, message, _ = refusal(stack, set_prompt("x" * 20_000_000))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in message
    assert f"vs. {4 << 20}" in message


@pytest.mark.parametrize("payload", [b"\xff\xff\xff\xff", b"\x12\x03ab\xff", b"\x0a\xff\xff\xff\xff\x0f"])
def test_malformed_protobuf_gets_a_status_and_harms_nobody(stack: Stack, payload: bytes) -> None:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        call = channel.unary_stream("/weir.v1.Inference/Generate", lambda raw: raw, lambda raw: raw)(
            payload, timeout=10
        )
        with pytest.raises(grpc.RpcError):
            list(call)
    assert call.code() in {INVALID, grpc.StatusCode.INTERNAL}
    shown = stack.weir("generate", "--address", stack.grpc_address, "--max-tokens", "2", "Hello")
    assert shown.returncode == 0, shown.stderr


def await_count(stack: Stack, role: str, count: float) -> None:
    wait_until(
        lambda: stack.metric(role, "malformed_messages_total") >= count,
        timeout_s=5,
        what=f"{role} has counted {count} malformed messages",
    )


async def test_malformed_messages_on_every_subject_are_counted_and_ignored(stack: Stack) -> None:
    subjects = Subjects(stack.instance)
    gateway_id = stack.describe(stack.processes("gateway")[0]).process_id
    to_scheduler = [subjects.submit, subjects.cancel, subjects.finish, subjects.reconcile]
    to_gateway = [subjects.grant(gateway_id), subjects.revoke(gateway_id)]
    garbage = [b"", b"\xc1", b"\x93\x01\x02", msgpack.packb({"request_id": 5}), msgpack.packb([1, 2])]
    before = {role: stack.metric(role, "malformed_messages_total") for role in ("scheduler", "gateway")}

    senders: tuple[tuple[NatsRole, list[str]], ...] = (("gateway", to_scheduler), ("scheduler", to_gateway))
    for role, subjects_of_role in senders:
        address, seed_file = stack.processes("nats")[0].address, stack.nats_seed_file(role)
        connection = await nats.connect(address, nkeys_seed=seed_file, inbox_prefix=subjects.inbox(role))
        for subject, payload in product(subjects_of_role, garbage):
            await connection.publish(subject, payload)
        await connection.flush()
        await connection.close()

    expected = {"scheduler": len(to_scheduler) * len(garbage), "gateway": len(to_gateway) * len(garbage)}
    for receiver, count in expected.items():
        await_count(stack, receiver, before[receiver] + count)
    shown = stack.weir("generate", "--address", stack.grpc_address, "--max-tokens", "2", "Hello")
    assert shown.returncode == 0, shown.stderr
