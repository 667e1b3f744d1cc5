"""Certificates of all processes, and the one that clients see, are replaced while requests run: none is lost."""

import itertools
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.chaos.hosts import Cluster, Served
from tests.e2e.certified import Lab

from weir.client import GenerateOptions, WeirClient
from weir.testing.stack import wait_until

pytestmark = pytest.mark.stack

_ROLES = ("transfer", "scheduler", "prefill", "decode", "gateway")
_NUM_CLIENTS = 10
_NUM_TOKENS = 24
_NUM_RENEWALS = 3
_SEEN_S = 60.0


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("run"), certified=lab) as cluster:
        cluster.add_host("one")
        yield cluster


class Load:
    """Clients that ask again and again until `stop`: half of them by HTTP, each request by a new connection."""

    def __init__(self, cluster: Cluster, lab: Lab) -> None:
        self._cluster = cluster
        self._lab = lab
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(_NUM_CLIENTS)
        self.num_open = 0
        self.most_open = 0
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        asks = itertools.cycle((self._ask_grpc, self._ask_http))
        self._clients = [self._pool.submit(self._ask_again, number, next(asks)) for number in range(_NUM_CLIENTS)]

    def stop(self) -> None:
        self._ended.set()
        for client in self._clients:
            client.result(120)
        self._pool.shutdown()

    def _ask_again(self, number: int, ask: Callable[[str], int]) -> None:
        for turn in itertools.count():
            if self._ended.is_set():
                return
            with self._lock:
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
            try:
                num_tokens = ask(f"Client {number} asks for the {turn}. time: the sky is")
                outcome = "whole" if num_tokens == _NUM_TOKENS else f"{num_tokens} tokens"
            except Exception as error:  # noqa: BLE001 - it is the outcome
                outcome = f"{type(error).__name__}: {error}"
            with self._lock:
                self.num_open -= 1
                self.outcomes[outcome] += 1

    def _ask_grpc(self, prompt: str) -> int:
        with WeirClient(self._cluster.grpc_address, ca=str(self._lab.ca), timeout_s=100) as client:
            chunks = client.generate(prompt, GenerateOptions(max_tokens=_NUM_TOKENS, ignore_eos=True))
            return sum(len(chunk.token_ids) for chunk in chunks)

    def _ask_http(self, prompt: str) -> int:
        context = ssl.create_default_context(cafile=str(self._lab.ca))
        body = {"prompt": prompt, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
        url = f"https://localhost:{self._cluster.http_port}/v1/completions"
        answer = httpx.post(url, json=body, verify=context, timeout=100)
        return int(answer.json()["usage"]["completion_tokens"])


class Taken:
    """How many certificates each process has taken since it started."""

    def __init__(self, cluster: Cluster) -> None:
        self._gateway = cluster.gateway
        self._by_tcp = [cluster.gateway, *cluster.schedulers, *cluster.hosts[0].workers]
        self._seen: Counter[tuple[str, str]] = Counter()

    def wait_one_more(self, *, public: bool = True) -> None:
        """Until each has taken one more than at the last call."""
        wanted = [(process, "certificate_changes_total_tls") for process in self._by_tcp]
        if public:
            wanted.append((self._gateway, "certificate_changes_total_public_tls"))
        for process, name in wanted:
            self._seen[process.name, name] += 1
            self._wait(process, name, self._seen[process.name, name])

    def _wait(self, process: Served, name: str, expected: int) -> None:
        what = f"{name} of {process.name} is {expected}"
        wait_until(lambda: process.metrics()[name] >= expected, timeout_s=_SEEN_S, what=what)


def test_no_request_is_lost_while_certificates_and_authorities_change(cluster: Cluster, lab: Lab) -> None:
    taken, load = Taken(cluster), Load(cluster, lab)
    try:
        for _ in range(_NUM_RENEWALS):
            lab.renew(cluster.instance, _ROLES)
            taken.wait_one_more()
        tear_keys(lab, cluster)
        lab.add_authority()
        taken.wait_one_more(public=False)
        lab.renew(cluster.instance, _ROLES)
        taken.wait_one_more()
        lab.drop_authorities()
        taken.wait_one_more(public=False)
        # Workers that know the new authority alone: the gateway opens to them with what it has now.
        [_, later] = cluster.add_host("two", num_prefill=0).processes
        wait_until(lambda: later.metrics()["output_tokens_computed_total"] > 0, timeout_s=_SEEN_S, what="it is used")
        seen = load.outcomes["whole"]
        wait_until(lambda: load.outcomes["whole"] >= seen + _NUM_CLIENTS, timeout_s=_SEEN_S, what="requests still end")
    finally:
        load.stop()
    assert set(load.outcomes) == {"whole"}, load.outcomes
    assert load.outcomes["whole"] > 5 * _NUM_CLIENTS
    assert load.most_open >= 8
    assert cluster.integrity_errors() == []


def tear_keys(lab: Lab, cluster: Cluster) -> None:
    """Keys are half written, and then whole again: nobody uses the halves, and each process says so."""
    pairs = [lab.member("gateway", cluster.instance), lab.public()]
    whole = [pair.key.read_bytes() for pair in pairs]
    before = num_refusals(cluster.gateway)
    for pair, key in zip(pairs, whole, strict=True):
        pair.key.write_bytes(key[: len(key) // 2])
    wait_until(
        lambda: num_refusals(cluster.gateway) >= before + 2, timeout_s=_SEEN_S, what="the gateway refuses the halves"
    )
    for pair, key in zip(pairs, whole, strict=True):
        pair.key.write_bytes(key)


def num_refusals(process: Served) -> float:
    metrics = process.metrics()
    return metrics["certificate_refusals_total_tls"] + metrics["certificate_refusals_total_public_tls"]
