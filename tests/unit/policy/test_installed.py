"""Policies that other distributions bring, by their entry points."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weir.policy.registry import PolicySpec, describe_policy, installed_policies, policy_names

MODULE = "weir_policy_of_a_test"
CODE = """
from dataclasses import dataclass

from weir.policy.keyed_orders import KeyedOrder
from weir.policy.params import bounded
from weir.policy.seams import Policy


@dataclass(frozen=True)
class Params:
    weight: float = bounded(2.0, 0.0, 10.0)


def make(params: Params) -> Policy:
    return Policy("mine", KeyedOrder(lambda request: (-params.weight,)), gate=None, step_budget=None)


def make_of_anything(params):
    return make(Params())
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with these entry points on the path, as pip would."""

    def put(entry_points: str, distribution: str = MODULE) -> None:
        (tmp_path / f"{MODULE}.py").write_text(CODE)
        metadata = tmp_path / f"{distribution}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[weir.policies]\n{entry_points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        installed_policies.cache_clear()

    yield put
    installed_policies.cache_clear()
    sys.modules.pop(MODULE, None)


def test_an_installed_policy_is_named_and_takes_parameters_like_any_other(install: Install) -> None:
    install(f"mine = {MODULE}:make")
    assert "mine" in policy_names()
    assert describe_policy("mine") == "weight: a number in [0, 10], default 2"
    spec = PolicySpec.parse("mine:weight=3")
    assert str(spec) == "mine:weight=3.0"
    assert spec.make().name == "mine"
    with pytest.raises(ValueError, match="no parameter 'height'"):
        PolicySpec.parse("mine:height=3")


def test_nothing_of_it_is_imported_before_it_is_asked_for(install: Install) -> None:
    install(f"mine = {MODULE}:make")
    assert "mine" in policy_names()
    assert PolicySpec("fcfs").make().name == "fcfs"
    assert MODULE not in sys.modules


def test_a_name_of_weirs_own_stays_weirs(install: Install) -> None:
    install(f"fcfs = {MODULE}:make")
    assert PolicySpec("fcfs").make().name == "fcfs"
    assert policy_names().count("fcfs") == 1


def test_a_name_that_two_distributions_declare_is_refused_and_both_are_named(install: Install) -> None:
    install(f"mine = {MODULE}:make\nother = {MODULE}:make", "one-policy")
    install(f"mine = {MODULE}:make", "another-policy")
    both = {f"{MODULE}:make of {distribution}" for distribution in ("one-policy", "another-policy")}
    with pytest.raises(ValueError, match=r"policy 'mine': is declared 2 times, by ") as raised:
        PolicySpec.parse("mine")
    assert all(name in str(raised.value) for name in both)
    assert policy_names().count("mine") == 1
    assert PolicySpec.parse("other").name == "other"


@pytest.mark.parametrize("attribute", ["no_such_function", "make_of_anything", "bounded", "Params"])
def test_what_makes_no_policy_is_refused_by_name(install: Install, attribute: str) -> None:
    install(f"mine = {MODULE}:{attribute}")
    with pytest.raises(ValueError, match=rf"{MODULE}:{attribute}: must be a function make\(params: P\)"):
        PolicySpec.parse("mine")


def test_what_is_not_installed_cannot_be_named() -> None:
    with pytest.raises(ValueError, match="must be one of fcfs, "):
        PolicySpec.parse("os")
