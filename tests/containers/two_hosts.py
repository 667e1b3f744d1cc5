"""Two hosts of one stack in a container each: what crosses between them, and what a lost one costs."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tests.containers.checks import ANSWER, Seen, Wrong, ask_grpc, ask_http
from tests.containers.parts import Part, give_to_image, weir
from tests.containers.stack import ComposeStack

HOSTS = ("host-a", "host-b")
_LONG = " ".join(f"Rule {number}: whoever reads this line goes on to the next one." for number in range(24))
TOPICS = ("Rain", "Iron", "A", "Salt", "Wind", "Snow", "Glass", "Tea")
_NUM_TOKENS = 48
_TIMEOUT_S = 300.0
_LOST_AFTER_S = 1.0
_FETCHES = "weir_arena_remote_prefixes_total"
_FAILED = "weir_arena_remote_prefixes_failed_total"
_RECEIVED = "weir_arena_remote_pages_received_total"
_DECODED = "weir_worker_decode_steps_total"


class TwoHosts(Part):
    """two-hosts.yaml, as `weir up --hosts` makes credentials for it."""

    name = "two-hosts"
    files = ("compose/two-hosts.yaml",)
    left_out = ()
    healthy = "two hosts, both ready by their supervisors' own probes:"

    def prepare(self, folder: Path) -> Mapping[str, str]:
        credentials = folder / "credentials"
        weir("up", "--hosts", "compose/two-hosts.toml", "--out", str(credentials))
        for host in HOSTS:
            give_to_image(credentials / host)
        credentials.chmod(0o711)
        # Few at once in a worker, so that prompts with one beginning come to both hosts.
        return {"CREDENTIALS_DIR": str(credentials), "MAX_NUM_SEQS": "2"}

    def check(self, stack: ComposeStack) -> Iterator[Seen]:
        wrong = {text for text in (ask_http(stack.ports.http), ask_grpc(stack.ports.grpc)) if text != ANSWER}
        if wrong:
            raise Wrong(f"not {ANSWER!r}: {wrong}")
        yield Seen("greedy text by HTTP and by `weir generate`", f"twice {ANSWER[:7]!r}…, as outside containers")
        yield self._apart(stack)
        yield self._pages_cross(stack)
        yield self._lost(stack)

    def _apart(self, stack: ComposeStack) -> Seen:
        """Each has an arena that the other does not see."""
        listed = {host: stack.exec(host, "sh", "-c", "ls /dev/shm; hostname; id -u").split() for host in HOSTS}
        command = ("readlink", "/proc/1/ns/ipc", "/proc/1/ns/pid", "/proc/1/ns/net")
        spaces = [stack.exec(host, *command).split() for host in HOSTS]
        if any(one == other for one, other in zip(*spaces, strict=True)):
            raise Wrong(f"namespaces are shared: {spaces}")
        return Seen("/dev/shm, and namespaces of IPC, processes and network, of both", f"each its own: {listed}")

    def _pages_cross(self, stack: ComposeStack) -> Seen:
        ask(stack, [_LONG], max_tokens=1)
        before = {host: figures(stack, host) for host in HOSTS}
        asked = [f"{_LONG} {word} and {number} more things:" for number in range(2) for word in TOPICS]
        fetched = ask(stack, asked, max_tokens=_NUM_TOKENS)
        after = {host: figures(stack, host) for host in HOSTS}
        risen = {name: sum(after[host][name] - before[host][name] for host in HOSTS) for name in after["host-a"]}
        if risen[_RECEIVED] < 16 or risen[_FAILED] or min(after[host][_DECODED] for host in HOSTS) == 0:
            raise Wrong(f"pages did not cross, or one host did nothing: {risen}, {after}")
        if ask(stack, asked, max_tokens=_NUM_TOKENS) != fetched:
            raise Wrong("asked again, with everything cached, the answers were others")
        return Seen(
            f"{len(asked)} prompts with one beginning at once, which one host had computed",
            f"{risen[_FETCHES]:.0f} fetch of {risen[_RECEIVED]:.0f} pages by TLS from host to host, none failed; "
            "the same answers when asked again",
        )

    def _lost(self, stack: ComposeStack) -> Seen:
        """SIGKILL of all of host-b while it serves."""
        prompts = [f"{word} and {number} things that follow from it:" for number in range(2) for word in TOPICS]
        expected = ask(stack, prompts, max_tokens=_NUM_TOKENS)
        [victim] = stack.containers("host-b")
        begun = figures(stack, "host-b")[_DECODED]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask, stack, prompts, max_tokens=_NUM_TOKENS)
            time.sleep(_LOST_AFTER_S)
            worked = figures(stack, "host-b")[_DECODED] - begun
            stack.kill_process(victim)
            answers = asking.result(_TIMEOUT_S)
        if not worked:
            raise Wrong("host-b decoded nothing before it was killed")
        if answers != expected:
            raise Wrong("answers of a host that was lost are others")
        took_s = stack.wait_replaced(victim, "host-b", _TIMEOUT_S)
        return Seen(
            f"`kill -9` of host-b's first process, and so of all of it, during {len(prompts)} requests",
            f"all answered, with the same text; host-b healthy again after {took_s:.0f} s",
        )


def ask(stack: ComposeStack, prompts: Sequence[str], *, max_tokens: int) -> list[str]:
    """All at once. Raises httpx.HTTPError."""

    def one(prompt: str) -> str:
        body = {"model": "", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{stack.ports.http}/v1/completions"
        answer = httpx.post(url, json=body, timeout=_TIMEOUT_S).raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def figures(stack: ComposeStack, host: str) -> dict[str, float]:
    """Sums over the processes of a host, at the ports that it was told."""
    [container] = stack.containers(host)
    found = dict.fromkeys((_FETCHES, _FAILED, _RECEIVED, _DECODED), 0.0)
    number = 5 if host == "host-a" else 3
    for port in range(9464, 9464 + number):
        page = httpx.get(f"http://{container.address}:{port}/metrics", timeout=10).raise_for_status().text
        for name in found:
            found[name] += sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))
    return found
