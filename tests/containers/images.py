"""Local images under the names that compose/ gives, for a machine that reaches no registry of images.

Weir's own image is built by compose/Dockerfile, unchanged, on a Debian 12 that debootstrap made. It installs from a
folder of wheels in that base, which this Python's pip has filled by whatever index it is set up for: so a build needs
neither a network nor anybody's certificates or credentials.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine
from tests.containers.packages import Tools

from weir.bus.server import find_nats_server
from weir.model.files.catalog import CATALOG

ROOT = Path(__file__).parents[2]
_DEBIAN = "weir-test/debian:bookworm"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_TIMEOUT_S = 1800.0
_PYTHON_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip,busybox"

_BASE = f"""FROM {_DEBIAN}
RUN ln -s /usr/bin/busybox /usr/local/bin/wget
COPY wheels /opt/wheels
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/wheels
"""
_NATS = """FROM scratch
COPY nats-server busybox /bin/
COPY busybox /bin/wget
ENTRYPOINT ["/bin/nats-server"]
"""
_PROMETHEUS = f"""FROM {_DEBIAN}
RUN ln -s /usr/bin/busybox /usr/local/bin/wget && mkdir /prometheus && chown nobody /prometheus
COPY prometheus /bin/prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
"""
_TRACES = """FROM weir:local
COPY trace_store.py /home/weir/trace_store.py
CMD ["python3", "/home/weir/trace_store.py"]
"""


@dataclass(frozen=True, slots=True)
class Names:
    """Images of the Compose file, by service."""

    python: str
    nats: str
    prometheus: str
    traces: str

    @classmethod
    def of(cls, document: Any) -> "Names":
        """Of what Compose reads, and of compose/Dockerfile."""
        [python] = set(re.findall(r"^FROM (\S+)", (ROOT / "compose/Dockerfile").read_text(), re.MULTILINE))
        services = document["services"]
        return cls(python, *(services[name]["image"] for name in ("nats", "prometheus", "jaeger")))


class Images:
    """Makes what the engine does not have yet; what takes long is kept in the tools' folder."""

    def __init__(self, engine: Engine, tools: Tools, names: Names, build: Callable[[], None]) -> None:
        """`build`: makes Weir's."""
        self._engine = engine
        self._tools = tools
        self._names = names
        self._build_weir = build

    @property
    def base(self) -> str:
        """Of Weir's image."""
        return self._names.python

    def stand_ins(self) -> list[str]:
        """What is behind the names, in words."""
        version = subprocess.run(
            [find_nats_server(), "--version"], capture_output=True, text=True, timeout=30, check=True
        )
        return [
            f"`{self._names.python}` is Debian 12 by debootstrap",
            f"`{self._names.nats}` has {version.stdout.strip()} of a wheel and busybox",
            f"`{self._names.prometheus}` has Debian's Prometheus",
            f"`{self._names.traces}` is tests/containers/trace_store.py",
        ]

    def make_bases(self) -> None:
        """All but the store of traces."""
        rootfs = self._once("debian", self._debootstrap)
        if not self._engine.docker("images", "--quiet", _DEBIAN).strip():
            self._engine.load_rootfs(rootfs, _DEBIAN)
        context = self._tools.cache / "python"
        context.mkdir(parents=True, exist_ok=True)
        get_wheels(context / "wheels")
        self._build(self._names.python, _BASE, context)
        self._build_of(
            self._names.nats,
            _NATS,
            {
                "nats-server": find_nats_server(),
                "busybox": self._tools.file("busybox-static", "bin/busybox"),
            },
        )
        program = self._tools.file("prometheus", "usr/bin/prometheus")
        self._build_of(self._names.prometheus, _PROMETHEUS, {"prometheus": program})

    def make_weir(self) -> None:
        """Unless the image is there already, of the same sources: the builder would read 2 GB to see it."""
        stamp = self._tools.cache / "weir-of.txt"
        sources = f"{self._id(self._names.python)} {sources_digest()}"
        image = self._id("weir:local")
        if not image or not stamp.exists() or stamp.read_text() != f"{sources} {image}":
            self._build_weir()
            stamp.write_text(f"{sources} {self._id('weir:local')}")

    def _id(self, tag: str) -> str:
        """Empty: there is none."""
        return self._engine.docker("images", "--quiet", "--no-trunc", tag).strip()

    def make_trace_store(self) -> None:
        """Of Weir's image, which must be there."""
        program = Path(__file__).with_name("trace_store.py")
        self._build_of(self._names.traces, _TRACES, {"trace_store.py": program})

    def _build_of(self, tag: str, dockerfile: str, files: Mapping[str, Path]) -> None:
        context = self._engine.folder / re.sub(r"\W", "-", tag)
        context.mkdir()
        for name, path in files.items():
            shutil.copy2(path, context / name)
        self._build(tag, dockerfile, context)

    def _build(self, tag: str, dockerfile: str, context: Path) -> None:
        (context / "Dockerfile").write_text(dockerfile)
        self._engine.docker("build", "--quiet", "--tag", tag, str(context), timeout_s=_TIMEOUT_S)

    def _once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder of the cache, which appears under its name when it is whole."""
        target = self._tools.cache / name
        if not target.exists():
            scratch = target.with_name(f"{name}.part")
            if scratch.exists():
                shutil.rmtree(scratch)
            make(scratch)
            scratch.rename(target)
        return target

    def _debootstrap(self, target: Path) -> None:
        scripts = self._tools.file("debootstrap", "usr/share/debootstrap")
        program = self._tools.file("debootstrap", "usr/sbin/debootstrap")
        command = ["sh", str(program), "--variant=minbase", f"--include={_PYTHON_PACKAGES}", "bookworm"]
        environ = {"DEBOOTSTRAP_DIR": str(scripts)}
        self._engine.run([*command, str(target), debian_mirror()], timeout_s=_TIMEOUT_S, environ=environ)
        shutil.rmtree(target / "var" / "cache" / "apt")


def sources_digest() -> str:
    """Of all that compose/Dockerfile may copy, and itself."""
    digest = hashlib.sha256((ROOT / "compose/Dockerfile").read_bytes())
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    tops = [ROOT / line[1:] for line in lines if line.startswith("!")]
    for top in tops:
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def debian_mirror() -> str:
    """That of this machine's own apt."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    # Not bookworm-updates nor bookworm-security, which are no whole system.
    mirrors = re.findall(r"^Debian [a-z]+ (\S+)$", listed.stdout, re.MULTILINE)
    if not mirrors:
        raise RuntimeError("apt knows no mirror of Debian: is `apt-get update` old, or this another system?")
    return str(mirrors[0])


