"""A real Prometheus that scrapes what it is told, from Debian's package (`make prometheus`) or the PATH."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from weir.core.addresses import free_port
from weir.testing.stack import wait_until

ROOT = Path(__file__).parents[2]
METRICS = ROOT / "compose" / "metrics"
RULES = METRICS / "rules"
_UNPACKED = ROOT / "build" / "prometheus" / "usr" / "bin"


def tool(name: str) -> str:
    """Its path. Skips the test where there is none, unless that is an error here."""
    found = shutil.which(name, path=os.pathsep.join((str(_UNPACKED), os.environ.get("PATH", ""))))
    if found is not None:
        return found
    reason = f"{name} is not here: `make prometheus` unpacks Debian's package into build/prometheus"
    if os.environ.get("WEIR_TESTS_NEED_PROMETHEUS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class PrometheusServer:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant. Raises ValueError with what Prometheus finds wrong with the expression."""
        answer = self._client.post("/api/v1/query", data={"query": expression}).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        result = answer["data"]["result"]
        return list(result) if answer["data"]["resultType"] == "vector" else [{"value": result}]

    def get(self, path: str, **parameters: str) -> Any:
        """What the API has there."""
        answer = self._client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def close(self) -> None:
        self._client.close()


def config_text(jobs: dict[str, Sequence[str]], rules: Sequence[Path]) -> str:
    """`jobs`: name -> targets, HOST:PORT."""
    lines = ["global: {scrape_interval: 2s, evaluation_interval: 2s}", f"rule_files: {list(map(str, rules))}"]
    lines.append("scrape_configs:")
    for name, targets in jobs.items():
        lines += [f"  - job_name: {name}", f"    static_configs: [{{targets: {list(targets)}}}]"]
    return "\n".join(lines) + "\n"


@contextmanager
def running(folder: Path, jobs: dict[str, Sequence[str]], rules: Sequence[Path]) -> Iterator[PrometheusServer]:
    """Ended, and its folder free, when the block ends."""
    config = folder / "prometheus.yml"
    config.write_text(config_text(jobs, rules))
    address = f"127.0.0.1:{free_port()}"
    command = [tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={address}", "--enable-feature=exemplar-storage", "--log.level=warn"]
    command += ["--web.console.templates=none", "--web.console.libraries=none"]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        server = PrometheusServer(f"http://{address}")
        try:
            wait_until(server.is_ready, timeout_s=60, what="Prometheus is ready")
            yield server
        finally:
            server.close()
            process.kill()
