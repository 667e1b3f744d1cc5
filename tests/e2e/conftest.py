"""One stack of real processes, with traces on, shared by the tests of this folder."""

from collections.abc import Iterator

import pytest

from weir.testing.otlp import OtlpReceiver
from weir.testing.stack import Stack


@pytest.fixture(scope="session")
def otlp_receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def stack(otlp_receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    runtime_dir = tmp_path_factory.mktemp("run")
    with Stack(runtime_dir, flags=("--otlp-endpoint", otlp_receiver.endpoint)) as stack:
        yield stack
