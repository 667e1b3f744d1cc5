"""Processes that are forks of a fork server, and what they are once it is gone."""

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.services import kill_all
from tests.unit.runtime.stacks import fake_spec, is_alive, wait_until

from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.plan import ProcessSpec
from weir.runtime.stack.starter import ForkedProcess, ProcessStarter, StartedProcess
from weir.runtime.stack.supervised import open_for_child

_ROLE = """
import json, os, signal, sys
import role_library

def prepare_for(words, environ):
    import model_library
    model_library.IMPORTED_FOR.append([words, environ["OWN"], os.getpid()])

def main():
    import model_library
    facts = {
        "imported_for": model_library.IMPORTED_FOR,
        "words": sys.argv[1:],
        "session": os.getsid(0),
        "loaded_by": role_library.LOADED_BY,
        "of_all": os.environ["OF_ALL"],
        "own": os.environ.get("OWN", ""),
        "has_commands_own": "WEIR_TLS_KEY" in os.environ,
    }
    print(json.dumps(facts), flush=True)
    print("an error line", file=sys.stderr)
    if sys.argv[1] == "wait":
        signal.pause()
    sys.exit(int(sys.argv[1]))

if __name__ == "__main__":
    main()
"""


def words_of(pid: int) -> list[str]:
    """As `ps` shows them."""
    return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def environment_of(pid: int) -> bytes:
    """As other processes see it."""
    return Path(f"/proc/{pid}/environ").read_bytes()


class Role:
    """A package `role_x` that can be run as a module, and the processes that have run it."""

    def __init__(self, folder: Path, name: str = "role_x", text: str = _ROLE) -> None:
        self._paths = InstancePaths(folder / "run")
        self._paths.make()
        self.module = name
        package = folder / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(text)
        (folder / "role_library.py").write_text("import os\nLOADED_BY = os.getpid()\n")
        (folder / "model_library.py").write_text("IMPORTED_FOR = []\n")
        path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
        self.environ = {**os.environ, "PYTHONPATH": path, "OF_ALL": "yes", "WEIR_TLS_KEY": "/operator.key"}

    def spec(self, *words: str, environ: Mapping[str, str] | None = None) -> ProcessSpec:
        spec = fake_spec(self._paths, "decode-0")
        return replace(spec, command=(sys.executable, "-m", self.module, *words), environ=environ or {})

    def said(self, spec: ProcessSpec) -> list[str]:
        return spec.log_path.read_text().splitlines()

    def facts(self, spec: ProcessSpec) -> dict[str, Any]:
        wait_until(lambda: spec.log_path.exists() and len(self.said(spec)) >= 2)
        found: dict[str, Any] = json.loads(self.said(spec)[0])
        return found


async def started(starter: ProcessStarter, spec: ProcessSpec) -> StartedProcess:
    log = open_for_child(spec.log_path)
    try:
        return await starter.start(spec, log)
    finally:
        os.close(log)


async def ended(process: StartedProcess) -> int:
    return await asyncio.wait_for(process.wait(), 20)


async def test_a_fork_is_what_the_command_would_have_started(tmp_path: Path) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("wait", "a b", environ={"OWN": "nats://x:y@z"})
    async with starter.forking([spec]):
        process = await started(starter, spec)
        facts = role.facts(spec)
    loaded_by = facts.pop("loaded_by")
    assert facts.pop("imported_for") == [[["wait", "a b"], "nats://x:y@z", loaded_by]]
    assert facts == {
        "words": ["wait", "a b"],
        "session": process.pid,
        "of_all": "yes",
        "own": "nats://x:y@z",
        "has_commands_own": False,
    }
    assert parent_of(process.pid) == os.getpid()
    assert loaded_by != process.pid, "imported by the fork server, once for all"
    assert words_of(process.pid) == [*spec.command]
    assert b"nats://x:y@z" not in environment_of(process.pid)
    process.kill()
    assert await ended(process) == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 3])
async def test_its_end_is_seen_while_there_is_a_fork_server_and_later(tmp_path: Path, code: int) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec(str(code))
    async with starter.forking([spec]):
        first = await started(starter, spec)
        assert await ended(first) == first.returncode == code
        later = await started(starter, role.spec("wait"))
    assert later.returncode is None
    later.send_signal(signal.SIGTERM)
    assert await ended(later) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        later.send_signal(signal.SIGTERM)


async def test_without_a_fork_server_a_process_imports_for_itself(tmp_path: Path) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("0")
    async with starter.forking([spec]):
        pass
    process = await started(starter, spec)
    assert await ended(process) == 0
    assert not isinstance(process, ForkedProcess)
    assert role.facts(spec)["loaded_by"] == process.pid


async def test_other_programs_are_started_beside_a_fork_server(tmp_path: Path) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("0")
    async with starter.forking([spec]):
        process = await started(starter, replace(spec, command=("sh", "-c", "echo $OF_ALL; exit 4")))
        assert await ended(process) == 4
    assert role.said(spec) == ["yes"]


