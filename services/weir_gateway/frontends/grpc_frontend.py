"""The gRPC frontend: `weir.v1.Inference`. Errors leave as WeirError; the server's interceptor maps them to statuses."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import grpc.aio
from opentelemetry import context as current_context

from weir.core.api_key import try_read_key
from weir.core.errors import Cancelled, WeirError
from weir.rpc.errors import abort_with
from weir.rpc.sampling_pb import finish_reason_to_pb, logprobs_to_pb, options_from_pb
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from weir_gateway.access.access_control import Caller
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.input_processor import InputProcessor
from weir_gateway.requests.client_request import (
    GRPC_NAMES,
    ClientRequest,
    Conversation,
    Operation,
    Prompt,
    Text,
    TokenIds,
)
from weir_gateway.requests.output import OutputDelta
from weir_gateway.requests.validation import Counts

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_ResponseT = TypeVar("_ResponseT", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Translates, and sends what comes; a client that does not read is given up after `send_timeout_s`.

    `processor` is asked for at each call: the servicer is there before what it serves.
    """

    def __init__(self, processor: Callable[[], InputProcessor], *, send_timeout_s: float = 60.0) -> None:
        self._processor = processor
        self._send_timeout_s = send_timeout_s
        self._endings: set[asyncio.Task[None]] = set()

    def identify(self, metadata: Mapping[str, str]) -> Caller:
        """Who calls; for before a message is read. Raises Unauthenticated, Unavailable before it can be known."""
        return _identify(self._processor(), metadata)

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        num_token_ids = len(request.token_ids.ids) if request.WhichOneof("prompt") == "token_ids" else None
        model, counts = request.options.model, _counts(request.options, num_token_ids=num_token_ids)
        try:
            self._processor().check_counts(model, GRPC_NAMES, counts)
        except WeirError:
            del request  # parsed it is many times as large, and the error keeps this frame until it is sent
            raise
        prompt: Prompt = Text(request.text) if num_token_ids is None else TokenIds(tuple(request.token_ids.ids))
        client_request = ClientRequest(Operation.TEXT_COMPLETION, prompt, GRPC_NAMES, options_from_pb(request.options))
        del request  # else kept until the answer is complete
        async for opened, delta in self._deltas(client_request, context):
            yield fill(inference_pb2.GenerateResponse(), opened, delta)

    async def Chat(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.ChatResponse]:
        model, counts = request.options.model, _counts(request.options, num_messages=len(request.messages))
        try:
            self._processor().check_counts(model, GRPC_NAMES, counts)
        except WeirError:
            del request  # parsed it is many times as large, and the error keeps this frame until it is sent
            raise
        turns = tuple({"role": message.role, "content": message.content} for message in request.messages)
        client_request = ClientRequest(
            Operation.CHAT, Conversation(turns), GRPC_NAMES, options_from_pb(request.options)
        )
        del request  # else kept until the answer is complete
        async for opened, delta in self._deltas(client_request, context):
            yield fill(inference_pb2.ChatResponse(), opened, delta)

    async def Cancel(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.CancelRequest, context: _Context
    ) -> inference_pb2.CancelResponse:
        processor = self._processor()
        return inference_pb2.CancelResponse(found=processor.cancel(_caller(processor, context), request.request_id))

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        processor = self._processor()
        _caller(processor, context)
        token_ids = await processor.tokenize(request.model, request.text)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def ListModels(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        del request
        processor = self._processor()
        _caller(processor, context)
        models = [
            inference_pb2.Model(
                name=model.name, max_context_tokens=model.max_context_tokens, vocab_size=model.vocab_size
            )
            for model in processor.models.list_models()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def _deltas(
        self, client_request: ClientRequest, context: _Context
    ) -> AsyncIterator[tuple[OpenRequest, OutputDelta]]:
        processor = self._processor()
        caller = _caller(processor, context)
        opened = await processor.open(client_request, caller, current_context.get_current(), context.time_remaining())
        # The call's end ends the request at once, whenever the generator that waits in a write is collected.
        context.add_done_callback(lambda _: opened.leave())  # type: ignore[arg-type]  # the stub knows no functions
        loop = asyncio.get_running_loop()
        with opened:
            while True:
                delta = await opened.next_delta()
                timer = loop.call_later(self._send_timeout_s, self._give_up_client, opened, context)
                try:
                    yield opened, delta
                finally:
                    timer.cancel()
                opened.mark_sent()
                if delta.is_last:
                    return

    def _give_up_client(self, opened: OpenRequest, context: _Context) -> None:
        logger.warning("request %s: its client has not read for long and is given up", opened.request_id)
        opened.leave()
        ending = asyncio.create_task(_abort_unread(context))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


def _counts(
    options: inference_pb2.RequestOptions, *, num_messages: int | None = None, num_token_ids: int | None = None
) -> Counts:
    """Of entries, before an object is made of each."""
    stop = options.stop_conditions
    return Counts(
        messages=num_messages,
        token_ids=num_token_ids,
        stop=len(stop.stop),
        stop_token_ids=len(stop.stop_token_ids),
        logit_bias=len(options.sampling.logit_bias),
    )


def _caller(processor: InputProcessor, context: _Context) -> Caller:
    """Raises Unauthenticated."""
    pairs = context.invocation_metadata() or ()
    return _identify(processor, {key: value for key, value in pairs if isinstance(value, str)})


def _identify(processor: InputProcessor, metadata: Mapping[str, str]) -> Caller:
    return processor.identify(try_read_key(metadata.get("authorization", ""), metadata.get("x-api-key", "")))


async def _abort_unread(context: _Context) -> None:
    """The status waits behind what was written; both go when the client reads again, or leaves."""
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):
        await abort_with(context, Cancelled("the client has not read the answer for too long"))


def fill(response: _ResponseT, opened: OpenRequest, delta: OutputDelta) -> _ResponseT:
    """Fills an empty response."""
    response.request_id = opened.client_id
    response.first_index = delta.first_index
    response.token_ids.extend(delta.token_ids)
    response.text = delta.text
    response.choice = delta.choice
    response.logprobs.extend(map(logprobs_to_pb, delta.logprobs))
    response.prompt_logprobs.extend(map(logprobs_to_pb, delta.prompt_logprobs))
    if delta.finish_reason is not None:
        response.finish_reason = finish_reason_to_pb(delta.finish_reason)
    if delta.is_last:
        usage = types_pb2.Usage(
            num_prompt_tokens=opened.num_prompt_tokens,
            num_output_tokens=opened.num_output_tokens,
            num_cached_tokens=opened.num_cached_tokens,
        )
        response.usage.CopyFrom(usage)
    return response
