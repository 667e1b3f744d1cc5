"""Options and parameters cross the wire by name: all of them, and nothing else."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.errors import InvalidRequest
from weir.core.grammar import GRAMMAR_KINDS, Grammar
from weir.core.options import NUMBER_RULES, GenerateOptions, grpc_names
from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.rpc.conversions import (
    OPTIONAL_SAMPLING,
    logprobs_from_pb,
    logprobs_to_pb,
    options_from_pb,
    options_to_pb,
    sampling_from_pb,
    sampling_problems,
    sampling_to_pb,
)
from weir.wire.v1 import inference_pb2, types_pb2

UINT32 = st.integers(0, 2**32 - 1)
FLOATS = st.floats(allow_nan=False, width=32)
BIASES = st.dictionaries(UINT32, FLOATS, max_size=4).map(lambda biases: tuple(sorted(biases.items())))
TEXTS = st.text(max_size=8)
OPTIONS = st.builds(
    GenerateOptions,
    model=TEXTS,
    lane=TEXTS,
    request_id=TEXTS,
    cache_salt=TEXTS,
    **{
        rule.name: st.none() | (st.integers(0, 2**64 - 1) if rule.name == "seed" else UINT32)
        for rule in NUMBER_RULES
        if isinstance(rule.lowest, int)
        and rule.name not in ("temperature", "min_p", "presence_penalty", "frequency_penalty")
    },
    temperature=st.none() | FLOATS,
    top_p=st.none() | FLOATS,
    min_p=st.none() | FLOATS,
    repetition_penalty=st.none() | FLOATS,
    presence_penalty=st.none() | FLOATS,
    frequency_penalty=st.none() | FLOATS,
    logit_bias=BIASES,
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GRAMMAR_KINDS), TEXTS),
    stop=st.lists(TEXTS, max_size=3).map(tuple),
    stop_token_ids=st.lists(UINT32, max_size=3).map(tuple),
    include_stop=st.booleans(),
    ignore_eos=st.booleans(),
    skips_prefix_cache=st.booleans(),
    partial_at_deadline=st.booleans(),
)


@given(OPTIONS)
def test_options_come_back_as_they_were(options: GenerateOptions) -> None:
    message = inference_pb2.RequestOptions.FromString(options_to_pb(options).SerializeToString())
    assert options_from_pb(message) == options


def test_what_is_left_out_is_absent() -> None:
    assert options_to_pb(GenerateOptions()).ByteSize() <= len(b"\x22\x00\x2a\x00")  # two empty messages
    assert options_from_pb(inference_pb2.RequestOptions()) == GenerateOptions()


def test_every_field_of_the_wire_is_an_option_and_the_other_way_round() -> None:
    messages = (inference_pb2.RequestOptions, types_pb2.SamplingParams, inference_pb2.StopConditions)
    on_the_wire = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    assert on_the_wire - {"sampling", "stop_conditions"} == {field.name for field in fields(GenerateOptions)}
    paths = set(grpc_names().values())
    for rule in NUMBER_RULES:
        group = (
            inference_pb2.RequestOptions() if not rule.group else getattr(inference_pb2.RequestOptions(), rule.group)
        )
        assert rule.name in {field.name for field in group.DESCRIPTOR.fields}
        assert f"options.{rule.group}.{rule.name}".replace("..", ".") in paths


def test_every_sampling_parameter_crosses() -> None:
    changed: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "seed": 2**64 - 1,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "logit_bias": ((3, -100.0), (5, 1.5)),
        "logprobs": 0,
        "prompt_logprobs": 20,
        "grammar": Grammar("regex", "é+"),
    }
    assert set(changed) == {field.name for field in fields(SamplingParams)}
    for name, value in changed.items():
        params = replace(SamplingParams(), **{name: value})
        assert sampling_from_pb(sampling_to_pb(params)) == params
        assert sampling_problems(sampling_to_pb(params)) == []


def test_a_kind_of_grammar_that_is_not_known_is_named_and_never_a_free_answer() -> None:
    message = sampling_to_pb(SamplingParams(logprobs=1, prompt_logprobs=1))
    message.grammar.kind = 9  # type: ignore[assignment]  # of a newer peer
    message.grammar.source = "a"
    assert sampling_problems(message) == [("grammar.kind", "is 9; must be from 1 to 4")]
    grammar = sampling_from_pb(message).grammar
    assert grammar is not None
    assert grammar.source == ""


def test_an_absent_parameter_is_named_but_those_that_are_questions() -> None:
    named = [name for name, problem in sampling_problems(types_pb2.SamplingParams()) if problem == "must be given"]
    assert named == [
        rule.name for rule in NUMBER_RULES if rule.group == "sampling" and rule.name not in OPTIONAL_SAMPLING
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GenerateOptions(n=-1), "n: is -1; must be from 1 to 16"),
        (GenerateOptions(top_k=-1), r"top_k: is -1; must be from 0 \(all tokens\) to 2147483647"),
        (GenerateOptions(logprobs=2**32), "logprobs: is 4294967296; must be from 0 to 20"),
        (GenerateOptions(min_tokens=-3), "min_tokens: is -3; must be from 0 to the model's context$"),
        (GenerateOptions(logit_bias=((-1, 2.0),)), r"logit_bias\[-1\]: is -1"),
        (GenerateOptions(temperature="hot"), "temperature: is 'hot'; must be a number of its kind"),  # type: ignore[arg-type]
    ],
)
def test_what_the_wire_cannot_carry_is_named_before_it_is_sent(options: GenerateOptions, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        options_to_pb(options)


@given(st.builds(TokenLogprobs, UINT32, FLOATS, UINT32, st.lists(st.tuples(UINT32, FLOATS), max_size=20).map(tuple)))
def test_log_probabilities_come_back_as_they_were(logprobs: TokenLogprobs) -> None:
    message = types_pb2.TokenLogprobs.FromString(logprobs_to_pb(logprobs).SerializeToString())
    assert logprobs_from_pb(message) == logprobs
