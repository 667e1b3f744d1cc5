"""`weir limits check`, `weir limits key`, `weir policy list`: what needs no stack."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.core.credentials import key_digest
from weir.policy.registry import policy_names

FILE = '[tenants.acme]\nweight = 2\napi_key_digests = ["%s"]\n' % ("ab" * 32)


def weir(*arguments: str, typed: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), input=typed)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (FILE, 0, "lanes interactive, standard, batch; 1 tenants, 1 keys, 0 admin keys"),
        (FILE, 0, "only who started the stack changes limits"),
        ('admin_key_digests = ["%s"]\n' % ("cd" * 32) + FILE, 0, "1 keys, 1 admin keys"),
        (FILE + "wieght = 2\n", 1, "tenants.acme.wieght"),
        ("[tenants.acme]\nweight = 0\n", 1, "weight 0"),
        ("[[", 1, "not TOML"),
    ],
)
def test_a_file_is_checked_without_a_stack(tmp_path: Path, content: str, code: int, named: str) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(content)
    found, output = weir("limits", "check", str(path))
    assert (found, named in output) == (code, True), output


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    assert weir("limits", "check", str(tmp_path / "none.toml"))[0] == 2


def test_a_key_is_made_with_the_digest_that_belongs_into_the_file() -> None:
    code, output = weir("limits", "key")
    made = re.fullmatch(r"key +(\S+)\ndigest +([0-9a-f]{64})\n", output)
    assert code == 0
    assert made is not None
    assert key_digest(made[1]).hex() == made[2]
    assert weir("limits", "key", "--digest", typed=made[1] + "\n") == (0, made[2] + "\n")


def test_a_short_key_is_not_digested_and_not_repeated() -> None:
    code, output = weir("limits", "key", "--digest", typed="hunter2\n")
    assert code == 2
    assert "hunter2" not in output


@pytest.mark.parametrize("settings", [["lanes.batch.max_queued"], ["=1"], ["lane_order=strict", "lane_order=weighted"]])
def test_settings_that_say_nothing_or_one_thing_twice_are_wrong_usage(settings: list[str]) -> None:
    assert weir("limits", "set", *settings, "--scheduler", "127.0.0.1:1")[0] == 2


@pytest.mark.parametrize(
    "command",
    [("limits", "show", "--admin-key"), ("policy", "set", "fcfs", "--admin-key"), ("generate", "x", "--api-key")],
)
def test_a_key_that_no_header_can_carry_is_wrong_usage_and_not_repeated(command: tuple[str, ...]) -> None:
    code, output = weir(*command, "schl\u00fcssel-schl\u00fcssel")
    assert (code, "printable ASCII" in output, "schl" in output) == (2, True, False)


def test_every_policy_is_listed_with_its_parameters() -> None:
    code, output = weir("policy", "list")
    assert code == 0
    assert [line.partition(":")[0] for line in output.splitlines()] == list(policy_names())
    assert "max_age: a number in [0, 1], default 0.8" in output


def test_a_policy_that_there_is_not_is_wrong_usage_before_anybody_is_asked() -> None:
    code, output = weir("policy", "set", "nonsense", "--scheduler", "127.0.0.1:1")
    assert (code, "must be one of fcfs" in output) == (2, True)


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    code, output = weir("policy", "show", "--scheduler", "127.0.0.1:1")
    assert (code, "error:" in output) == (1, True)


def test_an_instance_that_does_not_run_is_named_with_what_to_do(tmp_path: Path) -> None:
    code, output = weir("limits", "show", "--instance", "none", "--runtime-dir", str(tmp_path))
    assert (code, "none is not running here; start it with `weir up`" in output) == (3, True)
