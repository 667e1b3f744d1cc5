"""A real PostgreSQL in a folder of its own, from Debian's package `postgresql` or the PATH."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weir.core.addresses import free_port
from weir.testing.stack import wait_until

_DEBIAN = Path("/usr/lib/postgresql")
_NOT_ROOT = "nobody"  # it refuses to run as root
_ROLE = "weir"


def _tools() -> Path:
    """The folder of initdb and postgres. Skips the test where there is none, unless that is an error here."""
    newest = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]), reverse=True)
    found = shutil.which("initdb")
    for initdb in (*newest, *([Path(found)] if found else [])):
        if (initdb.parent / "postgres").exists():
            return initdb.parent
    reason = "no PostgreSQL is here: `apt-get install postgresql`, or name a server in WEIR_TEST_POSTGRES"
    if os.environ.get("WEIR_TESTS_NEED_POSTGRES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def running() -> Iterator[str]:
    """The URL of an empty database, whose server and folder are gone when the block ends. Its socket is the only way
    in."""
    tools = _tools()
    user = _NOT_ROOT if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="weir-postgres-") as name:
        folder = Path(name)
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        initdb = [str(tools / "initdb"), "-D", str(folder / "data"), "-U", _ROLE, "-A", "trust", "-E", "UTF8"]
        subprocess.run([*initdb, "--no-sync"], user=user, cwd=folder, capture_output=True, check=True, timeout=120)
        port = free_port()  # names the socket
        settings = ("listen_addresses=", f"unix_socket_directories={folder}", f"port={port}", "fsync=off")
        command = [str(tools / "postgres"), "-D", str(folder / "data")]
        command += [word for one in settings for word in ("-c", one)]
        log_path = folder / "postgres.log"
        with log_path.open("wb") as log:
            server = subprocess.Popen(command, user=user, cwd=folder, stdout=log, stderr=log)
        try:
            wait_until((folder / f".s.PGSQL.{port}").exists, timeout_s=60, what="PostgreSQL has its socket")
            yield f"postgresql://{_ROLE}@/postgres?host={folder}&port={port}"
        finally:
            server.send_signal(signal.SIGINT)  # ends at once, whoever is connected
            server.wait(60)
