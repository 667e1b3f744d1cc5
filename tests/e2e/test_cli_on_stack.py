"""The commands of the README against a running stack."""

import json
from pathlib import Path

import pytest

from weir.testing.stack import Stack

pytestmark = pytest.mark.stack


def test_generate_says_that_paris_is_the_capital_of_france(stack: Stack) -> None:
    shown = stack.weir(
        *("generate", "--address", stack.grpc_address, "--temperature", "0", "--max-tokens", "24"),
        "The capital of France is",
    )
    assert shown.returncode == 0, shown.stderr
    assert "Paris" in shown.stdout


def test_generate_resumes_a_half_done_output_file(stack: Stack, tmp_path: Path) -> None:
    prompts = [f"{number} plus {number} is" for number in range(6)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    command = (
        *("generate", "--address", stack.grpc_address, "--temperature", "0", "--max-tokens", "4"),
        *("--input", str(source), "--output", str(output)),
    )
    first = stack.weir(*command)
    assert first.returncode == 0, first.stderr
    whole = output.read_text().splitlines()
    assert len(whole) == len(prompts)
    accepted_before = stack.metric("gateway", "accepted_total")

    output.write_text("\n".join(whole[:2]) + "\n" + whole[2][:10])
    again = stack.weir(*command)

    assert again.returncode == 0, again.stderr
    assert sorted(output.read_text().splitlines()) == sorted(whole)
    assert stack.metric("gateway", "accepted_total") - accepted_before == len(prompts) - 2


def test_status_names_every_process_and_finds_their_books_in_order(stack: Stack) -> None:
    roles = sorted(process.role for process in stack.processes())
    assert roles == ["decode", "gateway", "nats", "prefill", "scheduler", "transfer"]
    assert stack.integrity_errors() == []
