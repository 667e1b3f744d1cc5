"""A stack of compose/, by the commands that its README gives."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine

from weir.core.addresses import free_port, is_port_free

ROOT = Path(__file__).parents[2]
_UP_TIMEOUT_S = 900
_DOWN_TIMEOUT_S = 300.0
_BUILD_TIMEOUT_S = 3600.0
WHOLE = "compose/compose.yaml"
_ARENA = {"ARENA_BYTES": "512MiB", "ARENA_VOLUME_SIZE": "768m"}


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ones of this machine, which other programs use too."""

    http: int
    grpc: int
    prometheus: int
    traces: int
    otlp: int
    grafana: int

    @classmethod
    def free(cls) -> "Ports":
        return cls(_free_pair(), _free_pair(), free_port(), free_port(), free_port(), free_port())

    @property
    def all(self) -> list[int]:
        return [self.http, self.http + 1, self.grpc, self.grpc + 1, self.prometheus, self.traces, self.otlp]

    def variables(self) -> dict[str, str]:
        """As the Compose file reads them."""
        return {
            "HTTP_PORT": f"{self.http}-{self.http + 1}",
            "GRPC_PORT": f"{self.grpc}-{self.grpc + 1}",
            "PROMETHEUS_PORT": str(self.prometheus),
            "JAEGER_PORT": str(self.traces),
            "OTLP_PORT": str(self.otlp),
            "GRAFANA_PORT": str(self.grafana),
        }


def _free_pair() -> int:
    """The first of two in a row."""
    while True:
        port = free_port()
        if is_port_free("127.0.0.1", port + 1):
            return port


@dataclass(frozen=True, slots=True)
class Container:
    """As Docker sees it; `pid` is of its first process, `address` on the stack's network."""

    name: str
    pid: int
    address: str
    health: str
    num_restarts: int
    published: Mapping[str, int]
    """Port inside, as "50051/tcp": port of this machine."""


class ComposeStack:
    """Brought up and down by Compose. `left_out`: services that are not started."""

    def __init__(
        self,
        engine: Engine,
        ports: Ports,
        files: Sequence[str] = (WHOLE,),
        environ: Mapping[str, str] | None = None,
        left_out: Sequence[str] = ("grafana",),
    ) -> None:
        self._engine = engine
        self.ports = ports
        self._files = [word for file in files for word in ("--file", file)]
        self._left_out = left_out
        # Every wheel is in the base image: nothing comes from PyTorch's index.
        self._environ = {"NUM_THREADS": "1", "TORCH_INDEX_URL": "", **_ARENA, **ports.variables(), **(environ or {})}

    @property
    def command(self) -> str:
        """As a user would write it, without what is to be done; of a file that was made for the run its name alone."""
        shown = (f"…/{Path(word).name}" if word.startswith("/") else word for word in self._files)
        return " ".join(["docker compose", *shown]).replace("--file", "-f")

    def compose(self, *arguments: str, timeout_s: float) -> str:
        command = ["docker", "compose", *self._files, *arguments]
        return self._engine.run(command, timeout_s=timeout_s, environ=self._environ, cwd=ROOT)

    def version(self) -> str:
        return self.compose("version", "--short", timeout_s=60).strip()

    def document(self) -> Any:
        """The file as Compose reads it."""
        return json.loads(self.compose("config", "--format", "json", timeout_s=60))

    def build(self) -> None:
        self.compose("build", timeout_s=_BUILD_TIMEOUT_S)

    def up(self) -> None:
        """All services but those left out, whose images Compose would want even where none of them is to run."""
        services = [name for name in self.document()["services"] if name not in self._left_out]
        wait = ("--wait", "--wait-timeout", str(_UP_TIMEOUT_S))
        self.compose("up", "-d", *wait, *services, timeout_s=_UP_TIMEOUT_S + 60)

    def down(self) -> None:
        self.compose("down", "-v", timeout_s=_DOWN_TIMEOUT_S)

    def containers(self, service: str = "") -> list[Container]:
        """Of one service, or all, by name; ended ones too."""
        names = self.compose("ps", "--all", "--quiet", *filter(None, [service]), timeout_s=60).split()
        if not names:
            return []
        return sorted(
            (_container(one) for one in json.loads(self._engine.docker("inspect", *names))), key=lambda one: one.name
        )

    def exec(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command, timeout_s=120)

    def run_image(self, *command: str, environ: Sequence[str] = ()) -> str:
        """What a container of Weir's image prints, alone."""
        variables = [word for variable in environ for word in ("--env", variable)]
        return self._engine.docker("run", "--rm", "--network", "none", *variables, "weir:local", *command)

    def docker(self, *arguments: str) -> str:
        return self._engine.docker(*arguments, timeout_s=_DOWN_TIMEOUT_S)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40", timeout_s=60)

    def kill_process(self, container: Container) -> None:
        """SIGKILL for its first process, which Docker does not take for a wish, as it does `docker kill`."""
        self._engine.kill_process(container.pid)

    def wait_replaced(self, killed: Container, service: str, timeout_s: float) -> float:
        """Seconds until the container runs again and is healthy. Raises TimeoutError."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            now = [one for one in self.containers(service) if one.name == killed.name]
            if now and now[0].num_restarts > killed.num_restarts and now[0].health == "healthy":
                return time.monotonic() - began_s
            time.sleep(0.5)
        raise TimeoutError(f"{killed.name} was not healthy again within {timeout_s} s: {self.containers(service)}")


def _container(found: Any) -> Container:
    networks = found["NetworkSettings"]["Networks"] or {}
    ports = found["NetworkSettings"]["Ports"] or {}
    state = found["State"]
    return Container(
        name=found["Name"].lstrip("/"),
        pid=state["Pid"],
        address=next((network["IPAddress"] for network in networks.values()), ""),
        health=state.get("Health", {}).get("Status", state["Status"]),
        num_restarts=found["RestartCount"],
        published={inside: int(outside[0]["HostPort"]) for inside, outside in ports.items() if outside},
    )
