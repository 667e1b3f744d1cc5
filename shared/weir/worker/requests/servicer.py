"""The gRPC service of a worker: `weir.v1.Worker`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import DecodeError

from weir.core.errors import DeadlineExceeded, FieldViolation, InvalidRequest, PermissionDenied, WeirError
from weir.engine.messages import SequenceKey
from weir.rpc.access import identity_of
from weir.rpc.identities import CertifiedIdentity
from weir.wire.v1 import worker_pb2, worker_pb2_grpc
from weir.worker.requests.commands import gateway_id_from_pb, key_from_pb, pages_address_from_pb, resume_from_pb
from weir.worker.requests.request_manager import RequestManager
from weir.worker.requests.stagings import Stagings
from weir.worker.requests.streams import GatewayStream, StreamHub

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 5.0
_Requests = AsyncIterator[worker_pb2.ServeRequest]
_Context = grpc.aio.ServicerContext[Any, Any]


class StartHandler(Protocol):
    """Takes a Start of which only id and attempt were checked."""

    def __call__(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None: ...


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """One stream a gateway; WeirErrors become statuses in the server's interceptor."""

    def __init__(
        self, worker_id: str, hub: StreamHub, manager: RequestManager, stagings: Stagings, on_start: StartHandler
    ) -> None:
        self._worker_id = worker_id
        self._hub = hub
        self._manager = manager
        self._stagings = stagings
        self._on_start = on_start

    async def Serve(  # noqa: N802 - the method's name on the wire
        self, request_iterator: _Requests, context: _Context
    ) -> AsyncIterator[worker_pb2.ServeResponse]:
        gateway_id = await self._receive_hello(request_iterator)
        _check_own_id(gateway_id, identity_of(context))
        self._manager.pause(gateway_id)
        stream = self._hub.attach(gateway_id)
        _log.info("gateway %s is connected", gateway_id)
        receiving = asyncio.create_task(self._receive(request_iterator, stream))
        try:
            yield worker_pb2.ServeResponse(welcome=worker_pb2.Welcome(worker_id=self._worker_id))
            while (frame := await stream.next_frame()) is not None:
                yield worker_pb2.ServeResponse(step_frame=frame)
            if stream.error is not None:
                raise stream.error
        finally:
            receiving.cancel()
            self._manager.on_stream_end(stream)
            self._stagings.cancel_all(stream)
            _log.info("gateway %s: the stream has ended", gateway_id)

    async def _receive_hello(self, requests: _Requests) -> str:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await _receive_one(requests)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no Hello within {_HELLO_TIMEOUT_S:g} s") from error
        if first is None or first.WhichOneof("command") != "hello":
            raise InvalidRequest([FieldViolation("hello", "the first message of a stream must be Hello")])
        return gateway_id_from_pb(first.hello)

    async def _receive(self, requests: _Requests, stream: GatewayStream) -> None:
        """Until the gateway ends its side, which ends the stream, or sends a command that ends it with an error."""
        try:
            while (request := await _receive_one(requests)) is not None:
                self._handle(stream, request)
                await stream.wait_for_room()
            stream.close()
        except WeirError as error:
            _log.warning("gateway %s: %s", stream.gateway_id, error)
            stream.close(error)
        except grpc.aio.BaseError:
            stream.close()  # the transport ended it
        except asyncio.CancelledError:
            stream.close()
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of this task: the servicer raises it again
            _log.exception("a command of gateway %s failed", stream.gateway_id)
            stream.close(WeirError(f"internal error: {type(error).__name__}; see the worker's log"))

    def _handle(self, stream: GatewayStream, request: worker_pb2.ServeRequest) -> None:
        match request.WhichOneof("command"):
            case "start":
                self._on_start(stream, key_from_pb("start", request.start), request.start)
            case "cancel":
                key = key_from_pb("cancel", request.cancel)
                self._stagings.cancel(stream, key.request_id)
                self._manager.cancel(stream, key)
            case "resume":
                self._manager.resume(stream, resume_from_pb(request.resume))
            case "stage":
                key = key_from_pb("stage", request.stage)
                self._stagings.begin(stream, key, pages_address_from_pb(request.stage))
            case "hello":
                raise InvalidRequest([FieldViolation("hello", "was sent already on this stream")])
            case _:
                raise InvalidRequest([FieldViolation("command", "must be one of start, cancel, resume, stage")])


def _check_own_id(gateway_id: str, identity: CertifiedIdentity | None) -> None:
    """Raises PermissionDenied: a gateway that took another's id would take over its streams and its requests."""
    if identity is not None and not identity.owns(gateway_id):
        _log.warning("%s says that it is gateway %s, and is refused", identity.uri, gateway_id)
        raise PermissionDenied(
            f"hello.gateway_id {gateway_id}: is not of {identity.uri}, whose ids end in {identity.mark}"
        )


async def _receive_one(requests: _Requests) -> worker_pb2.ServeRequest | None:
    """None at the end. Raises InvalidRequest for bytes that are no ServeRequest."""
    try:
        return await anext(requests, None)
    except DecodeError as error:
        raise InvalidRequest([FieldViolation("request", f"is not a ServeRequest: {error}")]) from error
