"""A run made of the flags of `weir bench serve`, by their names. What cannot be is a ValueError that names the flag."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weir.bench.serving.arrivals import ArrivalPlan, RampUp
from weir.bench.serving.config import DEFAULT_MAX_CONCURRENCY, LoadConfig
from weir.bench.serving.datasets import (
    ANY_TRACE,
    TRACE_FORMATS,
    Dataset,
    MultiTurn,
    PrefixRepetition,
    RandomPrompts,
    TraceReplay,
)
from weir.bench.serving.figures import Reporting
from weir.bench.serving.jobs import Mix
from weir.bench.serving.load import check_keys, read_keys
from weir.bench.serving.serve import Run, Saving, result_name
from weir.bench.serving.sharegpt import ShareGpt
from weir.bench.serving.sweep import Axis, Server, Sweep, parse_values
from weir.core.addresses import bracketed

Flags = Mapping[str, Any]

_SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_TRACES = (ANY_TRACE, "timed_trace", *TRACE_FORMATS)
DATASET_NAMES = ("random", "sharegpt", "prefix_repetition", "multi_turn", *_TRACES)
DEFAULT_HTTP, DEFAULT_GRPC = "http://127.0.0.1:8000", "127.0.0.1:50051"


def load_of(flags: Flags) -> LoadConfig:
    dataset, arrivals = _dataset(flags), _arrivals(flags)
    load = LoadConfig(
        base_url=_base_url(flags),
        ca=flags["ca"],
        model=flags["model"],
        backend=flags["backend"],
        endpoint=flags["endpoint"],
        num_prompts=flags["num_prompts"],
        dataset=dataset,
        arrivals=arrivals,
        max_concurrency=_max_concurrency(flags, dataset, arrivals),
        ignore_eos=flags["ignore_eos"],
        temperature=flags["temperature"],
        seed=flags["seed"],
        timeout_s=flags["timeout_s"],
        sends_texts=flags["prompt_form"] == "text",
        extra_body=_extra_body(flags),
        headers=pairs_of("header", flags["header"]),
        request_id_prefix=flags["request_id_prefix"],
        lanes=Mix.parse(flags["lane_mix"]),
        tenants=Mix.parse(flags["tenant_mix"]),
        api_keys=read_keys(flags["api_keys"], flags["api_key"]),
    )
    check_keys(load)
    return load


def run_of(flags: Flags, load: LoadConfig) -> Run:
    reporting = Reporting.parse(flags["goodput"] or (), flags["percentile_metrics"], flags["metric_percentiles"])
    ready_timeout_s, shows_progress = flags["ready_check_timeout_sec"], not flags["disable_tqdm"]
    return Run(load, reporting, flags["num_warmups"], ready_timeout_s, shows_progress)


def saving_of(flags: Flags, load: LoadConfig) -> Saving:
    """A named file is written; `--save-result` alone gets a name that says the load and the time."""
    path: Path | None = flags["result_filename"]
    if path is None and (flags["save_result"] or flags["save_detailed"]):
        path = Path(result_name(load, flags["label"]))
    if path is not None and flags["result_dir"] is not None:
        path = flags["result_dir"] / path
    return Saving(path, flags["save_detailed"], flags["label"], pairs_of("metadata", flags["metadata"]))


def sweep_of(flags: Flags, load: LoadConfig) -> Sweep:
    """Needs the extra `plots`."""
    rates, concurrencies = flags["sweep_request_rates"], flags["sweep_concurrencies"]
    if rates and concurrencies:
        raise ValueError("sweep-request-rates, sweep-concurrencies: a sweep has one axis; leave one of them out")
    axis: Axis = "request_rate" if rates else "max_concurrency"
    if rates and (flags["request_rate"] != math.inf or flags["ramp_up_strategy"] is not None):
        raise ValueError("request-rate, ramp-up-strategy: a sweep over rates has its own; leave them out")
    if flags["peer"]:
        raise ValueError("peer: a sweep compares the servers of --server")
    flag = "sweep-request-rates" if rates else "sweep-concurrencies"
    values = parse_values(flag, rates or concurrencies, is_whole=not rates)
    if rates and flags["max_concurrency"] is None:
        load = replace(load, max_concurrency=None)
    own = Server(flags["label"] or "server", load.base_url)
    servers = tuple(Server.parse(text) for text in flags["server"] or ()) or (own,)
    return Sweep(run_of(flags, load), servers, axis, values, flags["result_dir"] or Path("bench-sweep"))


def pairs_of(flag: str, pairs: Sequence[str] | None) -> dict[str, str]:
    """Of KEY=VALUE. The value is not repeated: in a header it may be a key."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not (equals and name.strip()) or name.strip() in found:
            raise ValueError(f"{flag} {name!r}: must be KEY=VALUE, each key once")
        found[name.strip()] = value.strip()
    return found


