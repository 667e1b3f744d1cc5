"""Has prefill workers of other hosts compute the full pages of prompts, which the workers that answer get from there.

    begin ── Start of the pages, one token ──> worker of the other host ── ended, refused, lost ──> forgotten
    end   ── Cancel ─────────────────────────────────┘

Under an id of their own, since what they sample is nobody's answer. Nobody waits for them: what does not come is
computed by who answers.
"""

from collections.abc import Callable

from weir.bus.messages import Placement
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.rpc.conversions import sampling_to_pb
from weir.wire.v1 import worker_pb2
from weir_gateway.requests.request_state import RequestState
from weir_gateway.workers.connection import WorkerEndpoint
from weir_gateway.workers.connections import WorkerConnections

_GREEDY = SamplingParams(temperature=0.0)


class PrefixOrders:
    """One at most of a request."""

    def __init__(self, connections: WorkerConnections) -> None:
        self._connections = connections
        self._open: dict[str, _Order] = {}
        """By the id of the request."""
        self._num_begun = 0
        self._num_failed = 0

    def begin(self, state: RequestState, placement: Placement, command: worker_pb2.ServeRequest) -> None:
        """`command`: the Start of the worker that answers. Does nothing if none is placed."""
        if not placement.prefix_worker_id:
            return
        endpoint = WorkerEndpoint(placement.prefix_worker_id, placement.prefix_worker_address)
        order_id = order_id_of(state.request_id)
        order = _Order(state, endpoint.worker_id, order_command(order_id, command), self._close)
        connection = self._connections.connect(endpoint)
        connection.subscribe(order_id, order)
        connection.send(order.command)
        self._open[state.request_id] = order
        self._num_begun += 1

    def end(self, request_id: str) -> None:
        """The request does not need it any more."""
        order = self._open.pop(request_id, None)
        if order is None:
            return
        start = order.command.start
        self._connections.cancel(order.worker_id, start.request_id, Attempt(start.attempt.dispatch))
        self._unsubscribe(order)

    def metrics(self) -> dict[str, float]:
        return {
            "prefix_orders_total": float(self._num_begun),
            "prefix_orders_failed_total": float(self._num_failed),
        }

    def _close(self, request_id: str, is_done: bool) -> None:
        self._num_failed += not is_done
        order = self._open.pop(request_id, None)
        if order is not None:
            self._unsubscribe(order)

    def _unsubscribe(self, order: "_Order") -> None:
        connection = self._connections.try_get(order.worker_id)
        if connection is not None:
            connection.unsubscribe(order.command.start.request_id)


class _Order:
    """Implements `weir_gateway.workers.connection.UpdateSubscriber`."""

    def __init__(
        self,
        state: RequestState,
        worker_id: str,
        command: worker_pb2.ServeRequest,
        on_over: Callable[[str, bool], None],
    ) -> None:
        """`on_over`: the request's id, and whether all was computed."""
        self._state = state
        self.worker_id = worker_id
        self.command = command
        self._on_over = on_over

    def on_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        del worker_id
        if update.attempt.dispatch != self.command.start.attempt.dispatch:
            return  # of an order before, under the same id
        self._state.take_cached(update.num_cached_tokens)
        if update.finish_reason or update.HasField("error"):
            self._on_over(self._state.request_id, not update.HasField("error"))

    def on_connection_lost(self, worker_id: str, message: str) -> None:
        del worker_id, message
        self._on_over(self._state.request_id, False)

    def commands_to_resume(self, worker_id: str) -> list[worker_pb2.ServeRequest]:
        """One that has it already does not begin again."""
        del worker_id
        return [self.command]


def order_id_of(request_id: str) -> str:
    """Another one than that of any request: they differ in the first digit."""
    return f"{int(request_id[0], 16) ^ 8:x}{request_id[1:]}"


def order_command(order_id: str, command: worker_pb2.ServeRequest) -> worker_pb2.ServeRequest:
    """The Start of a prompt's full pages, without its last token, of the request's own Start."""
    order = worker_pb2.ServeRequest()
    order.CopyFrom(command)
    start = order.start
    start.request_id = order_id
    num_tokens = (len(start.prompt_token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    del start.prompt_token_ids[num_tokens:]
    for field in ("output_token_ids", "stop_token_ids", "min_tokens", "keep_ms", "prefix_source", "prefix_is_expected"):
        start.ClearField(field)
    start.sampling.CopyFrom(sampling_to_pb(_GREEDY))
    start.max_tokens = 1
    start.num_reserved_pages = num_pages_for(num_tokens + 1)
    return order
