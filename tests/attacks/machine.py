"""What other users of the machine try, and who reaches NATS; and where secrets could be read."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
from nats.aio.client import Client
from nats.errors import Error as NatsError
from tests.attacks.attempt import Attempt, Scene, Trying

from weir.bus.nats import NatsBus
from weir.bus.nats_users import NATS_ROLES, NatsRole
from weir.bus.protocol import BusUnavailable
from weir.bus.subjects import Subjects
from weir.core.credentials import key_digest, key_metadata
from weir.kv.arena.segment import segment_path
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

_USERS = "2 other users of the machine"
_NETWORK = "3 anybody inside the network"
_SECRETS = "5 secrets where others read"
_LOW = "6 low"
_NOBODY = 65_534
_TIMEOUT_S = 120.0
_PASSWORD = "s3cret-of-nats"
_AS_NOBODY = f"import os, socket; os.setgid({_NOBODY}); os.setuid({_NOBODY}); "


async def _as_nobody(code: str) -> str:
    """The error of a line of Python that another user runs, without what it says; OK if it has none."""
    command = [sys.executable, "-c", _AS_NOBODY + code]
    made = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    return "OK" if made.returncode == 0 else made.stderr.strip().splitlines()[-1].partition(":")[0]


def _connecting(role: str) -> Trying:
    async def connect(scene: Scene) -> str:
        path = scene.stack.processes(role)[0].address.removeprefix("unix:")
        return await _as_nobody(f"socket.socket(socket.AF_UNIX).connect({path!r})")

    return connect


def _reading(find: Callable[[Scene], Path]) -> Trying:
    async def read(scene: Scene) -> str:
        return await _as_nobody(f"open({str(find(scene))!r}, 'rb')")

    return read


async def _listing(scene: Scene) -> str:
    return await _as_nobody(f"os.listdir({str(scene.paths.folder)!r})")


async def _up(scene: Scene, instance: str, phrase: str, *flags: str, **environ: str) -> str:
    """What becomes of a second stack: `started`, `refused` with `phrase` in what it prints, or what it prints last."""
    command = [sys.executable, "-m", "weir.cli.main", "up", "--detach", "--instance", instance, *flags]
    variables = {**os.environ, "WEIR_RUNTIME_DIR": str(scene.stack.runtime_dir), **environ}
    made = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=variables
    )
    down = [sys.executable, "-m", "weir.cli.main", "down", "--instance", instance]
    await asyncio.to_thread(subprocess.run, down, capture_output=True, timeout=_TIMEOUT_S, env=variables)
    if made.returncode == 0:
        return "started"
    said = made.stdout + made.stderr
    if _PASSWORD in said:
        return "shows the password"
    return "refused" if phrase and phrase in said else f"ended otherwise: {said.strip()[-300:]!r}"


async def _nothing_planted(scene: Scene) -> str:
    """Otherwise no second stack might start here, whatever is planted."""
    return await _up(scene, f"{scene.stack.instance}c", "")


def _planted(*, is_link: bool) -> Trying:
    """Somebody else's file, or a link to it, where a stack's arena will be."""

    async def start(scene: Scene) -> str:
        instance = f"{scene.stack.instance}p"
        path, target = segment_path(instance), Path(f"/dev/shm/planted-{scene.stack.instance}")
        problem = "it is a symbolic link" if is_link else f"it belongs to user {_NOBODY}"
        planted = target if is_link else path
        planted.touch(0o666)
        planted.chmod(0o666)
        os.chown(planted, _NOBODY, _NOBODY)
        if is_link:
            path.symlink_to(target)
            os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
        try:
            outcome = await _up(scene, instance, f"{path} is not used as a segment: {problem}")
            read = planted.stat().st_size if planted.exists() else 0
            return outcome if not read else f"{outcome}, and {read} bytes lie in the file of another"
        finally:
            path.unlink(missing_ok=True)
            target.unlink(missing_ok=True)

    return start


async def _planted_folder(scene: Scene) -> str:
    instance = f"{scene.stack.instance}f"
    folder = scene.stack.runtime_dir / instance
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    os.chown(folder, _NOBODY, _NOBODY)
    return await _up(scene, instance, f"{folder.resolve()} belongs to another user ({_NOBODY})")


async def _planted_kernels(scene: Scene) -> str:
    """A folder of compiled code that everybody can write."""
    cache = scene.stack.runtime_dir / "cache"
    kernels = cache / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777)
    return await _up(scene, f"{scene.stack.instance}k", f"{kernels} has mode 0777", WEIR_CACHE=str(cache))


async def _nats_without_key(scene: Scene) -> str:
    try:
        bus = await NatsBus.connect(_nats_url(scene), name="nobody", timeout_s=2.0)
    except BusUnavailable as error:
        return "no credentials" if "credentials" in str(error) else str(error)
    await bus.close()
    return "connected"


def _saying(role: NatsRole, subject: Callable[[Subjects], str]) -> Trying:
    """What the server says to a role that says what is another's."""

    async def say(scene: Scene) -> str:
        errors: list[str] = []

        async def note(error: Exception) -> None:
            errors.append(str(error).lower())

        client = Client()
        await client.connect(_nats_url(scene), nkeys_seed=scene.stack.nats_seed_file(role), error_cb=note)
        with contextlib.suppress(NatsError):
            await client.publish(subject(Subjects(scene.stack.instance)), b"{}")
        await client.flush()
        await asyncio.sleep(0.2)
        await client.close()
        return "permissions violation" if any("permissions violation" in error for error in errors) else "taken"

    return say


