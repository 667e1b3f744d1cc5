"""The pages of metrics of a real stack, around a load whose size is known."""

import shutil
import subprocess
import time

import httpx
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from weir.telemetry.described import CATALOG, try_find
from weir.testing.stack import Stack
from weir_gateway.metrics.vllm_names import VLLM_NAMES, Source

pytestmark = pytest.mark.stack

MODEL = "smollm2-135m"
NUM_REQUESTS, NUM_TOKENS = 4, 6
PROMPT = "One two three four five six seven eight nine ten. " * 4
_SETTLE_S = 2.5


def page(url: str, accept: str = "") -> str:
    response = httpx.get(url, headers={"Accept": accept}, timeout=30)
    assert response.status_code == 200, response.text
    return response.text


def families(url: str) -> dict[str, Metric]:
    return {metric.name: metric for metric in parse_text(page(url))}


def total(found: dict[str, Metric], name: str, **labels: str) -> float:
    """Sum over the series of one name with these labels; 0.0 where there is none yet."""
    return sum(
        float(sample.value)
        for metric in found.values()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def ask(stack: Stack) -> int:
    """Returns the tokens of all prompts."""
    num_prompt_tokens = 0
    for _ in range(NUM_REQUESTS):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{stack.http_url}/v1/completions", json=body, timeout=120).json()
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS
        num_prompt_tokens += answer["usage"]["prompt_tokens"]
    return num_prompt_tokens


def metrics_urls(stack: Stack) -> dict[str, str]:
    return {entry["name"]: entry["metrics_url"] for entry in stack.status()["processes"] if entry["role"] != "nats"}


def test_what_was_sent_is_what_is_counted(stack: Stack) -> None:
    url, own_url = f"{stack.http_url}/metrics", metrics_urls(stack)["gateway-0"]
    before, own_before = families(url), families(own_url)
    num_prompt_tokens = ask(stack)
    time.sleep(_SETTLE_S)  # ends are confirmed, and no page is kept so long
    after, own_after = families(url), families(own_url)

    def rise(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    num_tokens = float(NUM_REQUESTS * NUM_TOKENS)
    assert rise("weir_gateway_requests_finished_total") == NUM_REQUESTS
    of_tenant = [total(own, "weir_tenant_prompt_tokens_total", tenant="default") for own in (own_before, own_after)]
    assert of_tenant[1] - of_tenant[0] == num_prompt_tokens
    assert total(after, "weir_tenant_prompt_tokens_total") == 0.0
    assert rise("weir_lane_output_tokens_total", lane="standard") == num_tokens
    assert rise("weir_worker_tokens_generated_total") == num_tokens
    assert rise("weir_step_sequences_count", role="decode") == rise("weir_worker_decode_steps_total", role="decode")
    assert rise("weir_arena_hand_offs_total") == rise("weir_hand_off_seconds_count") == NUM_REQUESTS
    assert rise("weir_lane_grants_total", lane="standard") == NUM_REQUESTS
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert rise(f"vllm:{name}_count", model_name=MODEL, engine="0") == NUM_REQUESTS
    # A frame may bring several tokens, and then is one gap.
    assert NUM_REQUESTS <= rise("vllm:inter_token_latency_seconds_count") <= num_tokens - NUM_REQUESTS
    assert rise("vllm:generation_tokens_total", model_name=MODEL) == num_tokens
    assert rise("vllm:prompt_tokens_total") == num_prompt_tokens
    assert rise("vllm:request_success_total", finished_reason="length") == NUM_REQUESTS
    assert 0.0 <= total(after, "vllm:kv_cache_usage_perc") < 0.1
    wanted = {row.name.removesuffix("_total") for row in VLLM_NAMES if row.source is not Source.ABSENT}
    assert {name.removesuffix("_total") for name in after if name.startswith("vllm:")} == wanted


def test_each_process_has_a_page_of_its_own_which_agrees_with_the_stacks(stack: Stack) -> None:
    time.sleep(_SETTLE_S)
    urls = metrics_urls(stack)
    together = families(f"{stack.http_url}/metrics")
    assert {name.partition("-")[0] for name in urls} == {"gateway", "scheduler", "transfer", "prefill", "decode"}
    still = {
        "gateway-0": "weir_gateway_requests_finished_total",
        "scheduler-0": "weir_scheduler_requests_submitted_total",
        "transfer-0": "weir_arena_pages",
        "prefill-0": "weir_worker_steps_total",
        "decode-0": "weir_worker_steps_total",
    }
    for process, name in still.items():
        found = families(urls[process])
        [sample] = [one for metric in found.values() for one in metric.samples if one.name == name]
        assert sample.value == total(together, name, process=sample.labels["process"]), process
        assert sample.labels["process"].startswith(process)
        assert not [one for one in found if one.startswith("vllm:")]


def test_openmetrics_has_a_trace_for_a_bucket(stack: Stack) -> None:
    ask(stack)
    time.sleep(_SETTLE_S)
    text = page(f"{stack.http_url}/metrics", "application/openmetrics-text; version=1.0.0")
    traced = {
        metric.name
        for metric in parse_openmetrics(text)
        if any(sample.exemplar and len(sample.exemplar.labels["trace_id"]) == 32 for sample in metric.samples)
    }
    own = {"weir_time_to_first_token_seconds", "weir_request_seconds", "weir_stage_seconds", "weir_hand_off_seconds"}
    assert own <= traced


def test_every_figure_of_every_process_is_described(stack: Stack) -> None:
    missing = [
        (process.role, name)
        for process in stack.processes()
        if process.role != "nats"
        for name in stack.metrics(process)
        if try_find(process.role, name.partition("{")[0]) is None
    ]
    assert missing == []
    assert len({entry.name for entry in CATALOG}) > 150


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_to_mend_in_weirs_own_names(stack: Stack) -> None:
    for url in (f"{stack.http_url}/metrics", *metrics_urls(stack).values()):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=page(url), capture_output=True, text=True, check=False, timeout=60
        )
        complaints = (checked.stdout + checked.stderr).splitlines()
        assert [line for line in complaints if not line.startswith("vllm:")] == []
        assert checked.returncode in (0, 3)
