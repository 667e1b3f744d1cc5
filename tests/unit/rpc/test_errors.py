"""Errors keep their meaning on the way through a gRPC status."""

import grpc
import grpc.aio
import pytest

from weir.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    WeirError,
)
from weir.rpc.errors import from_rpc_error, status_code, status_trailers


def sent_and_received(error: WeirError, *, trailers: tuple[tuple[str, bytes], ...] | None = None) -> WeirError:
    metadata = grpc.aio.Metadata(*(status_trailers(error) if trailers is None else trailers))
    return from_rpc_error(grpc.aio.AioRpcError(status_code(error), grpc.aio.Metadata(), metadata, error.message))


@pytest.mark.parametrize(
    "error",
    [
        NotFound("options.model", "no model 'x'"),
        Overloaded("queue full", retry_after_s=1.25),
        Unavailable("no worker", retry_after_s=2.0),
        Unavailable("lost after 3 tokens"),
        DeadlineExceeded("too late"),
        Cancelled("asked for"),
        InternalError("a defect"),
    ],
    ids=lambda error: f"{type(error).__name__}, retry {error.retry_after_s}",
)
def test_an_error_arrives_as_it_was_sent(error: WeirError) -> None:
    received = sent_and_received(error)
    assert type(received) is type(error)
    assert received.message == error.message
    assert received.retry_after_s == error.retry_after_s


def test_every_violation_arrives_with_its_field() -> None:
    violations = (FieldViolation("sampling.temperature", "is -1"), FieldViolation("text", "is empty"))
    received = sent_and_received(InvalidRequest(violations))
    assert isinstance(received, InvalidRequest)
    assert received.violations == violations


def test_the_field_of_an_unknown_thing_arrives() -> None:
    received = sent_and_received(NotFound("options.model", "no model 'x'"))
    assert isinstance(received, NotFound)
    assert received.field == "options.model"


def test_a_status_with_many_long_violations_stays_under_the_limit_of_trailers() -> None:
    violations = [FieldViolation(f"field{number}" * 50, "y" * 5000) for number in range(200)]
    assert sum(len(key) + len(value) for key, value in status_trailers(InvalidRequest(violations))) < 8000


@pytest.mark.parametrize("details", [b"", b"\xff\xff\xff", b"\x1a\x04\x0a\x02ab"])
def test_a_status_with_broken_details_keeps_its_code_and_message(details: bytes) -> None:
    error = Unavailable("no worker", retry_after_s=1.0)
    received = sent_and_received(error, trailers=(("grpc-status-details-bin", details),))
    assert isinstance(received, Unavailable)
    assert received.message == "no worker"
    assert received.retry_after_s is None


def test_a_code_that_weir_never_sends_becomes_an_internal_error_that_names_it() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "no method")
    assert from_rpc_error(error).message == "UNIMPLEMENTED: no method"


@pytest.mark.parametrize("message", ["Deadline Exceeded", "Stream removed (Deadline Exceeded)"])
def test_a_deadline_that_passed_on_the_clients_own_clock_is_put_into_words(message: str) -> None:
    received = sent_and_received(DeadlineExceeded(message), trailers=())
    assert isinstance(received, DeadlineExceeded)
    assert received.message == "the deadline has passed before the whole answer was there"