def _base_url(flags: Flags) -> str:
    is_grpc = flags["backend"].startswith("grpc")
    if base_url := str(flags["base_url"]):
        base_url = base_url.removeprefix("grpc://") if is_grpc else base_url
        if base_url.startswith("http://") if is_grpc else not base_url.startswith(("http://", "https://")):
            form = "HOST:PORT or https://HOST:PORT" if is_grpc else "http://… or https://…"
            raise ValueError(f"base-url {base_url!r}: of backend {flags['backend']} it must be {form}")
        return base_url
    host, port = flags["host"] or "127.0.0.1", flags["port"]
    if port is None and not flags["host"]:
        return DEFAULT_GRPC if is_grpc else DEFAULT_HTTP
    address = f"{bracketed(host)}:{port or (50051 if is_grpc else 8000)}"
    return address if is_grpc else f"{'https' if flags['ca'] else 'http'}://{address}"


def _arrivals(flags: Flags) -> ArrivalPlan:
    strategy, start, end = (flags[f"ramp_up_{name}"] for name in ("strategy", "start_rps", "end_rps"))
    ramp_up = None
    if strategy is not None:
        if start is None or end is None:
            raise ValueError(f"ramp-up-strategy {strategy}: needs ramp-up-start-rps and ramp-up-end-rps")
        ramp_up = RampUp(strategy, start, end)
    elif start is not None or end is not None:
        raise ValueError("ramp-up-start-rps, ramp-up-end-rps: need ramp-up-strategy, linear or exponential")
    return ArrivalPlan(flags["request_rate"], flags["burstiness"], flags["burst_size"], ramp_up)


def _max_concurrency(flags: Flags, dataset: Dataset, arrivals: ArrivalPlan) -> int | None:
    """Requests with times of their own come at them: a bound that nobody asked for would make them wait here."""
    if flags["max_concurrency"] is not None:
        return int(flags["max_concurrency"])
    return None if arrivals.is_open or dataset.has_times else DEFAULT_MAX_CONCURRENCY


def _extra_body(flags: Flags) -> dict[str, object]:
    sampling = {name: flags[name] for name in _SAMPLING if flags[name] is not None}
    if not flags["extra_body"]:
        return sampling
    try:
        more = json.loads(flags["extra_body"])
    except ValueError as error:
        raise ValueError(f"extra-body: is not JSON: {error}") from error
    if not isinstance(more, dict):
        raise ValueError("extra-body: must be a JSON object")
    return {**sampling, **more}


def _dataset(flags: Flags) -> Dataset:
    path: Path | None = flags["trace"] or flags["dataset_path"]
    name = flags["dataset_name"] or (ANY_TRACE if path is not None else "random")
    if name not in DATASET_NAMES:
        raise ValueError(f"dataset-name {name!r}: must be one of {', '.join(DATASET_NAMES)}")
    if flags["trace"] is not None and name not in _TRACES:
        raise ValueError(f"dataset-name {name}: --trace is a trace; leave one of them out")
    if name not in _TRACES and flags["self_timed"] is not None:
        raise ValueError(f"self-timed: {name} has no times; only a trace has")
    if name == "sharegpt" or name in _TRACES:
        if path is None:
            raise ValueError(f"dataset-name {name}: needs --dataset-path")
        return _of_file(name, path, flags)
    if path is not None:
        raise ValueError(f"dataset-path {path}: {name} reads no file")
    makers: Mapping[str, Callable[[Flags], Dataset]] = {
        "random": _random,
        "prefix_repetition": _prefix_repetition,
        "multi_turn": _multi_turn,
    }
    return makers[name](flags)


def _of_file(name: str, path: Path, flags: Flags) -> Dataset:
    scales = (flags["prompt_scale"], flags["output_scale"])
    if name == "sharegpt":
        return ShareGpt(path, flags["output_len"] or flags["sharegpt_output_len"] or 0, *scales)
    trace_format = name if name in TRACE_FORMATS else ANY_TRACE
    is_self_timed = flags["self_timed"] is not False
    if is_self_timed and (flags["request_rate"] != math.inf or flags["ramp_up_strategy"] is not None):
        raise ValueError("request-rate: the trace has times of its own; --no-self-timed takes its lengths alone")
    return TraceReplay(path, flags["time_scale"], *scales, trace_format, is_self_timed)


def _random(flags: Flags) -> Dataset:
    return RandomPrompts(
        flags["input_len"] or flags["random_input_len"],
        flags["output_len"] or flags["random_output_len"],
        flags["random_range_ratio"],
        flags["random_prefix_len"],
    )


def _prefix_repetition(flags: Flags) -> Dataset:
    return PrefixRepetition(
        flags["prefix_repetition_prefix_len"],
        flags["prefix_repetition_suffix_len"],
        flags["prefix_repetition_num_prefixes"],
        flags["output_len"] or flags["prefix_repetition_output_len"],
    )


def _multi_turn(flags: Flags) -> Dataset:
    user_len = flags["input_len"] or flags["multi_turn_user_len"]
    output_len = flags["output_len"] or flags["multi_turn_output_len"]
    turns, system_len = flags["multi_turn_num_turns"], flags["multi_turn_system_len"]
    return MultiTurn(turns, system_len, user_len, output_len, flags["multi_turn_pause_s"])
