"""Several hosts on this machine, each with processes, files in memory, a name and an address of its own, at one switch.

    with Lab(folder) as lab:
        a, b = lab.host("a"), lab.host("b")
        server = a.start([sys.executable, "-m", "http.server", "8000"], log=folder / "server.log")
        b.run("curl", "http://a:8000")
        b.cut()                      # a network that has split: nobody notices at once
        a.power_off()                # at once, and with no word to anybody

Needs root. What a lab has made ends with it, also when the process that holds it is killed.
"""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import pytest
from tests.chaos.relay import Relay
from tests.hosts.namespaces import ROOT, Namespaces, enter, why_impossible, within

_WHY_IMPOSSIBLE = why_impossible()
needs_hosts = pytest.mark.skipif(_WHY_IMPOSSIBLE is not None, reason=str(_WHY_IMPOSSIBLE))
_NETWORK = "10.77.0"
_SWITCH = f"{_NETWORK}.254"
_SWITCH_MAC = "02:00:0a:4d:00:fe"
"""Else a bridge takes that of a port, which takes what a host sends to it when the link is cut, too."""
_NO_MAC = "02:00:00:00:00:00"
"""Of no host."""
_HOSTS_FILE = "etc-hosts"
_MIB = 1 << 20
_PREPARE_SWITCH = f"""
ip link set lo up
ip link add switch address {_SWITCH_MAC} type bridge
ip address add {_SWITCH}/24 dev switch
ip link set switch up
"""
# What stays when a host loses power, and the checkout, may lie in a folder that is hidden: held open, they can be
# mounted where they were.
_PREPARE_HOST = """
name=$1 hosts=$2 disk=$3 root=$4 shm_bytes=$5
mount -t proc proc /proc
echo "$name" > /proc/sys/kernel/hostname
mount --bind "$hosts" /etc/hosts
exec 3< "$disk" 4< "$root"
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o "mode=1777,size=$shm_bytes" tmpfs /dev/shm
mkdir -p "$disk" "$root"
mount --no-canonicalize --bind /proc/self/fd/3 "$disk"
mount --no-canonicalize --bind /proc/self/fd/4 "$root"
exec 3<&- 4<&-
ip link set lo up
"""


