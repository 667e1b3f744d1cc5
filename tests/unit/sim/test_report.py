"""A run as tables, JSON, pictures and a page."""

import io
import json
import struct

from rich.console import Console

from weir.sim.results.metrics import RequestOutcome, SimResult, Slo, Slos, mean_estimate
from weir.sim.results.plots import Curve, run_pictures, sweep_picture
from weir.sim.results.report import as_dict, as_tables


def make_result(num: int = 40, num_tenants: int = 2) -> SimResult:
    outcomes = []
    for number in range(num):
        at_s = float(number)
        lane, tenant = ("interactive", "batch")[number % 2], f"t{number % num_tenants}"
        if number % 10 == 9:
            outcomes.append(RequestOutcome(f"r{number}", at_s, lane, tenant, 100, ended_s=at_s, refusal="full"))
            continue
        outcomes.append(
            RequestOutcome(f"r{number}", at_s, lane, tenant, 100, 9, 0, at_s, at_s + 0.125, at_s + 1, at_s + 1, 0.25)
        )
    return SimResult(
        outcomes,
        duration_s=41.0,
        gap_counts_by_ms={7: 100, 50: 3},
        queue_lengths=[(0.0, 0), (1.0, 7), (2.0, 3)],
        tenant_service={f"t{t}": [(0.0, 0.0), (40.0, 100.0 * (t + 1))] for t in range(num_tenants)},
        counters={"steps": 3.0},
    )


def printed(result: SimResult, width: int = 200) -> str:
    text = io.StringIO()
    console = Console(width=width, file=text)
    for table in as_tables(result, Slos(Slo(ttft_s=0.2))):
        console.print(table)
    return text.getvalue()


def test_tables_show_the_whole_each_lane_and_each_tenant() -> None:
    text = printed(make_result())
    for word in ("interactive", "batch", "t0", "t1", "88.9%", "longest queue", "7 requests"):
        assert word in text


def test_no_figure_is_cut_where_a_terminal_has_80_columns() -> None:
    result = make_result()
    for outcome in result.outcomes:
        outcome.arrival_s -= 12.345
        outcome.tenant += "-of-a-long-name" * 4
    text = printed(result, width=80)
    assert "…" not in text
    for figure in ("TTFT p50", "attained", "0.0%", "12470", "1483"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 80


def test_why_requests_were_refused_is_told() -> None:
    result = make_result()
    result.outcomes[9].refusal = "shed"
    text = printed(result)
    assert "refused: full" in text
    assert "refused: shed" in text
    assert list(as_dict(result)["refusals"].items()) == [("full", 3), ("shed", 1)]


def test_shares_of_nothing_are_shown_as_unknown() -> None:
    text = printed(SimResult([RequestOutcome("r", 0.0, "batch", "", 5, ended_s=0.0, refusal="full")], 0.0))
    assert "nan" not in text


def test_one_lane_and_tenant_need_no_rows_of_their_own() -> None:
    result = make_result(num_tenants=1)
    for outcome in result.outcomes:
        outcome.lane = "standard"
    text = printed(result)
    assert "standard" not in text
    assert "tenants" not in text


def test_many_tenants_are_cut_and_the_table_says_so() -> None:
    text = printed(make_result(num=120, num_tenants=30))
    assert "the 20 with most of 30" in text
    assert sum(f"t{tenant} " in text for tenant in range(30)) == 20


def test_json_has_null_for_what_is_not_known_and_reads_back() -> None:
    result = SimResult([RequestOutcome("r", 0.0, "batch", "", 5, ended_s=0.0, refusal="full")], 0.0)
    text = json.dumps(as_dict(result), allow_nan=False)
    assert json.loads(text)["all"]["mean_ttft_s"] is None
    assert json.loads(text)["all"]["attainment"] == 0.0
    assert json.loads(json.dumps(as_dict(make_result()), allow_nan=False))["lanes"].keys() == {"batch", "interactive"}


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_pictures_are_drawn_and_equal_runs_give_equal_bytes() -> None:
    pictures = run_pictures({"one": make_result(), "other": make_result(num=20)})
    assert pictures.keys() == {"ttft", "itl", "queue", "tenants"}
    assert all(min(size_of(png)) > 300 for png in pictures.values())
    assert run_pictures({"one": make_result(), "other": make_result(num=20)}) == pictures
    assert run_pictures({"one": make_result(num=30)})["ttft"] != pictures["ttft"]


def test_a_run_without_tenants_or_tokens_is_drawn_all_the_same() -> None:
    empty = SimResult([RequestOutcome("r", 0.0, "", "", 5, ended_s=0.0, refusal="full")], 0.0)
    assert run_pictures({"empty": empty}).keys() == {"ttft", "itl", "queue"}


def test_a_sweep_is_drawn_with_intervals_of_one_seed_left_out() -> None:
    curve = Curve("fcfs", [1.0, 2.0], [mean_estimate([0.9, 0.8]), mean_estimate([0.5])])
    assert min(size_of(sweep_picture([curve], x_label="requests/s", y_label="attainment", target=0.9))) > 300
