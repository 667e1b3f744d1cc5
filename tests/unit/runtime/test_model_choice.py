"""The model's settings reach every process of a stack as they were given."""

from pathlib import Path

import pytest

from weir.cli.stack.up import detached_command
from weir.runtime.config import ConfigError, ServiceConfig, read_config
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.plan import ProcessSpec, plan_stack


def flag_of(spec: ProcessSpec, name: str) -> str | None:
    return spec.command[spec.command.index(name) + 1] if name in spec.command else None


def specs_of(config: StackConfig) -> list[ProcessSpec]:
    return [spec for spec in plan_stack(config, nats_port=4222).specs if spec.role != "nats"]


def test_dummy_weights_are_named_by_their_shape() -> None:
    config = read_config(ServiceConfig, ["--load", "dummy", "--model-shape", "llama-3.1-8b"], environ={})
    assert config.model_reference == "dummy:llama-3.1-8b"
    assert ServiceConfig(model="smollm2-135m").model_reference == "smollm2-135m"


def test_a_shape_without_dummy_weights_names_its_source() -> None:
    with pytest.raises(ConfigError, match=r"model_shape 'tiny': is for load 'dummy' only.*WEIR_MODEL_SHAPE"):
        read_config(ServiceConfig, [], environ={"WEIR_MODEL_SHAPE": "tiny"})


def test_every_process_of_a_stack_is_told_of_the_same_weights() -> None:
    specs = specs_of(StackConfig(load="dummy", model_shape="tiny"))
    assert {spec.role for spec in specs} == {"transfer", "scheduler", "prefill", "decode", "gateway"}
    assert {(flag_of(spec, "--load"), flag_of(spec, "--model-shape")) for spec in specs} == {("dummy", "tiny")}


@pytest.mark.parametrize("exact", [True, False])
def test_every_process_of_a_stack_is_told_whether_it_is_to_be_exact(exact: bool) -> None:
    stack = StackConfig(device="cuda", exact=exact)
    own_flags = ("--device", "cuda", "--exact" if exact else "--no-exact")
    for spec in specs_of(stack):
        assert set(own_flags) <= set(spec.command)
        common = spec.command[spec.command.index("--model") : spec.command.index("--grace-s")]
        # what the environment and a file say is for the stack, which has read them already
        assert read_config(ServiceConfig, common, environ={"WEIR_EXACT": str(not exact)}).exact is exact
    command = detached_command(stack)
    assert own_flags[-1] in command
    assert not {"True", "False"} & set(command)


def test_exact_is_one_setting_for_flags_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "weir.toml"
    file.write_text('device = "interpreter"\nexact = true\n')
    kinds: tuple[type[ServiceConfig] | type[StackConfig], ...] = (ServiceConfig, StackConfig)
    for kind in kinds:
        assert read_config(kind, [], environ={"WEIR_EXACT": "true"}).exact
        assert read_config(kind, ["--exact"], environ={"WEIR_EXACT": "false"}).exact
        assert read_config(kind, [], environ={}, toml_path=file).exact
        assert not read_config(kind, [], environ={}).exact


def test_a_bound_on_the_context_is_for_those_who_keep_it_and_for_those_whose_model_may_rotate_by_it() -> None:
    specs = specs_of(StackConfig(max_context_tokens=512))
    assert {spec.role: flag_of(spec, "--max-context-tokens") for spec in specs} == {
        "transfer": "512",
        "gateway": "512",
        "scheduler": None,
        "prefill": "512",
        "decode": "512",
    }
    unbounded = specs_of(StackConfig())
    assert {flag_of(spec, "--max-context-tokens") for spec in unbounded if spec.role in ("prefill", "decode")} == {None}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"load": "dummy"}, "needs a model_shape"),
        ({"model_shape": "tiny"}, "is for load 'dummy' only"),
        ({"exact": True, "precision": "fp32"}, "exact: precision fp32 on device cpu is computed by PyTorch"),
        ({"max_context_tokens": -5}, "max_context_tokens -5: must not be negative"),
    ],
)
def test_a_stack_refuses_what_its_services_would(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        StackConfig(**settings)  # type: ignore[arg-type]
