"""One stack of real processes, with traces on, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.testing.otlp import OtlpReceiver
from weir.testing.stack import Stack


@pytest.fixture(scope="session")
def otlp_receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def limits_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty, which means the limits that the flags say, but for tests that write it."""
    path = tmp_path_factory.mktemp("limits") / "limits.toml"
    path.write_text("")
    return path


@pytest.fixture(scope="session")
def stack(otlp_receiver: OtlpReceiver, limits_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    runtime_dir = tmp_path_factory.mktemp("run")
    flags = ("--otlp-endpoint", otlp_receiver.endpoint, "--limits-file", str(limits_path))
    # Which way a short prompt goes depends on what else runs; tests that count look at the split way.
    with Stack(runtime_dir, flags=flags, environ={"WEIR_SERVES_LOCALLY": "false"}) as stack:
        yield stack
