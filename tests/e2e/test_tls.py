"""Processes that meet by TCP and prove who they are."""

from collections.abc import Iterator

import pytest
from tests.chaos.hosts import Cluster
from tests.e2e.certified import Lab

from weir.client import GenerateOptions, WeirClient

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("run"), certified=lab) as cluster:
        cluster.add_host("one")
        yield cluster


def test_a_request_goes_through(cluster: Cluster, lab: Lab) -> None:
    with WeirClient(cluster.grpc_address, ca=str(lab.ca)) as client:
        chunks = list(client.generate("The sky is", GenerateOptions(max_tokens=8, ignore_eos=True)))
    assert chunks[-1].num_output_tokens == 8
    assert cluster.integrity_errors() == []
