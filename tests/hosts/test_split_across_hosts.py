"""One host computes prompts, another one answers: with the tokens of one host, and every page crosses once."""

import json
import sys
from collections.abc import Iterator, Sequence

import pytest
from tests.golden.generation import load_golden
from tests.hosts.lab import needs_hosts
from tests.hosts.two_hosts import TIMEOUT_S, TwoHosts, open_two_hosts

from weir.kv.geometry import PAGE_TOKENS
from weir.testing.stack import wait_until

pytestmark = [needs_hosts, pytest.mark.stack]
_LEAST_TOKENS = 160
"""So long a prompt is computed at the other host."""
_CLIENT = """
import asyncio, json, sys
from weir.testing.load import greedy_request, open_stub, stream

async def ask(stub, prompt_ids, max_tokens, skips):
    request = greedy_request(prompt_ids, max_tokens=max_tokens, ignore_eos=True)
    request.options.skips_prefix_cache = skips
    record = await stream(stub, request, timeout_s=100)
    assert record.num_terminal_events == 1, record
    return list(record.token_ids)

async def main(asked):
    channel, stub = open_stub("a:50051")
    async with channel:
        print(json.dumps(await asyncio.gather(*(ask(stub, *one) for one in asked))))

asyncio.run(main(json.load(open(sys.argv[1]))))
"""


@pytest.fixture(scope="module", params=["int8", pytest.param("fp32", marks=pytest.mark.long)])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, precision: str) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("split")
    flags = ("--precision", precision)
    environ = {"WEIR_SERVES_LOCALLY": "false"}
    with open_two_hosts(
        folder, 8, *flags, a_has="prefill = 1\ndecode = 0", b_has="prefill = 0\ndecode = 1", environ=environ
    ) as two:
        two.start(two.b)
        wait_until(lambda: two.num_workers() == 2, timeout_s=TIMEOUT_S, what="both hosts' workers are known")
        yield two


def ids(hosts: TwoHosts, asked: Sequence[tuple[Sequence[int], int]], *, skips: bool = False) -> list[list[int]]:
    """Of the answers to all prompts at once. `skips`: what is cached, and so what crosses."""
    file = hosts.a.disk / "asked.json"
    file.write_text(json.dumps([(list(prompt), max_tokens, skips) for prompt, max_tokens in asked]))
    told: list[list[int]] = json.loads(hosts.a.run(sys.executable, "-c", _CLIENT, str(file), timeout_s=TIMEOUT_S))
    return told


def test_answers_of_two_hosts_are_those_of_one_and_each_page_crosses_once(hosts: TwoHosts, precision: str) -> None:
    golden = [one for one in load_golden() if len(one.prompt_ids) > _LEAST_TOKENS][:3]
    short = [one for one in load_golden() if len(one.prompt_ids) < PAGE_TOKENS][:2]
    asked = [(one.prompt_ids, min(12, len(one.expected_ids))) for one in (*golden, *short)]
    alone = ids(hosts, asked, skips=True)
    before = {host.name: hosts.figures(host) for host in (hosts.a, hosts.b)}
    if precision == "int8":
        assert ids(hosts, asked) == alone
    else:  # three such prompts in one step take longer than anybody waits for a page
        assert [ids(hosts, [one])[0] for one in asked] == alone
    after = {host.name: hosts.figures(host) for host in (hosts.a, hosts.b)}

    def rise(host: str, process: str, name: str) -> float:
        return after[host][process][name] - before[host][process].get(name, 0.0)

    num_pages = sum((len(one.prompt_ids) - 1) // PAGE_TOKENS for one in golden)
    num_received = rise("b", "transfer-0", "remote_pages_received_total")
    num_offered = rise("a", "transfer-0", "remote_pages_offered_total")
    num_computed = rise("b", "decode-0", "prompt_tokens_computed_total")
    num_tokens = sum(len(prompt) for prompt, _ in asked)
    if precision == "int8":
        assert num_received == num_offered == num_pages, after
        assert rise("b", "transfer-0", "remote_prefixes_total") == len(golden)
        assert rise("b", "transfer-0", "remote_prefixes_failed_total") == 0
        assert rise("a", "scheduler-0", "placed_crossing_total") == len(golden)
        assert rise("a", "prefill-0", "prompt_tokens_computed_total") == num_pages * PAGE_TOKENS
        assert num_computed == num_tokens - num_pages * PAGE_TOKENS
    else:  # on a slow machine some take longer than anybody waits, and are computed by who answers
        assert 0 < num_received <= num_offered <= num_pages, after
        assert num_tokens - num_received * PAGE_TOKENS <= num_computed < num_tokens, after
    assert rise("a", "gateway-0", "prefix_orders_failed_total") == 0
    assert after["a"]["transfer-0"]["remote_pages_pinned"] == after["b"]["transfer-0"]["remote_pages_reserved"] == 0
    assert after["a"]["scheduler-0"]["links_measured"] >= 1
