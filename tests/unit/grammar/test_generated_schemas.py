"""Schemas written by chance, against the engine with random draws: what ends is valid, and what is valid can be said,
byte by byte and in longer tokens. `python -m benchmarks.structured.validity` is the long form."""

import pytest

from benchmarks.structured.drawing import encode_greedily, toy_vocabulary
from benchmarks.structured.engine_checks import EngineChecks, validation_problem
from benchmarks.structured.public import PublicSchema, SuiteVerdict, installed_schemas
from benchmarks.structured.schemas import schema_example
from weir.grammar.protocol import Vocabulary

NUM_SCHEMAS = 40


@pytest.mark.parametrize("vocabulary", [toy_vocabulary(), toy_vocabulary(encode_greedily)], ids=["bytes", "longest"])
def test_what_ends_is_valid_and_what_is_valid_can_be_said(vocabulary: Vocabulary) -> None:
    checks = EngineChecks(vocabulary, draws=1)
    for seed in range(NUM_SCHEMAS):
        checks.check_example(seed, schema_example(seed))
    assert checks.counts.problems == []
    assert checks.counts.num_taken == NUM_SCHEMAS
    assert checks.counts.num_ended > NUM_SCHEMAS / 2
    assert checks.counts.num_documents == NUM_SCHEMAS * 4


def test_schemas_of_installed_packages_are_refused_by_name_or_kept_to(toy: Vocabulary) -> None:
    checks = EngineChecks(toy, draws=1)
    for public in installed_schemas():
        if len(str(public.schema)) < 4000:
            checks.check_public(public)
    assert checks.counts.problems == []
    assert checks.counts.num_taken > 10


def test_the_checks_notice_what_is_wrong(toy: Vocabulary) -> None:
    """A document that is none of the schema's, either way round."""
    checks = EngineChecks(toy, draws=0)
    checks.check_public(PublicSchema("x", {"type": "integer"}, (SuiteVerdict(1, False), SuiteVerdict("a", True))))
    assert (checks.counts.num_wrong_verdicts, checks.counts.num_unsayable) == (1, 2)
    assert validation_problem({"format": "date"}, "2023-02-29") != ""
    assert validation_problem({"maxItems": 1}, [1, 2]) != ""
