"""The gRPC frontend: `weir.v1.Inference`. Errors leave as WeirError; the server's interceptor maps them to statuses."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio
from opentelemetry import context as current_context

from weir.core.errors import Cancelled, WeirError
from weir.core.life import FinishReason
from weir.rpc.access import RpcCaller, shown_key
from weir.rpc.conversions import finish_reason_to_pb, logprobs_to_pb, options_from_pb
from weir.rpc.errors import abort_with
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from weir_gateway.access import Caller
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.grpc_chats import conversation_from_pb, parts_to_pb
from weir_gateway.frontends.send_watch import SendWatch
from weir_gateway.input_processor import InputProcessor
from weir_gateway.requests.client_request import (
    GRPC_NAMES,
    ClientRequest,
    Operation,
    Prompt,
    Text,
    TokenIds,
)
from weir_gateway.requests.output import OutputDelta
from weir_gateway.requests.validation import Counts
from weir_gateway.tokenization import TokenizeRequest

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Translates, and sends what comes; a client that does not read is given up after `send_timeout_s`.

    `processor` is asked for at each call: the servicer is there before what it serves. Answers are written and not
    yielded: each generator between here and gRPC would cost every message a turn.
    """

    def __init__(self, processor: Callable[[], InputProcessor], *, send_timeout_s: float = 60.0) -> None:
        self._processor = processor
        self._send_timeout_s = send_timeout_s
        self._endings: set[asyncio.Task[None]] = set()

    def identify(self, caller: RpcCaller) -> Caller:
        """The caller; for before a message is received. Raises Unauthenticated, Unavailable before it can be known."""
        return self._processor().identify(caller.key)

    def check_operator(self, caller: RpcCaller) -> None:
        """As `identify`, for what is for operators. Raises Unauthenticated, PermissionDenied, Unavailable."""
        self._processor().access.check_operator(caller.key, is_from_here=caller.is_here)

    async def Generate(  # type: ignore[override]  # written, not yielded  # noqa: N802 - gRPC's name
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
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
        await self._answer(client_request, context, inference_pb2.GenerateResponse)

    async def Chat(  # type: ignore[override]  # written, not yielded  # noqa: N802 - gRPC's name
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> None:
        model, counts = request.options.model, _counts(request.options, num_messages=len(request.messages))
        try:
            self._processor().check_counts(model, GRPC_NAMES, counts)
            conversation = conversation_from_pb(request)
        except WeirError:
            del request  # parsed it is many times as large, and the error keeps this frame until it is sent
            raise
        client_request = ClientRequest(Operation.CHAT, conversation, GRPC_NAMES, options_from_pb(request.options))
        del request  # else kept until the answer is complete
        await self._answer(client_request, context, inference_pb2.ChatResponse)

    async def Cancel(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.CancelRequest, context: _Context
    ) -> inference_pb2.CancelResponse:
        caller = self._caller_of(context)
        return inference_pb2.CancelResponse(found=self._processor().cancel(caller, request.request_id))

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        asked = TokenizeRequest(request.model, Text(request.text), GRPC_NAMES)
        return await self._processor().tokenization.tokenize(
            asked, self._caller_of(context), lambda _, token_ids: inference_pb2.TokenizeResponse(token_ids=token_ids)
        )

    async def ListModels(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        del request
        self._caller_of(context)
        models = [
            inference_pb2.Model(
                name=model.name,
                max_context_tokens=model.max_context_tokens,
                vocab_size=model.vocab_size,
                aliases=model.aliases,
            )
            for model in self._processor().models.list_models()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def _answer(
        self, client_request: ClientRequest, context: _Context, make_response: Callable[..., _Response]
    ) -> None:
        opened = await self._processor().open(
            client_request, self._caller_of(context), current_context.get_current(), context.time_remaining()
        )
        # The call's end ends the request at once, whatever its task waits for.
        context.add_done_callback(lambda _: opened.leave())  # type: ignore[arg-type]  # the stub knows no functions
        responses = _Responses(opened, make_response)
        watch = SendWatch(self._send_timeout_s, lambda: self._give_up_client(opened, context))
        with opened, contextlib.closing(watch):
            while True:
                delta = await opened.next_delta()
                response = responses.of(delta)
                watch.begin()
                await context.write(response)
                watch.end()
                opened.mark_sent()
                if delta.is_last:
                    return

    def _caller_of(self, context: _Context) -> Caller:
        return self._processor().identify(shown_key(context))

    def _give_up_client(self, opened: OpenRequest, context: _Context) -> None:
        logger.warning("request %s: its client has not read for long and is given up", opened.request_id)
        opened.leave()
        ending = asyncio.create_task(_abort_unread(context))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


def _counts(
    options: inference_pb2.RequestOptions, *, num_messages: int | None = None, num_token_ids: int | None = None
) -> Counts:
    """Of the fields that repeat, before an object is made of each entry."""
    stop = options.stop_conditions
    return Counts(
        messages=num_messages,
        token_ids=num_token_ids,
        stop=len(stop.stop),
        stop_token_ids=len(stop.stop_token_ids),
        logit_bias=len(options.sampling.logit_bias),
    )


async def _abort_unread(context: _Context) -> None:
    """The status waits behind what was written; both go when the client reads again, or leaves."""
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError):
        await abort_with(context, Cancelled("the client has not read the answer for too long"))


class _Responses:
    """Renders the answer to one request."""

    def __init__(self, opened: OpenRequest, make_response: Callable[..., _Response]) -> None:
        self._opened = opened
        self._make_response = make_response
        self._client_id = opened.client_id
        self._call_ids = opened.call_ids()

    def of(self, delta: OutputDelta) -> _Response:
        response = self._make_response(
            request_id=self._client_id,
            first_index=delta.first_index,
            token_ids=delta.token_ids,
            text=delta.text,
            choice=delta.choice,
        )
        if delta.events is not None and isinstance(response, inference_pb2.ChatResponse):
            response.parts.CopyFrom(parts_to_pb(delta.events, self._call_ids[delta.choice].of))
        if delta.logprobs:
            response.logprobs.extend(map(logprobs_to_pb, delta.logprobs))
        if delta.prompt_logprobs:
            response.prompt_logprobs.extend(map(logprobs_to_pb, delta.prompt_logprobs))
        if delta.finish_reason is not None:
            is_of_calls = self._opened.states[delta.choice].output.ends_with_calls
            response.finish_reason = finish_reason_to_pb(
                FinishReason.TOOL_CALLS if is_of_calls else delta.finish_reason
            )
        if delta.is_last:
            response.usage.CopyFrom(_usage(self._opened))
            response.model_digest = self._opened.checked.model.digest
        return response


def _usage(opened: OpenRequest) -> types_pb2.Usage:
    return types_pb2.Usage(
        num_prompt_tokens=opened.num_prompt_tokens,
        num_output_tokens=opened.num_output_tokens,
        num_cached_tokens=opened.num_cached_tokens,
        num_reasoning_tokens=opened.num_reasoning_tokens,
    )
