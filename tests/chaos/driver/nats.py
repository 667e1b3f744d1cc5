"""A NATS server that is started again whenever it ends, as a service manager would do."""

import socket
import subprocess
import threading
from pathlib import Path

from weir.bus.server import nats_server_command
from weir.core.addresses import free_port

_RESTART_DELAY_S = 0.25
_PROBE_TIMEOUT_S = 1.0
_END_TIMEOUT_S = 20.0


class KeptNats:
    """Runs from `start` to `close`, at one port, over one store."""

    def __init__(self, store: Path, log_path: Path) -> None:
        self.port = free_port()
        self._command = nats_server_command(self.port, store)
        self.log_path = log_path
        self._closing = threading.Event()
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, name="nats-keeper", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the latest process."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """It greets a new connection."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_PROBE_TIMEOUT_S) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def close(self) -> None:
        self._closing.set()
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._keeper.join(_END_TIMEOUT_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log_path.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._process.wait()
            if not self._closing.wait(_RESTART_DELAY_S):
                self._process = self._start()
