"""A dockerd of its own, of which nothing outlives the process that started it.

It is the first process of namespaces of processes and mounts, so that whatever ends it ends every container and frees
every mount, also where this process is killed. It writes no rules for packets and makes no bridge for all: a network of
Compose has its own, and published ports go through Docker's proxy. Containers reach no other network, and need none.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.containers.packages import Tools, compose_program

from weir.testing.stack import wait_until

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_CPU_SHARES = 8 * 1024
COMMAND_TIMEOUT_S = 300.0


class CommandFailed(Exception):
    """A program ended with an error; carries the end of what it said."""


class Engine:
    """Runs while it is entered. `folder` is for this run and goes with it, `data` keeps images for the next."""

    def __init__(self, tools: Tools, folder: Path, data: Path) -> None:
        self.folder = folder
        self.data = data
        self.cgroup = folder.name
        self._environ = {
            **tools.environment(),
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(folder / "config"),
            # The classic builder: BuildKit would want an image of its own from a registry.
            "DOCKER_BUILDKIT": "0",
        }
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        plugins = self.folder / "config" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(compose_program())
        self._start()
        try:
            wait_until(self._answers, timeout_s=_START_TIMEOUT_S, what=f"dockerd answers:\n{self.log_end()}")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        settings = {
            # Without the right to raise limits a container gets none above those of dockerd itself.
            "default-ulimits": {"nofile": {"Name": "nofile", "Soft": 4096, "Hard": 4096}},
            "cgroup-parent": f"/{self.cgroup}",
            "bridge": "none",
            "iptables": False,
            "ip6tables": False,
            "ip-forward": False,
        }
        config = self.folder / "dockerd.json"
        config.write_text(json.dumps(settings))
        self.data.mkdir(parents=True, exist_ok=True)
        command = ["setpriv", "--pdeathsig", "KILL"]
        command += ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command += ["dockerd", "--config-file", str(config), "--data-root", str(self.data)]
        command += ["--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "dockerd.pid")]
        command += ["--host", self._environ["DOCKER_HOST"], "--oom-score-adjust", "0"]
        self._share_processors()
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C is for this process, which ends the containers in order.
            self._holder = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _share_processors(self) -> None:
        """All containers together weigh what their processes would beside those of a busy machine, not as one."""
        controller = Path("/sys/fs/cgroup/cpu")
        if controller.is_dir():  # cgroups of version 1
            group = controller / self.cgroup
            group.mkdir()
            (group / "cpu.shares").write_text(str(_CPU_SHARES))

    @property
    def _log(self) -> Path:
        return self.folder / "dockerd.log"

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])

    def _answers(self) -> bool:
        assert self._holder is not None
        if self._holder.poll() is not None:
            raise CommandFailed(f"dockerd has ended:\n{self.log_end()}")
        try:
            self.docker("version", timeout_s=10)
        except (CommandFailed, subprocess.TimeoutExpired):
            return False
        return True

    def _first_pid(self) -> int:
        """dockerd's, as this process sees it."""
        assert self._holder is not None
        # setpriv and unshare replaced each other: the child of that process is dockerd.
        pid = self._holder.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def docker(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What the program prints. Raises CommandFailed."""
        return self.run(["docker", *arguments], timeout_s=timeout_s)

    def version(self) -> str:
        return self.docker("version", "--format", "{{.Server.Version}}").strip()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environ: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """Runs a program that finds this engine. Raises CommandFailed, or subprocess.TimeoutExpired."""
        with subprocess.Popen(
            command,
            env=self._environ | (environ or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                printed, said = process.communicate(timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # `docker compose` is a program that docker starts
                raise
        if process.returncode != 0:
            end = "\n".join((printed + said).splitlines()[-30:])
            raise CommandFailed(f"{' '.join(command)} ended with {process.returncode}:\n{end}")
        return printed

    def load_rootfs(self, rootfs: Path, tag: str) -> None:
        """Makes an image of a folder."""
        pipe = 'tar --directory "$1" --create . | docker import - "$2"'
        self.run(["sh", "-c", pipe, "sh", str(rootfs), tag], timeout_s=600)

    def sweep(self) -> None:
        """Removes all containers, volumes and networks, however a run has ended; images stay."""
        for listed, remove in (
            (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
            (("volume", "ls", "--quiet"), ("volume", "rm", "--force")),
            (("network", "ls", "--filter", "type=custom", "--quiet"), ("network", "rm")),
        ):
            if names := self.docker(*listed).split():
                self.docker(*remove, *names)

    def kill_process(self, pid: int) -> None:
        """SIGKILL for a process by the pid that Docker knows it by."""
        command = ["nsenter", "--target", str(self._first_pid()), "--pid", "--", "sh", "-c", f"kill -9 {pid}"]
        self.run(command, timeout_s=30)

    def stop(self) -> None:
        """Ends dockerd, and with it whatever it has left. Does nothing a second time."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        try:
            pid = holder.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGTERM)
            holder.wait(_STOP_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            pass  # it is killed below
        finally:
            holder.kill()
            holder.wait(10)
            self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """Of containers that were killed with their engine; the kernel needs a moment until they are empty."""
        deadline = time.monotonic() + 10
        while (left := cgroups(self.cgroup)) and time.monotonic() < deadline:
            for path in sorted(left, key=lambda one: len(one.parts), reverse=True):
                try:
                    path.rmdir()
                except OSError:
                    time.sleep(0.1)


def cgroups(name: str) -> list[Path]:
    """All that are called so, and those below them."""
    found = []
    root = Path("/sys/fs/cgroup")
    for top in (root, *(path for path in root.iterdir() if path.is_dir())):
        if (top / name).is_dir():
            found += [path for path in (top / name).rglob("*") if path.is_dir()] + [top / name]
    return found
