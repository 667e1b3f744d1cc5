"""`weir simulate`: options in, tables or JSON out."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weir.cli.app import app

POISSON = ("simulate", "--rate", "20", "--num-requests", "40", "--prompt-tokens", "100", "--output-tokens", "20")


def weir(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def simulated(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


def test_a_poisson_load_is_shown_as_tables() -> None:
    code, output = weir(*POISSON)
    assert code == 0
    assert "requests/s" in output
    assert "longest queue" in output


def test_json_is_the_same_every_time_and_another_with_another_seed() -> None:
    printed = simulated(*POISSON)
    assert printed == simulated(*POISSON)
    assert printed != simulated(*POISSON, "--seed", "1")


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},t,{10 + i},{5 + i}\n" for i in range(12))
    trace.write_text("arrival_s,tenant,prompt_len,output_len\n" + rows)
    printed = simulated("simulate", str(trace), "--prefill", "1", "--decode", "1")
    # The first tenth counts as warm-up.
    assert (printed["all"]["num_finished"], printed["all"]["local_share"]) == (11, 0.0)


def test_a_worker_that_fails_loses_what_is_on_it() -> None:
    load = (*POISSON, "--local", "2")
    assert simulated(*load)["all"]["num_refused"] == 0
    assert simulated(*load, "--fail", "local-0@0.5")["all"]["num_refused"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("simulate",), "--rate 0"),
        ((*POISSON, "--arrivals", "sometimes"), "--arrivals sometimes"),
        ((*POISSON, "--prefill", "1"), "--prefill 1, --decode 0"),
        ((*POISSON, "--profile", "none"), "'none'"),
        ((*POISSON, "--policy", "none"), "none"),
        ((*POISSON, "--fail", "local-0"), "--fail local-0"),
        ((*POISSON, "--fail", "local-7@1"), "local-7"),
        (("simulate", "no-such-file.csv"), "no-such-file.csv"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: tuple[str, ...], named: str) -> None:
    code, output = weir(*options)
    assert (code, named in output.replace("\n", " ")) == (2, True), output


@pytest.mark.parametrize("command", [POISSON, ("plan", "{trace}", "--profile", "h100-llama3-8b", "--ttft-ms", "500")])
@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (None, 2, "limits.toml: No such file or directory"),
        (b"\x80", 2, "limits.toml: not UTF-8 text"),
        (b"max_queud = 1\n", 1, "max_queud"),
    ],
)
def test_a_limits_file_is_refused_as_every_command_refuses_it(
    tmp_path: Path, command: tuple[str, ...], content: bytes | None, code: int, named: str
) -> None:
    trace, limits = tmp_path / "trace.csv", tmp_path / "limits.toml"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,10\n")
    if content is not None:
        limits.write_bytes(content)
    options = [option.format(trace=trace) for option in command]
    shown = weir(*options, "--limits-file", str(limits))
    assert (shown[0], named in shown[1].replace("\n", " ")) == (code, True), shown
