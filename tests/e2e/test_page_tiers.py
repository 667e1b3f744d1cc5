"""Pages that pass through Valkey and through memory of the host: the tokens and log-probabilities of computing,
whatever becomes of the server."""

from pathlib import Path

import pytest
from tests.contract.valkey_server import ValkeyServer, running
from tests.e2e.test_device_precision import SAME_SUMS
from tests.e2e.test_page_files import answers, prompt, seen

from weir.kv.geometry import PAGE_TOKENS
from weir.testing.stack import Stack, wait_until

pytestmark = pytest.mark.stack

LENGTHS = (90, 200, 333)
TINY = ("--load", "dummy", "--model-shape", "tiny")
PATIENT = {"WEIR_PAGE_VALKEY_TIMEOUT_MS": "30000"}
"""On a busy machine a server that is well may be slow."""


def told(stack: Stack, name: str) -> float:
    return stack.metric("transfer", f"page_{name}")


def stored_in(server: ValkeyServer) -> dict[str, bytes]:
    """Headers and bytes of pages, by their hash."""
    return {key.rpartition(":")[2]: raw for key, raw in server.pages().items()}


def stored_in_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*/*/*") if "." not in path.name}


async def test_another_stack_goes_on_from_pages_in_valkey_whose_bits_are_those_of_computing(tmp_path: Path) -> None:
    """What the second has loaded into its arena it writes to files: header, checksum and bytes must be the same."""
    files = tmp_path / "files"
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS, start=1)]
    num_prompt_pages = sum((length - 1) // PAGE_TOKENS for length in LENGTHS)
    with running(tmp_path) as server:
        flags = (*TINY, "--arena-bytes", "64MiB", "--page-valkey-url", server.url)
        with Stack(tmp_path / "run", flags=flags, environ=PATIENT) as stack:
            computed = await answers(stack, prompts)
            num_pages = sum(length // PAGE_TOKENS for length in LENGTHS)
            wait_until(
                lambda: told(stack, "valkey_written_pages_total") >= num_pages, timeout_s=30, what="pages are there"
            )
        written = stored_in(server)
        assert len(written) >= num_pages

        with Stack(tmp_path / "run", flags=(*flags, "--page-files-dir", str(files)), environ=PATIENT) as stack:
            assert seen(await answers(stack, prompts)) == seen(computed)
            assert told(stack, "valkey_loaded_pages_total") == num_prompt_pages
            assert told(stack, "valkey_loads_failed_total") == 0
            wait_until(
                lambda: told(stack, "files_written_pages_total") >= num_prompt_pages,
                timeout_s=30,
                what="files are there",
            )
            in_files = stored_in_files(files)
            assert len(in_files.keys() & written.keys()) >= num_prompt_pages
            assert all(written[name] == raw for name, raw in in_files.items() if name in written)
            assert stack.integrity_errors() == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", "planted"])
async def test_a_server_that_fails_a_stack_costs_it_what_it_must_compute(tmp_path: Path, fault: str) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS, start=1)]
    with running(tmp_path) as server:
        flags = (*TINY, "--arena-bytes", "64MiB", "--page-valkey-url", server.url)
        with Stack(tmp_path / "run", flags=flags, environ=PATIENT) as stack:
            computed = await answers(stack, prompts)
            num_pages = sum(length // PAGE_TOKENS for length in LENGTHS)
            wait_until(
                lambda: told(stack, "valkey_written_pages_total") >= num_pages, timeout_s=30, what="pages are there"
            )
        with Stack(tmp_path / "run", flags=flags, environ=PATIENT) as stack:
            assert told(stack, "valkey_known_pages") >= num_pages
            if fault == "killed":
                server.kill()
            else:
                for key, raw in server.pages().items():
                    server.client.set(key, raw[: len(raw) // 2] + b"\xff" + raw[len(raw) // 2 + 1 :])
            assert seen(await answers(stack, prompts)) == seen(computed)
            assert told(stack, "valkey_loaded_pages_total") == 0
            if fault == "killed":
                assert told(stack, "valkey_away") == 1
            else:
                assert told(stack, "valkey_damaged_total") >= len(prompts)
            assert stack.integrity_errors() == []


@pytest.mark.long
@pytest.mark.timeout(600)  # half a minute where it is alone: its steps are interpreted
async def test_pages_that_left_a_device_come_back_from_memory_of_its_host(tmp_path: Path) -> None:
    """An arena that has not room for all of the prompts: each has left it, in part at least, when it comes again."""
    device = ("--device", "interpreter", "--max-context-tokens", "128", "--page-memory-bytes", "64MiB")
    flags = (*TINY, *device, "--arena-bytes", "208KiB")
    prompts = [prompt(seed, 90) for seed in (1, 2, 3)]
    # One worker: under the interpreter each takes long to start, and 90 tokens take seconds.
    with Stack(tmp_path / "run", num_prefill=0, flags=flags, environ=SAME_SUMS) as stack:
        num_pages = 90 // PAGE_TOKENS
        computed = []
        for number, ids in enumerate(prompts, start=1):
            computed += await answers(stack, [ids])
            wait_until(
                lambda number=number: told(stack, "memory_written_pages_total") >= number * num_pages,  # type: ignore[misc]
                timeout_s=60,
                what="they are in memory of the host",
            )
        assert told(stack, "memory_loaded_pages_total") == 0
        again = [record for ids in prompts for record in await answers(stack, [ids])]
        for (token_ids, logprobs), (computed_ids, computed_logprobs) in zip(seen(again), seen(computed), strict=True):
            assert token_ids == computed_ids
            # Without --exact, under which this takes thrice as long, sums depend on how many tokens a step has.
            assert logprobs == pytest.approx(computed_logprobs, rel=0, abs=1e-3)
        assert told(stack, "memory_loaded_pages_total") >= 4 * (len(prompts) - 1), "no load is of fewer"
        assert stack.metric("transfer", "prefix_evicted_pages_total") > 0
        assert stack.integrity_errors() == []
