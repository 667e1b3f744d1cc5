"""A real Valkey or Redis server, of Debian's package (`make valkey`) or the PATH, which tests end, stop and fill."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from weir.core.addresses import free_port
from weir.testing.stack import wait_until

_UNPACKED = Path(__file__).parents[2] / "build" / "valkey" / "usr"
_NAMES = ("valkey-server", "redis-server")


def _program() -> str:
    """Its path. Skips the test where there is none, unless that is an error here."""
    path = os.pathsep.join((str(_UNPACKED / "bin"), os.environ.get("PATH", "")))
    found = next(filter(None, (shutil.which(name, path=path) for name in _NAMES)), None)
    if found is not None:
        return found
    reason = "no valkey-server is here: `make valkey` unpacks Debian's package into build/valkey"
    if os.environ.get("WEIR_TESTS_NEED_VALKEY") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _environment() -> Mapping[str, str]:
    """With the libraries that were unpacked beside it."""
    folders = [str(folder) for folder in sorted((_UNPACKED / "lib").glob("*-linux-gnu"))]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)} if folders else os.environ


class ValkeyServer:
    """One process after the other at one port, which keep nothing on a disk. `client` is the test's own."""

    def __init__(self, folder: Path, *flags: str, password: str = "", is_encrypted: bool = False) -> None:
        """`is_encrypted`: by the certificates that `flags` name; then its plain port is for the tests."""
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        if is_encrypted:
            encrypted_port = free_port()
            self.url = f"rediss://127.0.0.1:{encrypted_port}"
            flags = (*flags, "--tls-port", str(encrypted_port))
        asked = (*flags, "--requirepass", password) if password else flags
        self._command = [_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", *asked]
        self._running: subprocess.Popen[bytes] | None = None
        self.client = Redis(host="127.0.0.1", port=self.port, password=password or None, protocol=2)

    def start(self) -> None:
        with (self._folder / "valkey.log").open("ab") as log:
            self._running = subprocess.Popen(self._command, stdout=log, stderr=log, env=_environment())
        wait_until(self._answers, timeout_s=60, what="Valkey answers")

    def kill(self) -> None:
        assert self._running is not None
        self._running.kill()
        self._running.wait(60)

    def pause(self) -> None:
        """It answers nobody, and the kernel still takes connections for it."""
        assert self._running is not None
        self._running.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._running is not None
        self._running.send_signal(signal.SIGCONT)

    def pages(self) -> dict[str, bytes]:
        """What lies under the keys of pages, of whatever layout."""
        keys = [str(key, "ascii") for key in self.client.scan_iter("weir:page:*")]
        values = self.client.mget(keys) if keys else []
        return {key: value for key, value in zip(keys, values, strict=True) if isinstance(value, bytes)}

    def set(self, name: str, value: str) -> None:
        self.client.config_set(name, value)

    def close(self) -> None:
        self.client.close()
        if self._running is not None:
            self.kill()

    def _answers(self) -> bool:
        with suppress(RedisError):
            return bool(self.client.ping())
        return False


@contextmanager
def running(folder: Path, *flags: str, password: str = "", is_encrypted: bool = False) -> Iterator[ValkeyServer]:
    server = ValkeyServer(folder, *flags, password=password, is_encrypted=is_encrypted)
    try:
        server.start()
        yield server
    finally:
        server.close()