class Host:
    """Its own: every process, the network, its name, /dev/shm, /tmp and /run, all of which it loses with its power.
    `disk` is a folder that it keeps, at the same place inside and outside. Other files are everybody's."""

    def __init__(self, name: str, number: int, folder: Path, switch: Namespaces, shm_bytes: int) -> None:
        self.name = name
        self.address = f"{_NETWORK}.{number}"
        self.disk = folder / name
        self.disk.mkdir()
        self._mac = f"02:00:0a:4d:00:{number:02x}"
        self._port = f"port{number}"
        """Of the switch."""
        self._switch = switch
        self._prepare = (_PREPARE_HOST, name, str(folder / _HOSTS_FILE), str(self.disk), str(ROOT), str(shm_bytes))
        self._namespaces: Namespaces | None = None

    def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """A process of this host, in the folder of the checkout; what it says is added to `log`, a file of the outside.
        `pid` is its number outside. It ends with the host; to wait for it is nobody's duty."""
        with log.open("ab") as file:
            return self._inside.popen(command, env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def popen(
        self, command: Sequence[str], stderr: int | None = None, stdin: int = subprocess.DEVNULL
    ) -> "subprocess.Popen[bytes]":
        """As `start`, with what it says in a pipe."""
        return self._inside.popen(command, None, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> str:
        """What it wrote to its output. Raises RuntimeError with its errors when it fails, or TimeoutExpired."""
        pipe = subprocess.PIPE
        with self._inside.popen(command, env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise RuntimeError(f"{self.name}: {command} ended with {process.returncode}:\n{errors.decode()}")
        return output.decode()

    def network(self) -> AbstractContextManager[None]:
        """Sockets that this thread makes meanwhile are the host's. They know no names, and outlive its power."""
        return within(self._inside.pid, "net")

    @property
    def files(self) -> Path:
        """Where the outside finds the host's own files, while it is on."""
        return Path(f"/proc/{self._inside.pid}/root")

    def power_on(self) -> None:
        """With the name, address and disk that it had; its link is whole and has no limit."""
        if self._namespaces is not None:
            raise RuntimeError(f"host {self.name} is on")
        self._namespaces = Namespaces(*self._prepare)
        self._switch.ip(
            f"link add {self._port} type veth peer name eth0 address {self._mac} netns {self._namespaces.pid}",
            f"link set {self._port} arp off master switch up",  # a port would answer for the switch when cut
        )
        self._namespaces.ip(f"address add {self.address}/24 dev eth0", "link set eth0 up")

    def power_off(self) -> None:
        """All is gone at once, and nobody is told: connections to it are neither closed nor reset."""
        self.cut()
        self.close()
        with suppress(RuntimeError):  # the kernel deletes it too, in its own time
            self._switch.ip(f"link delete {self._port}")

    def close(self) -> None:
        """Off, if it is on, where nobody is left who could be told."""
        if self._namespaces is not None:
            self._namespaces.kill()
            self._namespaces = None

    def shape(self, rate_mbit: float) -> None:
        """What it sends, and what is sent to it, passes at this rate at most."""
        rate_bytes = rate_mbit * 1e6 / 8
        burst_bytes = max(1 << 16, int(rate_bytes / 100))  # ten milliseconds: more than one tick of any kernel
        limits = f"root tbf rate {int(rate_mbit * 1000)}kbit burst {burst_bytes} latency 100ms"
        self._inside.ip(f"qdisc replace dev eth0 {limits}", tool="tc")
        self._switch.ip(f"qdisc replace dev {self._port} {limits}", tool="tc")

    def unshape(self) -> None:
        self._inside.ip("qdisc delete dev eth0 root", tool="tc")
        self._switch.ip(f"qdisc delete dev {self._port} root", tool="tc")

    def cut(self, to: "Host | None" = None) -> None:
        """Nothing passes between it and the switch; `to`: nothing that it sends to that host arrives. Nobody is
        told: the link is up, and connections stand still."""
        if to is None:
            self._switch.ip(f"link set {self._port} nomaster")
        else:
            self._inside.ip(f"neighbour replace {to.address} lladdr {_NO_MAC} dev eth0 nud permanent")

    def mend(self, to: "Host | None" = None) -> None:
        if to is None:
            self._switch.ip(f"link set {self._port} master switch")
        else:
            self._inside.ip(f"neighbour delete {to.address} dev eth0")

    @property
    def _inside(self) -> Namespaces:
        if self._namespaces is None:
            raise RuntimeError(f"host {self.name} is off")
        return self._namespaces


class Lab:
    """A switch, the hosts at it and relays between them; all end with it. The hosts' disks are left in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_hosts = 0
        self._ending = ExitStack()

    def host(self, name: str, *, shm_bytes: int = 64 * _MIB) -> Host:
        """A new one, which is on. Others reach it by its name and its address."""
        self._num_hosts += 1
        host = Host(name, self._num_hosts, self._folder, self._switch, shm_bytes)
        with (self._folder / _HOSTS_FILE).open("a") as file:  # the file that is mounted, not another of its name
            file.write(f"{host.address} {name}\n")
        self._ending.callback(host.close)
        host.power_on()
        return host

    def relay(self, host: Host, port: int) -> Relay:
        """To that port of the host; listens at the switch, where every host reaches `relay.address`."""
        relay = Relay(host.address, port, listen_host=_SWITCH, enter=partial(enter, self._switch.pid, "net"))
        self._ending.callback(relay.close)
        return relay

    def join(self) -> None:
        """This thread, and those that it starts from then on, stand at the switch for good: it reaches every host by
        its address."""
        enter(self._switch.pid, "net")

    def __enter__(self) -> "Lab":
        (self._folder / _HOSTS_FILE).write_text("127.0.0.1 localhost\n")
        self._switch = Namespaces(_PREPARE_SWITCH)
        self._ending.callback(self._switch.kill)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()
