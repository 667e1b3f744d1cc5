"""Prints Secrets of the folders that `weir up --hosts` made, for `kubectl apply -f -`.

    weir up --hosts compose/kubernetes/hosts.toml --out credentials
    python3 compose/kubernetes/make_secrets.py credentials | kubectl -n serving apply -f -

Each kind of pod gets what its folder has and no more. The NATS servers get a certificate for all names by which they
are called, and the file that says who may do what. With --keys-only, for cert-manager: the keys of NATS and of
operators, in one Secret of which a pod mounts what is its own.
"""

import argparse
import base64
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from weir.bus.nats_users import NATS_ROLES, server_config
from weir.bus.subjects import Subjects
from weir.core.errors import WeirError
from weir.runtime.authority import issue_public
from weir.runtime.stack.credentials import HostCredentials
from weir.runtime.stack.host_secrets import DAYS

NATS_FOLDER = Path("/etc/nats/credentials")
"""Where the chart mounts its Secret."""
_KINDS = ("host", "scheduler", "gateway", "nats")
_MAX_SERVERS = 5
_OF_OPERATORS = re.compile(r"operator\.|admin\.key$|nats-operator\.seed$")


def secrets_of(folder: Path, release: str, instance: str, prefix: str) -> dict[str, dict[str, bytes]]:
    """Files by Secret; of NATS where there is a folder. Raises OSError, ValueError, AuthorityError."""
    found = {}
    for kind in _KINDS:
        if kind == "nats" and not (folder / kind).is_dir():
            continue
        if kind == "nats":
            names = [f"{release}-nats", *(f"{release}-nats-{n}.{release}-nats-nodes" for n in range(_MAX_SERVERS))]
            issue_public(folder, names, days=DAYS, force=True, out=folder / kind, stem="nats")
        files = {path.name: path.read_bytes() for path in sorted((folder / kind).iterdir()) if path.is_file()}
        if kind == "nats":
            files = _of_server(folder / kind, files, instance)
        if kind == "gateway":  # operators' commands run beside schedulers
            files = {name: content for name, content in files.items() if not _OF_OPERATORS.match(name)}
        found[f"{prefix}-{kind}"] = files
    return found


def keys_of(folder: Path, instance: str, prefix: str) -> dict[str, dict[str, bytes]]:
    """As `secrets_of`, without certificates. Raises OSError, ValueError."""
    seeds = {path.name: path.read_bytes() for path in sorted(folder.glob("nats-*.seed"))}
    rest = {"admin.key": (folder / "admin.key").read_bytes(), "nats-roles.conf": _roles(folder, instance)}
    return {f"{prefix}-nats-keys": {**seeds, **rest}}


def _of_server(folder: Path, files: Mapping[str, bytes], instance: str) -> dict[str, bytes]:
    """The public halves in place of the seeds, which it need not know."""
    names = ("ca.pem", "nats.pem", "nats.key")
    return {**{name: files[name] for name in names}, "nats-roles.conf": _roles(folder, instance)}


def _roles(folder: Path, instance: str) -> bytes:
    keys = HostCredentials(folder).nats_public_keys()
    assert set(keys) == set(NATS_ROLES)
    cert, key = (str(NATS_FOLDER / name) for name in ("nats.pem", "nats.key"))
    config = server_config(keys, Subjects(instance), cert_file=cert, key_file=key)
    # As an included file has it: without the braces around the whole.
    return (config.strip().removeprefix("{").removesuffix("}").strip() + "\n").encode()


def manifest(files: Mapping[str, bytes], name: str, release: str) -> dict[str, object]:
    labels = {"app.kubernetes.io/name": "weir", "app.kubernetes.io/instance": release}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": labels},
        "type": "Opaque",
        "data": {file: base64.b64encode(content).decode() for file, content in files.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="As --out of `weir up --hosts` named it.")
    parser.add_argument("--release", default="weir", help="Of helm. Default: weir.")
    parser.add_argument("--instance", help="As hosts.toml says. Default: the release.")
    parser.add_argument("--prefix", help="credentials.secretPrefix of the values. Default: RELEASE-credentials.")
    parser.add_argument("--keys-only", action="store_true", help="For credentials.source: certManager.")
    given = parser.parse_args()
    instance, prefix = given.instance or given.release, given.prefix or f"{given.release}-credentials"
    try:
        if given.keys_only:
            secrets = keys_of(given.folder, instance, prefix)
        else:
            secrets = secrets_of(given.folder, given.release, instance, prefix)
    except (OSError, ValueError, WeirError) as error:
        sys.stderr.write(f"{given.folder}: {error}\n")
        return 1
    yaml.safe_dump_all([manifest(files, name, given.release) for name, files in secrets.items()], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
