"""A password in the URL of the NATS server: the processes get it, and nobody else on the machine sees it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.runtime.stacks import fake_spec

from weir.cli.stack.up import detached_command
from weir.runtime.config import ConfigError, ServiceConfig, read_config
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.plan import plan_stack
from weir.runtime.stack.starter import ProcessStarter
from weir.runtime.stack.supervised import StartPolicy, SupervisedProcess

URL = "nats://weir:s3cret@10.0.0.1:4222"


def test_a_plan_names_the_password_to_the_processes_alone(tmp_path: Path) -> None:
    plan = plan_stack(StackConfig(nats=URL, runtime_dir=tmp_path), nats_port=1)
    assert {spec.role for spec in plan.specs} == {"transfer", "scheduler", "prefill", "decode", "gateway"}
    for spec in plan.specs:
        assert not any("s3cret" in part for part in spec.command)
        assert read_config(ServiceConfig, [], environ=spec.environ).nats_url == URL
    assert plan.endpoints["NATS"] == "nats://***@10.0.0.1:4222"
    assert "s3cret" not in repr(plan)


def test_the_command_line_of_a_detached_stack_has_no_password() -> None:
    command = detached_command(StackConfig(nats=URL))
    assert "--grpc-port" in command
    assert not any("s3cret" in part for part in command)


def test_an_error_that_names_a_url_has_no_password() -> None:
    for flag, kind in (("--nats-url", ServiceConfig), ("--nats", StackConfig)):
        with pytest.raises(ConfigError, match="must start with nats:// or tls://") as refused:
            read_config(kind, [flag, "weir:s3cret@10.0.0.1:4222"], environ={})
        assert "***@10.0.0.1:4222" in refused.value.message
        assert "s3cret" not in refused.value.message


async def test_a_process_has_the_environment_of_its_plan_over_that_of_its_supervisor(tmp_path: Path) -> None:
    paths = InstancePaths(tmp_path / "a")
    paths.make()
    spec = replace(fake_spec(paths, "decode-0"), environ={"WEIR_NATS_URL": URL})
    outer = {"WEIR_NATS_URL": "nats://other:1", "KEPT": "yes"}
    supervised = SupervisedProcess(spec, StartPolicy(), ProcessStarter(outer), lambda _: None, lambda what, error: None)
    running = asyncio.create_task(supervised.run())
    try:
        await asyncio.wait_for(supervised.ready.wait(), 20)
        identity = supervised.state.identity
        assert identity is not None
        process = Path(f"/proc/{identity.pid}")
        variables = process.joinpath("environ").read_bytes().split(b"\0")
        assert f"WEIR_NATS_URL={URL}".encode() in variables
        assert b"WEIR_NATS_URL=nats://other:1" not in variables
        assert b"KEPT=yes" in variables
        assert b"s3cret" not in process.joinpath("cmdline").read_bytes()
        assert "s3cret" not in repr(supervised.state)
    finally:
        await supervised.stop(5.0)
        await running
