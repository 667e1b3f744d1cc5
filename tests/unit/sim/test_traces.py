"""Traces become workloads; what cannot be read is named by file, line and field."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from weir.sim.workloads.trace_file import TraceError
from weir.sim.workloads.traces import Replay, detect_format, load_workload, read_lengths, read_trace
from weir.sim.workloads.workload import SimRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ARENA = "arrival_s,tenant,prompt_len,output_len\n"


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def mooncake_line(timestamp: object, blocks: object = (0,), length: int = 600) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": 5, "hash_ids": blocks}) + "\n"


def test_an_azure_trace_keeps_the_time_between_its_requests(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0319600,3180,8\n"
    workload = read_trace(file(tmp_path, "azure.csv", AZURE + rows))
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests] == [(4808, 10), (3180, 8)]
    assert workload.requests[1].arrival_s == pytest.approx(1.052)


def test_azure_times_may_name_a_zone_and_leave_out_parts_of_a_second(tmp_path: Path) -> None:
    """As the trace of 2024 has them; one without a zone is of the same one."""
    times = ("2024-05-10 00:00:59.5", "2024-05-10 00:01:00+00:00", "2024-05-10 00:01:00.250000+00:00")
    rows = "".join(f"{time},10,1\n" for time in (*times, "2024-05-10 02:01:01+02:00"))
    workload = read_trace(file(tmp_path, "azure.csv", AZURE + rows))
    assert [r.arrival_s for r in workload.requests] == pytest.approx([0.0, 0.5, 0.75, 1.5])


def test_requests_come_by_time_from_0_on_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    workload = read_trace(file(tmp_path, "arena.csv", ARENA + "7.5,b,20,2\n4.0,a,10,1\n"))
    assert [(r.arrival_s, r.tenant) for r in workload.requests] == [(0.0, "tenanta"), (3.5, "tenantb")]


def test_all_of_a_trace_ask_for_the_same_most(tmp_path: Path) -> None:
    path = file(tmp_path, "arena.csv", ARENA + "0,a,10,700\n1,a,10,3\n")
    assert [r.max_tokens for r in read_trace(path).requests] == [700, 700]
    assert [r.max_tokens for r in read_trace(path, max_tokens=1024).requests] == [1024, 1024]
    with pytest.raises(TraceError, match=r"max_tokens.*512 is below the 700 output tokens"):
        read_trace(path, max_tokens=512)


def test_a_request_without_output_counts_as_one_token(tmp_path: Path) -> None:
    assert (
        read_lengths(file(tmp_path, "l.csv", "num_prefill_tokens,num_decode_tokens\n9,0\n"))[0].num_output_tokens == 1
    )


def test_mooncakes_ticks_are_spread_and_blocks_stay_with_their_rows(tmp_path: Path) -> None:
    text = "".join(mooncake_line(3000 * (i // 50), (i,)) for i in range(100))
    path = file(tmp_path, "m.jsonl.gz", text)
    requests = read_trace(path, seed=1).requests
    times = [r.arrival_s for r in requests]
    assert times == sorted(times)
    assert len(set(times)) == 100
    assert max(times[:50]) < 3.0
    assert [r.prefix_blocks[0] // 50 for r in requests] == [0] * 50 + [1] * 50
    assert read_trace(path, seed=1) == read_trace(path, seed=1)
    assert read_trace(path, seed=2) != read_trace(path, seed=1)


def test_an_aibrix_line_may_hold_several_requests(tmp_path: Path) -> None:
    entry = {"Prompt Length": 178, "Output Length": 8, "prompt": "text"}
    path = file(tmp_path, "a.jsonl", json.dumps({"timestamp": 6011, "requests": [entry, entry]}) + "\n")
    assert [r.request_id for r in read_trace(path).requests] == ["a-1-0", "a-1-1"]


def test_every_key_of_a_capture_is_read(tmp_path: Path) -> None:
    requests = (
        SimRequest("a", 0.0, 10, 5, 100, "interactive", "acme", (1, 2), 9.0, 0.5, 0.05, 7.0, -1.5),
        SimRequest("b", 1.25, 10, 5, 50),
    )
    lines = (
        {
            "request_id": "a",
            "arrival_s": 3.0,
            "num_prompt_tokens": 10,
            "num_output_tokens": 5,
            "max_tokens": 100,
            "lane": "interactive",
            "tenant": "acme",
            "prefix_blocks": [1, 2],
            "deadline_s": 9.0,
            "ttft_target_s": 0.5,
            "itl_target_s": 0.05,
            "predicted_output_tokens": 7.0,
            "output_score": -1.5,
        },
        {"request_id": "b", "arrival_s": 4.25, "num_prompt_tokens": 10, "num_output_tokens": 5, "max_tokens": 50},
    )
    path = file(tmp_path, "capture.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert read_trace(path).requests == requests


def test_keys_that_a_capture_does_not_know_are_passed_over(tmp_path: Path) -> None:
    line = {"arrival_s": 5, "num_prompt_tokens": 3, "num_output_tokens": 2, "prompt": "text", "lane": None}
    (request,) = read_trace(file(tmp_path, "c.jsonl", json.dumps(line))).requests
    assert (request.arrival_s, request.lane, request.max_tokens) == (0.0, "", 2)


@pytest.mark.parametrize(
    ("name", "text", "line", "field"),
    [
        ("a.csv", AZURE + "yesterday,1,1\n", 2, "TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,1,1\n2023-11-16 18:17:03.97,many,1\n", 3, "ContextTokens"),
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,0,1\n", 2, "ContextTokens"),
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,1\n", 2, "GeneratedTokens"),
        ("a.csv", AZURE + "2023-11-16 18:17:03.97,1,1,1\n", 2, ""),
        ("a.csv", ARENA + "nan,a,1,1\n", 2, "arrival_s"),
        ("a.csv", ARENA + "0,a,1.5,1\n", 2, "prompt_len"),
        ("a.csv", ARENA + "0,a,1e300,1\n", 2, "prompt_len"),
        ("m.jsonl", mooncake_line(True), 1, "timestamp"),
        ("m.jsonl", mooncake_line(0) + mooncake_line(0, "no"), 2, "hash_ids"),
        ("m.jsonl", mooncake_line(0, [1, 2, 3], length=600), 1, "hash_ids"),
        ("m.jsonl", mooncake_line(0) + "{oops\n", 2, ""),
        ("m.jsonl", mooncake_line(0) + "[1]\n", 2, ""),
        ("a.jsonl", '{"timestamp": 1, "requests": [3]}', 1, "requests"),
        ("c.jsonl", '{"arrival_s": 1, "num_prompt_tokens": 1, "num_output_tokens": 1, "lane": 3}', 1, "lane"),
        (
            "c.jsonl",
            '{"arrival_s": 1, "num_prompt_tokens": 1, "num_output_tokens": 1, "deadline_s": -1}',
            1,
            "deadline_s",
        ),
        ("x.csv", "one,two\n1,2\n", 1, ""),
        ("x.jsonl", "", 0, ""),
        ("x.csv", AZURE, 0, ""),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_field(
    tmp_path: Path, name: str, text: str, line: int, field: str
) -> None:
    path = file(tmp_path, name, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, line, field)
    assert str(path) in str(caught.value)
    assert not field or field in str(caught.value)


def test_what_is_no_file_or_no_text_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(b"{}" * 1000)[:30])
    binary = tmp_path / "t.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.csv", broken, binary):
        with pytest.raises(TraceError, match=f"{path}: cannot be read"):
            read_trace(path)


@pytest.mark.parametrize(
    ("name", "trace_format", "num_requests", "last_s"),
    [
        ("azure_2023_code.csv", "azure", 8819, 3436),
        ("mooncake_conversation.jsonl.gz", "mooncake", 12031, 3537),
        ("vtc_arena_tenants_part_a.csv", "arena", 713, 300),
        ("sharegpt8k_lengths_part_a.csv", "lengths", 15366, 0),
        ("aibrix_8min_up_and_down.jsonl.gz", "aibrix", 2026, 456),
    ],
)
def test_the_public_traces_are_read_whole(name: str, trace_format: str, num_requests: int, last_s: float) -> None:
    root = os.environ.get("WEIR_TEST_DATA")
    if not root:
        pytest.skip(f"WEIR_TEST_DATA is not set: a folder with traces/{name}")
    path = Path(root) / "traces" / name
    workload = read_trace(path)
    assert detect_format(path) == trace_format
    assert len(workload.requests) == num_requests
    assert workload.requests[-1].arrival_s == pytest.approx(last_s, abs=4)
    assert len({request.request_id for request in workload.requests}) == num_requests


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "arena.csv"
    rows = "".join(f"{i * i},t,{10 + i},{5 + i}\n" for i in range(20))
    path.write_text("arrival_s,tenant,prompt_len,output_len\n" + rows)
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "9,4\n" * 20)
    return path


def test_a_trace_is_replayed_as_it_was(trace: Path) -> None:
    assert [r.arrival_s for r in load_workload(trace, Replay()).requests] == [float(i * i) for i in range(20)]


def test_a_rate_stretches_its_pattern(trace: Path) -> None:
    times = [r.arrival_s for r in load_workload(trace, Replay(num_requests=11, rate_a_s=10)).requests]
    assert times == pytest.approx([i * i / 100 for i in range(11)])


def test_other_arrivals_keep_the_order_of_the_requests(trace: Path) -> None:
    for kind in ("poisson", "gamma"):
        workload = load_workload(trace, Replay(arrivals=kind, rate_a_s=5.0, cv=3.0), seed=3)
        assert [r.num_prompt_tokens for r in workload.requests] == [10 + i for i in range(20)]
        assert workload == load_workload(trace, Replay(arrivals=kind, rate_a_s=5.0, cv=3.0), seed=3)
        assert workload != load_workload(trace, Replay(arrivals=kind, rate_a_s=5.0, cv=3.0), seed=4)
    burst = load_workload(trace, Replay(arrivals="burst"))
    assert np.ptp([r.arrival_s for r in burst.requests]) == 0


def test_lengths_without_times_need_arrivals(lengths: Path) -> None:
    with pytest.raises(ValueError, match=r"arrivals 'trace': .* lengths alone"):
        load_workload(lengths, Replay(rate_a_s=1.0))
    assert len(load_workload(lengths, Replay(rate_a_s=1.0, arrivals="poisson")).requests) == 20


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"arrivals": "poisson"}, "rate_a_s 0: poisson arrivals need a rate"),
        ({"rate_a_s": -1}, "rate_a_s -1"),
        ({"arrivals": "never"}, "arrivals 'never'"),
        ({"num_requests": -1}, "num_requests -1"),
    ],
)
def test_what_cannot_be_replayed_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Replay(**fields)  # type: ignore[arg-type]
