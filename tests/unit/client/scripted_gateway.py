"""A gateway that answers what a test wants: for both clients, over real gRPC."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from weir.core.errors import WeirError
from weir.rpc.errors import status_code, status_trailers
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2


class ScriptedGateway(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers "one", "two", or `error` after the first, `num_errors` times; without what comes before `resume_from`.

    `requests` and `deadlines_s` are what it was asked.
    """

    def __init__(self) -> None:
        self.error: WeirError | None = None
        self.num_errors = 1_000_000
        self.never_ends = False
        self.requests: list[Any] = []
        self.deadlines_s: list[float] = []
        self.was_cancelled = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield from self._answer(request, context, inference_pb2.GenerateResponse)

    def Chat(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield from self._answer(request, context, inference_pb2.ChatResponse)

    def Cancel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.CancelResponse(found=request.request_id == "running")

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._fail(context)
        return inference_pb2.TokenizeResponse(token_ids=request.text.encode())

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._fail(context)
        model = inference_pb2.Model(name="m", max_context_tokens=64, vocab_size=9)
        return inference_pb2.ListModelsResponse(models=[model])

    def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._fail(context)
        return admin_pb2.DescribeResponse(
            role="gateway", process_id="g-0", pid=7, model="m", uptime_ms=1500, metrics={"accepted_total": 3}
        )

    def SetLimits(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a gateway takes no limits")

    ListWorkers = Drain = EndDrain = SetRole = Describe
    """What is asked of schedulers."""

    def _answer(self, request: Any, context: Any, kind: Any) -> Iterator[Any]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        context.add_callback(self.was_cancelled.set)
        if request.options.resume_from == 0:
            yield kind(request_id="r", first_index=0, token_ids=[5], text="one ")
        self._fail(context)
        if self.never_ends:
            self.was_cancelled.wait(10)
            return
        yield kind(
            request_id="r",
            first_index=1,
            token_ids=[6, 7],
            text="two",
            finish_reason=types_pb2.FINISH_REASON_STOP,
            usage=types_pb2.Usage(num_prompt_tokens=4, num_output_tokens=3, num_cached_tokens=2),
            model_digest="d1",
        )

    def _fail(self, context: Any) -> None:
        if self.error is not None and self.num_errors > 0:
            self.num_errors -= 1
            context.set_trailing_metadata(status_trailers(self.error))
            context.abort(status_code(self.error), self.error.message)


@contextmanager
def scripted_gateway() -> Iterator[tuple[ScriptedGateway, str]]:
    """The gateway and its address."""
    gateway = ScriptedGateway()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    admin_pb2_grpc.add_AdminServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield gateway, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
