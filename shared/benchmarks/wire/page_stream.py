"""Pages of one memory pulled into another, beside a twin that does nothing but move as many bytes over TCP.

    python -m benchmarks.wire.page_stream --serve 10.0.0.1:7000        # at one host
    python -m benchmarks.wire.page_stream --pull 10.0.0.1:7000         # at the other

The twin gathers the same pages into one stream and scatters them into the same places: no frames, no checksums. In
turns; prints a line for each: GB/s of all rounds, and the processor time of both ends a GB. `--here`: both on this
machine. With `--certs FOLDER` at both ends, a host's as `weir up --hosts` makes it, page streams with TLS too.
"""

import argparse
import itertools
import json
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from weir.core.life import Attempt
from weir.kv.memory.page_access import InPlace
from weir.kv.movers.listener import PageStreamListener
from weir.kv.movers.pipes import PagePipe, TcpPipe, TlsPipe, connect_tcp, connect_tls
from weir.kv.movers.pull import WantedPage
from weir.kv.movers.source import PageSource
from weir.kv.movers.stream_pull import PagePull, PullHello, PullLimits
from weir.rpc.tls.certificates import Certificate
from weir.rpc.tls.page_streams import client_context, server_context
from weir.runtime.stack.credentials import HostCredentials

_IDLE_S = 10.0
_HELLO = PullHello(b"benchmark-stream", Attempt(), b"benchmark-ticket")
_AT_A_TIME = 16
Connect = Callable[[float], PagePipe]
"""Within so many seconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one round."""

    took_s: float
    puller_cpu_s: float
    source_cpu_s: float


def _certificate(folder: Path) -> Certificate:
    return HostCredentials(folder).certificate("transfer").load()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory(num_pages: int, page_bytes: int) -> list[memoryview]:
    """Every page touched."""
    pages = np.ones((num_pages, page_bytes), np.uint8)
    pages[:, ::4096] = np.arange(num_pages, dtype=np.uint8)[:, None]
    return [page.data for page in pages]


