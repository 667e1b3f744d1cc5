"""The gRPC door: `weir.v1.Inference`. Errors leave as WeirError; the server's interceptor makes statuses of them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import grpc.aio
from opentelemetry import context as current_context

from weir.core.api_key import try_read_key
from weir.core.errors import Cancelled, WeirError
from weir.rpc.conversions import finish_reason_to_pb, logprobs_to_pb, options_from_pb
from weir.rpc.errors import abort_with
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from weir_gateway.access.access import Caller
from weir_gateway.draft import GRPC_NAMES, Conversation, Operation, Prompt, RequestDraft, Text, TokenIds
from weir_gateway.driving.choices import OutputDelta
from weir_gateway.intake import InputProcessor, OpenRequest
from weir_gateway.requests.validation import Counts

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_ResponseT = TypeVar("_ResponseT", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Translates, and writes what comes; a client that does not read is given up after `unread_s`.

    `processor` is asked for at each call: the servicer is there before what it serves.
    """

    def __init__(self, processor: Callable[[], InputProcessor], *, unread_s: float = 60.0) -> None:
        self._processor = processor
        self._unread_s = unread_s
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
            del request  # parsed it is many times as large, and the error keeps this frame until it was told
            raise
        prompt: Prompt = Text(request.text) if num_token_ids is None else TokenIds(tuple(request.token_ids.ids))
        draft = RequestDraft(Operation.TEXT_COMPLETION, prompt, GRPC_NAMES, options_from_pb(request.options))
        del request  # else kept until the answer is complete
        async for opened, delivery in self._deliveries(draft, context):
            yield fill(inference_pb2.GenerateResponse(), opened, delivery)

    async def Chat(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.ChatResponse]:
        model, counts = request.options.model, _counts(request.options, num_messages=len(request.messages))
        try:
            self._processor().check_counts(model, GRPC_NAMES, counts)
        except WeirError:
            del request  # parsed it is many times as large, and the error keeps this frame until it was told
            raise
        turns = tuple({"role": message.role, "content": message.content} for message in request.messages)
        draft = RequestDraft(Operation.CHAT, Conversation(turns), GRPC_NAMES, options_from_pb(request.options))
        del request  # else kept until the answer is complete
        async for opened, delivery in self._deliveries(draft, context):
            yield fill(inference_pb2.ChatResponse(), opened, delivery)

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

    async def _deliveries(
        self, draft: RequestDraft, context: _Context
    ) -> AsyncIterator[tuple[OpenRequest, OutputDelta]]:
        processor = self._processor()
        caller = _caller(processor, context)
        opened = await processor.open(draft, caller, current_context.get_current(), context.time_remaining())
        # The call's end ends the request at once, whenever the generator that waits in a write is collected.
        context.add_done_callback(lambda _: opened.leave())  # type: ignore[arg-type]  # the stub knows no functions
        loop = asyncio.get_running_loop()
        with opened:
            while True:
                delivery = await opened.choices.next_piece()
                unread = loop.call_later(self._unread_s, self._give_up_reader, opened, context)
                try:
                    yield opened, delivery
                finally:
                    unread.cancel()
                opened.sent()
                if delivery.is_last:
                    return

    def _give_up_reader(self, opened: OpenRequest, context: _Context) -> None:
        logger.warning("request %s: its client has not read for long and is given up", opened.ids.request_id)
        opened.leave()
        ending = asyncio.create_task(_end_unread(context))
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


async def _end_unread(context: _Context) -> None:
    """The status waits behind what was written; both go when the client reads again, or leaves."""
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):
        await abort_with(context, Cancelled("the client has not read the answer for too long"))


def fill(response: _ResponseT, opened: OpenRequest, delivery: OutputDelta) -> _ResponseT:
    """Writes what is delivered into an empty response."""
    response.request_id = opened.client_id
    response.first_index = delivery.piece.first_index
    response.token_ids.extend(delivery.piece.token_ids)
    response.text = delivery.piece.text
    response.choice = delivery.choice
    response.logprobs.extend(map(logprobs_to_pb, delivery.piece.logprobs))
    response.prompt_logprobs.extend(map(logprobs_to_pb, delivery.piece.prompt_logprobs))
    if delivery.finish_reason is not None:
        response.finish_reason = finish_reason_to_pb(delivery.finish_reason)
    if delivery.is_last:
        usage = types_pb2.Usage(
            num_prompt_tokens=opened.num_prompt_tokens,
            num_output_tokens=opened.num_output_tokens,
            num_cached_tokens=opened.num_cached_tokens,
        )
        response.usage.CopyFrom(usage)
    return response