async def test_a_module_that_cannot_be_imported_says_so_in_its_own_log(tmp_path: Path) -> None:
    role = Role(tmp_path, text="import what_is_not_there\n")
    starter, spec = ProcessStarter(role.environ), role.spec("0")
    async with starter.forking([spec]):
        assert await ended(await started(starter, spec)) == 1
    assert role.said(spec)[-1] == "ModuleNotFoundError: No module named 'what_is_not_there'"


async def test_nothing_is_left_of_the_fork_server_and_no_orphans_are_taken_in(tmp_path: Path) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("0")
    async with starter.forking([spec]):
        process = await started(starter, spec)
        server = role.facts(spec)["loaded_by"]
        assert is_alive(server)
        await ended(process)
    assert not is_alive(server)
    told_late = "sh -c 'sleep 0.2; cut -d \" \" -f 4 /proc/$$/stat' & exit 0"
    orphan = await asyncio.create_subprocess_exec("sh", "-c", told_late, stdout=-1)
    new_parent, _ = await orphan.communicate()
    assert int(new_parent) not in (os.getpid(), orphan.pid)


async def test_a_fork_server_that_dies_costs_one_start(tmp_path: Path) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("wait")
    async with starter.forking([spec]):
        first = await started(starter, spec)
        os.kill(role.facts(spec)["loaded_by"], signal.SIGKILL)
        with pytest.raises(ConnectionError, match="fork server"):
            await started(starter, spec)
        spec.log_path.unlink()
        second = await started(starter, spec)
        assert role.facts(spec)["loaded_by"] == second.pid
    for process in (first, second):
        assert process.returncode is None
        process.kill()
        assert await ended(process) == -signal.SIGKILL


async def break_off_a_start(starter: ProcessStarter, spec: ProcessSpec) -> None:
    """While the fork server imports, and has not forked yet."""
    start = asyncio.create_task(started(starter, spec))
    await asyncio.sleep(0.1)
    start.cancel()
    await asyncio.wait([start])


async def test_after_a_start_that_was_broken_off_processes_are_started_without(tmp_path: Path) -> None:
    role = Role(tmp_path, text="import time\ntime.sleep(1)\n" + _ROLE)
    starter, spec = ProcessStarter(role.environ), role.spec("wait", str(tmp_path))
    async with starter.forking([spec]):
        await break_off_a_start(starter, spec)
        with pytest.raises(ConnectionError):
            await started(starter, spec)
        process = await started(starter, spec)
    assert not isinstance(process, ForkedProcess)
    assert role.facts(spec)["loaded_by"] == process.pid
    assert kill_all(tmp_path) == [process.pid], "no other, that the fork server has forked for nobody"
    assert await ended(process) == -signal.SIGKILL


async def test_what_nobody_waits_for_any_more_is_killed_by_the_fork_server(tmp_path: Path) -> None:
    role = Role(tmp_path, text="import time\ntime.sleep(0.5)\n" + _ROLE)
    starter, spec = ProcessStarter(role.environ), role.spec("wait", str(tmp_path))
    async with starter.forking([spec]):
        await break_off_a_start(starter, spec)
    assert kill_all(tmp_path) == []


async def test_an_end_that_somebody_else_has_taken_is_an_end_too(tmp_path: Path) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("wait")
    async with starter.forking([spec]):
        process = await started(starter, spec)
    process.kill()
    os.waitpid(process.pid, 0)  # noqa: ASYNC222 - before the loop can
    assert await ended(process) == process.returncode == 255


async def test_what_cannot_be_watched_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("wait", str(tmp_path))

    def refused(_pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor")

    async with starter.forking([spec]):
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", refused)
            with pytest.raises(OSError, match="no descriptor"):
                await started(starter, spec)
        process = await started(starter, spec)
    assert [pid for pid in kill_all(tmp_path) if pid != process.pid] == []
    assert await ended(process) == -signal.SIGKILL


async def test_where_no_fork_server_can_be_made_processes_are_started_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = Role(tmp_path)
    starter, spec = ProcessStarter(role.environ), role.spec("0")

    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no process")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", refused)
        start = starter.forking([spec])
        await start.__aenter__()
    process = await started(starter, spec)
    assert await ended(process) == 0
    assert not isinstance(process, ForkedProcess)
    await start.__aexit__(None, None, None)


async def test_whoever_waits_for_a_fork_when_the_start_is_over_is_told(tmp_path: Path) -> None:
    role = Role(tmp_path, text="import time\ntime.sleep(1)\n" + _ROLE)
    starter, spec = ProcessStarter(role.environ), role.spec("0")
    async with AsyncExitStack() as start:
        await start.enter_async_context(starter.forking([spec]))
        waiting = asyncio.create_task(started(starter, spec))
        await asyncio.sleep(0.1)
        await start.aclose()
        with pytest.raises(ConnectionError, match="fork server"):
            await asyncio.wait_for(waiting, 20)