def _serve(host: str, port: int, num_pages: int, page_bytes: int, certificate: Certificate | None) -> None:
    """Page streams at `port`, the twin's at the next one, questions at the one after it, page streams with TLS at the
    fourth; until it is killed."""
    pages = _memory(num_pages, page_bytes)
    source = PageSource(pages.__getitem__, lambda _: 1)
    source.offer(_HELLO.transfer_id, _HELLO.attempt, _HELLO.ticket)
    offered = source.append(_HELLO.transfer_id, range(num_pages))
    PageStreamListener(source, host, port, idle_s=_IDLE_S)
    if certificate is not None:
        PageStreamListener(source, host, port + 3, _tls_opener(certificate), idle_s=_IDLE_S)
    told = json.dumps([page.checksum for page in offered]).encode() + b"\n"
    for offset, answer in ((1, _twin_sender(pages)), (2, _teller(told))):
        listening = socket.create_server((host, port + offset))
        threading.Thread(target=_accept, args=(listening, answer), daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()


def _tls_opener(certificate: Certificate) -> Callable[[socket.socket, float], PagePipe]:
    def open_pipe(connection: socket.socket, idle_s: float) -> PagePipe:
        return TlsPipe(server_context(certificate).wrap_socket(connection, server_side=True), idle_s)

    return open_pipe


def _tls_connector(host: str, port: int, certificate: Certificate) -> Connect:
    assert certificate.identity is not None
    name = certificate.identity.dns_name
    return lambda timeout_s: connect_tls(host, port, timeout_s, _IDLE_S, client_context(certificate), name)


def _accept(listening: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def _twin_sender(pages: Sequence[memoryview]) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        with connection:
            pipe = TcpPipe(connection, _IDLE_S)
            for first in range(0, len(pages), _AT_A_TIME):
                pipe.send(pages[first : first + _AT_A_TIME])

    return send


def _teller(told: bytes) -> Callable[[socket.socket], None]:
    """The offer, and the processor time that this process has used; whatever is asked."""

    def tell(connection: socket.socket) -> None:
        with connection:
            connection.sendall(told + json.dumps(_cpu_s()).encode() + b"\n")

    return tell


def _ask(host: str, port: int) -> tuple[list[int], float]:
    with socket.create_connection((host, port + 2)) as connection, connection.makefile("rb") as lines:
        return json.loads(lines.readline()), json.loads(lines.readline())


def _pull_pages(connect: Connect, pages: Sequence[memoryview], checksums: Sequence[int], num_streams: int) -> None:
    limits = PullLimits(num_streams=num_streams)
    pull = PagePull(_HELLO, len(pages[0]), connect, limits, time.monotonic() + 120)
    pull.want([WantedPage(number, 1, checksums[number], InPlace(page)) for number, page in enumerate(pages)])
    pull.finish()


def _pull_twin(host: str, port: int, pages: Sequence[memoryview]) -> None:
    pipe = connect_tcp(host, port + 1, 10.0, _IDLE_S)
    for first in range(0, len(pages), _AT_A_TIME):
        pipe.receive(*pages[first : first + _AT_A_TIME])
    pipe.close()


def _measured(host: str, port: int, pull: Callable[[], None]) -> Measured:
    _, source_s = _ask(host, port)
    began_s, cpu_s = time.monotonic(), _cpu_s()
    pull()
    took_s, cpu_s = time.monotonic() - began_s, _cpu_s() - cpu_s
    return Measured(took_s, cpu_s, _ask(host, port)[1] - source_s)


def _pull(asked: argparse.Namespace, host: str, port: int) -> None:
    pages = _memory(asked.pages, asked.page_bytes)
    checksums, _ = _ask(host, port)
    kinds: dict[str, Callable[[], None]] = {"twin": lambda: _pull_twin(host, port, pages)}
    connects: dict[str, Connect] = {"": lambda timeout_s: connect_tcp(host, port, timeout_s, _IDLE_S)}
    if asked.certs is not None:
        connects[" with TLS"] = _tls_connector(host, port + 3, _certificate(asked.certs))
    for (how, connect), num_streams in itertools.product(connects.items(), asked.streams):
        name = f"page stream{how}, {num_streams} connections" if num_streams > 1 else f"page stream{how}"
        kinds[name] = partial(_pull_pages, connect, pages, checksums, num_streams)
    found: dict[str, list[Measured]] = {name: [] for name in kinds}
    for number in range(asked.rounds + 1):
        for name, pull in kinds.items():
            measured = _measured(host, port, pull)
            if number:  # the first warms both ends up
                found[name].append(measured)
    num_gb = asked.pages * asked.page_bytes / 1e9
    usual = statistics.median(one.took_s for one in found["twin"])
    print(
        "| | GB/s, median | lowest to highest | of the twin | CPU s a GB, puller | source |\n|---|---|---|---|---|---|"
    )
    for name, rounds in found.items():
        rates = sorted(num_gb / one.took_s for one in rounds)
        puller_s = statistics.median(one.puller_cpu_s for one in rounds) / num_gb
        source_s = statistics.median(one.source_cpu_s for one in rounds) / num_gb
        took = statistics.median(one.took_s for one in rounds)
        print(
            f"| {name} | {num_gb / took:.2f} | {rates[0]:.2f} to {rates[-1]:.2f} | {usual / took:.2f} "
            f"| {puller_s:.2f} | {source_s:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", metavar="HOST:PORT", help="until it is killed")
    where.add_argument("--pull", metavar="HOST:PORT", help="from who serves there")
    where.add_argument("--here", action="store_true", help="both, over the loopback interface")
    parser.add_argument("--certs", type=Path, help="folder with transfer.pem, transfer.key and ca.pem")
    parser.add_argument("--page-bytes", type=int, default=360 << 10, help="as SmolLM2-135M in bf16")
    parser.add_argument("--pages", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, action="append", help="connections of one pull; may be given again")
    asked = parser.parse_args()
    asked.streams = asked.streams or [PullLimits().num_streams]
    host, _, port = (asked.serve or asked.pull or "127.0.0.1:17000").rpartition(":")
    if asked.serve:
        certificate = None if asked.certs is None else _certificate(asked.certs)
        _serve(host, int(port), asked.pages, asked.page_bytes, certificate)
    elif asked.pull:
        _pull(asked, host, int(port))
    else:
        own = ["--serve", f"{host}:{port}", "--page-bytes", str(asked.page_bytes), "--pages", str(asked.pages)]
        own += ["--certs", str(asked.certs)] if asked.certs is not None else []
        command = [sys.executable, "-m", "benchmarks.wire.page_stream", *own]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as serving:
            try:
                assert serving.stdout is not None
                serving.stdout.readline()
                _pull(asked, host, int(port))
            finally:
                serving.kill()


if __name__ == "__main__":
    main()
