"""`kill -9` of each kind of process while a request streams: what the request sees, and when the next is served."""

import threading
import time
from dataclasses import dataclass, field

import grpc
import httpx
from tests.containers.checks import ANSWER, Seen, Wrong, ask_http, leader
from tests.containers.stack import ComposeStack, Container

from weir.client import GenerateOptions, WeirClient
from weir.core.errors import WeirError

KINDS = ("decode", "prefill", "transfer", "scheduler", "nats", "gateway")
SERVED_AGAIN_S = 180.0
"""Bound of each; a machine with other work takes minutes where an idle one takes seconds."""
_STREAM_S = 300.0
_LONG = GenerateOptions(temperature=0, max_tokens=700, ignore_eos=True)
_LONG_PROMPT = "Once upon a time"


@dataclass
class Stream:
    """A long greedy request in a thread of its own."""

    address: str
    text: str = ""
    error: str = ""
    has_begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with WeirClient(self.address, timeout_s=_STREAM_S) as client:
                for chunk in client.generate(_LONG_PROMPT, _LONG):
                    self.text += chunk.text
                    self.has_begun.set()
        except (WeirError, grpc.RpcError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.has_begun.set()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Raises Wrong where it does not end."""
        self._thread.join(_STREAM_S + 30)
        if self._thread.is_alive():
            raise Wrong(f"a stream did not end within {_STREAM_S} s; so far {self.text!r}")


class Killer:
    """Knows the undisturbed text of the long request."""

    def __init__(self, stack: ComposeStack) -> None:
        self._stack = stack
        self._expected = self._stream_through(1)
        self._expected.wait()
        if self._expected.error:
            raise Wrong(f"an undisturbed stream failed: {self._expected.error}")

    def _stream_through(self, gateway: int) -> Stream:
        return Stream(f"127.0.0.1:{self._stack.ports.grpc + gateway}")

    def kill(self, kind: str) -> Seen:
        """Raises Wrong or TimeoutError."""
        victim = self._victim(kind)
        stream = self._stream_through(0)
        if not stream.has_begun.wait(_STREAM_S) or stream.error:
            raise Wrong(f"no stream to disturb: {stream.error}")
        self._stack.kill_process(victim)
        began_s = time.monotonic()
        if not stream.is_running and not stream.error:
            raise Wrong("the stream had ended before the kill: it is too short for this machine")
        self._wait_served(began_s)
        served_s = time.monotonic() - began_s
        self._stack.wait_replaced(victim, kind, SERVED_AGAIN_S)
        healthy_s = time.monotonic() - began_s
        stream.wait()
        fate = self._fate(kind, stream)
        return Seen(
            f"`kill -9` {'the leading scheduler' if kind == 'scheduler' else kind} during a stream",
            f"the stream {fate}; a new request was served after {served_s:.1f} s, "
            f"the container healthy after {healthy_s:.1f} s",
        )

    def _fate(self, kind: str, stream: Stream) -> str:
        if kind == "gateway":
            if not stream.error:
                raise Wrong("the stream outlived its gateway: another process was killed")
            return "broke with its gateway"
        if stream.error or stream.text != self._expected.text:
            raise Wrong(f"after kill -9 of {kind} the stream has {stream.text!r}, {stream.error or 'and no error'}")
        return "went on to the same text"

    def _victim(self, kind: str) -> Container:
        if kind == "scheduler":
            found = leader(self._stack)
            if found is None:
                raise Wrong("not exactly one scheduler leads")
            return found
        containers = self._stack.containers(kind)
        if kind == "gateway":
            return next(one for one in containers if one.published.get("50051/tcp") == self._stack.ports.grpc)
        return containers[0]

    def _wait_served(self, began_s: float) -> None:
        """Through both gateways."""
        ports = [self._stack.ports.http, self._stack.ports.http + 1]
        said = ""
        while ports:
            left_s = SERVED_AGAIN_S - (time.monotonic() - began_s)
            if left_s < 0:
                raise TimeoutError(f"no request was served within {SERVED_AGAIN_S} s: {said}")
            try:
                text = ask_http(ports[0], timeout_s=left_s)
            except httpx.HTTPError as error:
                said = f"{error}"
                time.sleep(0.25)
                continue
            if text != ANSWER:
                raise Wrong(f"not {ANSWER!r} but {text!r}")
            ports.pop(0)