def _hearing(role: NatsRole, subject: Callable[[Subjects], str]) -> Trying:
    async def hear(scene: Scene) -> str:
        errors: list[str] = []

        async def note(error: Exception) -> None:
            errors.append(str(error).lower())

        client = Client()
        await client.connect(_nats_url(scene), nkeys_seed=scene.stack.nats_seed_file(role), error_cb=note)
        await client.subscribe(subject(Subjects(scene.stack.instance)))
        await client.flush()
        await asyncio.sleep(0.2)
        await client.close()
        return "permissions violation" if any("permissions violation" in error for error in errors) else "heard"

    return hear


async def _secrets_in_the_open(scene: Scene) -> str:
    """Keys of tenants, of operators and of NATS in command lines, environments, logs and state. Those of tenants are
    shown where they are not let in, which is logged: of each key the first digits of its digest have to be there.
    """
    keys = {scene.attacker_key, scene.other_key, scene.paths.try_read_admin_key() or ""}
    for key in (scene.attacker_key, scene.other_key):
        if _list_workers(scene, key) != "PERMISSION_DENIED":
            return "a tenant is an operator"
    secrets = keys | {Path(scene.stack.nats_seed_file(role)).read_text().strip() for role in NATS_ROLES}
    texts = [path.read_bytes() for path in scene.paths.logs.iterdir()] + [scene.paths.state_file.read_bytes()]
    for process in scene.stack.processes():
        texts += [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    if not all(any(key_digest(key).hex()[:8].encode() in text for text in texts) for key in keys):
        return "not all keys came by a log"
    return "found" if any(secret.encode() in text for secret in secrets for text in texts) else "nowhere"


def _list_workers(scene: Scene, key: str) -> str:
    """The status of an operator's call at the scheduler."""
    with grpc.insecure_channel(scene.stack.processes("scheduler")[0].address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        try:
            stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S, metadata=key_metadata(key))
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


async def _credentials_in_a_url(scene: Scene) -> str:
    """The port is dead: what is tried is whether the error that names the URL shows what is in it."""
    said = "--nats nats://***@127.0.0.1:1: no server answers there"
    outcome = await _up(scene, f"{scene.stack.instance}n", said, "--nats", f"nats://user:{_PASSWORD}@127.0.0.1:1")
    return "masked" if outcome == "refused" else outcome


def _nats_url(scene: Scene) -> str:
    return f"nats://{scene.stack.processes('nats')[0].address}"


def _role_file(role: NatsRole) -> Callable[[Scene], Path]:
    return lambda scene: Path(scene.stack.nats_seed_file(role))


ATTEMPTS = (
    Attempt(_USERS, "read the arena", "PermissionError", _reading(lambda scene: scene.segment), needs_root=True),
    Attempt(_USERS, "list the instance's folder", "PermissionError", _listing, needs_root=True),
    Attempt(
        _USERS,
        "read the operator's key",
        "PermissionError",
        _reading(lambda scene: scene.paths.admin_key_file),
        needs_root=True,
    ),
    Attempt(_USERS, "read a key of NATS", "PermissionError", _reading(_role_file("scheduler")), needs_root=True),
    *(
        Attempt(_USERS, f"call a {role}", "PermissionError", _connecting(role), needs_root=True)
        for role in ("scheduler", "prefill", "decode", "transfer")
    ),
    Attempt(_USERS, "to compare: nothing planted", "started", _nothing_planted),
    Attempt(_USERS, "a file at the arena's place", "refused", _planted(is_link=False), needs_root=True),
    Attempt(_USERS, "a link at the arena's place", "refused", _planted(is_link=True), needs_root=True),
    Attempt(_USERS, "a folder at the instance's place", "refused", _planted_folder, needs_root=True),
    Attempt(_NETWORK, "NATS without a key", "no credentials", _nats_without_key),
    Attempt(
        _NETWORK, "NATS: a worker grants", "permissions violation", _saying("worker", lambda said: said.grant("g-1"))
    ),
    Attempt(
        _NETWORK,
        "NATS: a worker writes rules",
        "permissions violation",
        _saying("worker", lambda said: f"$KV.{said.configuration_bucket}.access"),
    ),
    Attempt(
        _NETWORK,
        "NATS: a gateway writes rules",
        "permissions violation",
        _saying("gateway", lambda said: f"$KV.{said.configuration_bucket}.access"),
    ),
    Attempt(
        _NETWORK, "NATS: a worker hears requests", "permissions violation", _hearing("worker", lambda said: said.submit)
    ),
    Attempt(_SECRETS, "keys in command lines, environments, logs, state", "nowhere", _secrets_in_the_open),
    Attempt(_SECRETS, "a password in an error that names NATS by its URL", "masked", _credentials_in_a_url),
    Attempt(_LOW, "compiled kernels that everybody can write", "refused", _planted_kernels),
)
