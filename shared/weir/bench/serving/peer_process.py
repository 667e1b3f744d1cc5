"""llama.cpp's server as a process of a benchmark."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import httpx

_READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2


class LlamaServer:
    """A context manager that gives the server's base URL; every slot holds `max_context_tokens`."""

    def __init__(self, binary: str, model_path: Path, *, num_slots: int, max_context_tokens: int) -> None:
        found = shutil.which(binary)
        if found is None:
            raise ValueError(f"--peer-binary {binary!r}: no such program; llama.cpp builds it")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base_url = f"http://127.0.0.1:{port}"
        # a slot takes a little more than its request's tokens
        context = num_slots * (max_context_tokens + 64)
        self._command = [found, "-m", str(model_path), "-t", str(os.cpu_count() or 1), "--parallel", str(num_slots)]
        self._command += ["-c", str(context), "--port", str(port), "--no-webui"]
        self._environ = os.environ | {"LD_LIBRARY_PATH": str(Path(found).resolve().parent)}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            self._command, env=self._environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self._base_url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_ready(self) -> None:
        assert self._process is not None, "called after the start"
        ends_at_s = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < ends_at_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended with {self._process.returncode}: {' '.join(self._command)}")
            try:
                if httpx.get(f"{self._base_url}/health", timeout=1.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        raise RuntimeError(f"not ready within {_READY_TIMEOUT_S:.0f} s: {' '.join(self._command)}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
