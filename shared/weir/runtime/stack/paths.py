"""Where an instance keeps its files: one folder, for this user alone."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from weir.bus.nats_users import NATS_ROLES, NatsRole, make_seed, public_key, server_config
from weir.bus.subjects import Subjects
from weir.core.addresses import UNIX
from weir.core.credentials import key_digest, make_key
from weir.core.errors import WeirError
from weir.core.process import ProcessIdentity, own_identity
from weir.runtime.address import SOCKET_SUFFIX, UNFINISHED_SOCKETS
from weir.runtime.private_folder import make_own_folder, make_private_folder

_STATE_NAME = "state.json"


class InstanceBusy(WeirError):
    """Another supervisor holds the instance."""


@dataclass(frozen=True, slots=True)
class InstancePaths:
    """Names inside `<runtime folder>/<instance>`."""

    folder: Path

    @property
    def state_file(self) -> Path:
        return self.folder / _STATE_NAME

    def arena_socket(self, index: int = 0) -> Path:
        """Of a transfer service. What it shares with its workers lies beside it, so each but the first has a folder."""
        return (self.folder / f"arena-{index}" if index else self.folder) / "arena.sock"

    @property
    def sockets(self) -> str:
        """What a service listens on that is for processes of this user alone: a new socket for each start."""
        return f"{UNIX}{self.folder}/"

    @property
    def control_socket(self) -> Path:
        """Where the supervisor is asked for other models."""
        return self.folder / "control.sock"

    @property
    def models_file(self) -> Path:
        """The models that gateways serve, which follow it."""
        return self.folder / "models.toml"

    @property
    def admin_key_file(self) -> Path:
        return self.folder / "admin.key"

    @property
    def nats_config_file(self) -> Path:
        """Who may connect to the stack's NATS."""
        return self.folder / "nats.conf"

    def nats_seed_file(self, role: NatsRole) -> Path:
        return self._nats_keys / role

    @property
    def _nats_keys(self) -> Path:
        return self.folder / "nats-keys"

    @property
    def nats_store(self) -> Path:
        return self.folder / "nats"

    @property
    def supervisor_log(self) -> Path:
        return self.log_file("supervisor")

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def changes_file(self, name: str) -> Path:
        """What operators changed through this process."""
        return self.logs / f"changes-{name}.jsonl"

    def ready_file(self, name: str) -> Path:
        return self.folder / "ready" / f"{name}.json"

    @property
    def _lock_file(self) -> Path:
        return self.folder / "lock"

    def make(self) -> None:
        """Makes the folders, with mode 0700. Raises UnsafeFolder if one is not this user's alone, or cannot be made."""
        make_own_folder(self.folder.parent)
        for folder in (self.folder, self.logs, self.folder / "ready"):
            make_private_folder(folder)

    def make_arena_folder(self, index: int) -> None:
        """Raises UnsafeFolder."""
        make_private_folder(self.arena_socket(index).parent)

    def make_admin_key(self) -> bytes:
        """A new key, for this user's commands: whoever may read it could stop the stack as well. Returns its digest."""
        key = make_key()
        self.keep_admin_key(key)
        return key_digest(key)

    def keep_admin_key(self, key: str) -> None:
        """One that is known elsewhere too."""
        _write_secret(self.admin_key_file, key)

    def make_nats_keys(self) -> None:
        """New ones, and the server's configuration that knows them. Raises UnsafeFolder."""
        make_private_folder(self._nats_keys)
        seeds = {role: make_seed() for role in NATS_ROLES}
        for role, seed in seeds.items():
            _write_secret(self.nats_seed_file(role), seed)
        self.write_nats_config({role: public_key(seed) for role, seed in seeds.items()})

    def write_nats_config(
        self, public_keys: Mapping[NatsRole, str], *, cert_file: str = "", key_file: str = ""
    ) -> None:
        """Of a server that knows these, and shows this certificate."""
        subjects = Subjects(self.folder.name)
        text = server_config(public_keys, subjects, cert_file=cert_file, key_file=key_file)
        self.nats_config_file.write_text(text)

    def try_read_admin_key(self) -> str | None:
        """None: there is none, or it is another user's."""
        try:
            return self.admin_key_file.read_text()
        except (FileNotFoundError, PermissionError):
            return None

    def remove_volatile(self) -> None:
        """Removes all but the logs and the lock: what a start would trip over and what a stop must not leave."""
        sockets = (*self.folder.glob(f"*{SOCKET_SUFFIX}"), *self.folder.glob(UNFINISHED_SOCKETS))
        for path in (*sockets, self.models_file, self.nats_config_file):
            path.unlink(missing_ok=True)
        for folder in (self.folder / "ready", self.nats_store, self._nats_keys, *self.folder.glob("arena-*")):
            shutil.rmtree(folder, ignore_errors=True)
        self.admin_key_file.unlink(missing_ok=True)
        self.state_file.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the instance: one supervisor, or one clean-up, at a time. Raises InstanceBusy.

        The kernel gives the lock back when the process ends, however it ends.
        """
        self.make()
        with self._lock_file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InstanceBusy(
                    f"instance {self.folder.name!r} is already running; see `weir status --instance "
                    f"{self.folder.name}`, or choose other ports"
                ) from error
            lock.truncate(0)  # whoever is named in it held the lock before, and is gone
            yield

    def name_supervisor(self) -> None:
        """Writes into the lock that this process, which holds it, is the instance's supervisor.

        Earlier than the state file can say so: `weir down` must find a supervisor that has just begun.
        """
        self._lock_file.write_text(json.dumps(asdict(own_identity())))

    def try_find_supervisor(self) -> ProcessIdentity | None:
        """The supervisor that was named last: the caller checks whether that process still runs."""
        try:
            return ProcessIdentity(**json.loads(self._lock_file.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def _write_secret(path: Path, secret: str) -> None:
    """For this user alone, in the place of what was there."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)


def find_instances(runtime_dir: Path) -> list[str]:
    """Names of the instances that run, or that were left by a supervisor that was killed."""
    return sorted(path.parent.name for path in runtime_dir.glob(f"*/{_STATE_NAME}"))