def get_wheels(folder: Path) -> None:
    """What compose/Dockerfile installs and pulls, for the Python of Debian 12. Anew where the requirements changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["worker"],
        *project["project"]["optional-dependencies"]["valkey"],
        *project["build-system"]["requires"],
    ]
    constraints = (ROOT / "constraints.txt").read_text()
    wanted = "\n".join([*requirements, *(entry.requirement for entry in CATALOG.values()), constraints])
    stamp = folder.with_name("wheels-of.txt")
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if sys.version_info[:2] != (3, 11):
        raise RuntimeError(f"Python {sys.version.split()[0]}: wheels for the image, Debian 12, are made by Python 3.11")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _wheels(
            folder, ["--no-deps", "--index-url", os.environ.get("TORCH_INDEX_URL", _TORCH_INDEX), "torch"], retries=1
        )
    except RuntimeError:
        _wheels(folder, ["--no-deps", "torch"])  # of the index that pip is set up for
    _wheels(folder, ["--no-deps", *(entry.requirement for entry in CATALOG.values())])
    _wheels(folder, ["--find-links", str(folder), *requirements])
    stamp.write_text(wanted)


def _wheels(folder: Path, arguments: list[str], *, retries: int = 5) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    command += ["--retries", str(retries), "--wheel-dir", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
