"""Every wrong field is named, as the user wrote it, before anything costs much."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_model import EOS, MAX_CONTEXT, VOCAB_SIZE, byte_model
from tests.unit.gateway.fake_scheduler import SCOPE

from weir.core.errors import InvalidRequest, NotFound
from weir.core.options import GenerateOptions
from weir.core.sampling import SamplingParams, StopRules
from weir.rpc.conversions import sampling_problems, sampling_to_pb
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.requests.client_request import (
    GRPC_NAMES,
    ClientRequest,
    Conversation,
    Operation,
    Prompt,
    Text,
    TokenIds,
)
from weir_gateway.requests.models import ModelDirectory
from weir_gateway.requests.validation import Limits, check_all_prompts, check_fields, check_prompt

MODEL = byte_model()
LIMITS = Limits(default_max_tokens=64, max_prompt_bytes=1000)
GOOD = ClientRequest(operation=Operation.TEXT_COMPLETION, prompt=Text("hello"), names=GRPC_NAMES)


def changed(prompt: Prompt | None = None, **options: Any) -> ClientRequest:
    return dataclasses.replace(GOOD, prompt=prompt or GOOD.prompt, options=GenerateOptions(**options))


def violations_of(client_request: ClientRequest) -> dict[str, str]:
    """Field -> what is wrong with it."""
    try:
        check_fields(client_request, MODEL, LIMITS)
    except InvalidRequest as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"prompt": Text("")}, "text", "is empty"),
        ({"prompt": Text("x" * 1001)}, "text", "is 1001 bytes; at most 1000"),
        ({"prompt": Text("é" * 501)}, "text", "is 1002 bytes"),
        ({"prompt": TokenIds(())}, "token_ids", "is empty"),
        ({"prompt": TokenIds((1,) * MAX_CONTEXT)}, "token_ids", "is 512 tokens; bytes takes at most 511"),
        ({"prompt": TokenIds((1, VOCAB_SIZE))}, "token_ids", "[1] is 257; must be from 0 to 256"),
        ({"prompt": TokenIds((1, -1))}, "token_ids", "[1] is -1"),
        ({"prompt": Conversation(())}, "messages", "has 0 turns"),
        ({"prompt": Conversation(({"role": "robot", "content": "x"},))}, "messages[0].role", "is 'robot'"),
        ({"prompt": Conversation(({"role": "user", "content": "x" * 1001},))}, "messages", "is 1001 bytes"),
        ({"request_id": "no spaces"}, "options.request_id", "is 'no spaces'"),
        ({"request_id": "x" * 65}, "options.request_id", "1 to 64 characters"),
        ({"lane": "not/a/lane"}, "options.lane", "is 'not/a/lane'"),
        ({"lane": "x" * 65}, "options.lane", "at most 64"),
        ({"cache_salt": "x" * 65}, "options.cache_salt", "has 65 characters; at most 64"),
        ({"temperature": -0.1}, "options.sampling.temperature", "is -0.1; must be from 0 (greedy) to 2"),
        ({"temperature": 2.1}, "options.sampling.temperature", "is 2.1"),
        ({"temperature": math.nan}, "options.sampling.temperature", "is nan"),
        ({"temperature": math.inf}, "options.sampling.temperature", "is inf"),
        ({"top_p": 0.0}, "options.sampling.top_p", "is 0.0; must be from 1e-30 to 1"),
        ({"top_p": 1e-50}, "options.sampling.top_p", "is 1e-50"),
        ({"top_p": 1.5}, "options.sampling.top_p", "is 1.5"),
        ({"top_p": math.nan}, "options.sampling.top_p", "is nan"),
        ({"top_k": -1}, "options.sampling.top_k", "is -1; must be from 0"),
        ({"top_k": 2**31}, "options.sampling.top_k", "is 2147483648"),
        ({"seed": -1}, "options.sampling.seed", "is -1"),
        ({"seed": 2**64}, "options.sampling.seed", "must be from 0 to 18446744073709551615"),
        ({"min_p": 1.5}, "options.sampling.min_p", "is 1.5; must be from 0 (all tokens) to 1"),
        ({"repetition_penalty": 0.1}, "options.sampling.repetition_penalty", "is 0.1; must be from 0.125 to 8"),
        ({"repetition_penalty": math.inf}, "options.sampling.repetition_penalty", "is inf"),
        ({"presence_penalty": 2.5}, "options.sampling.presence_penalty", "is 2.5; must be from -2 to 2"),
        ({"frequency_penalty": -3.0}, "options.sampling.frequency_penalty", "is -3.0; must be from -2 to 2"),
        ({"frequency_penalty": math.nan}, "options.sampling.frequency_penalty", "is nan"),
        ({"logprobs": 21}, "options.sampling.logprobs", "is 21; must be from 0 to 20"),
        ({"logprobs": -1}, "options.sampling.logprobs", "is -1"),
        ({"prompt_logprobs": 21}, "options.sampling.prompt_logprobs", "is 21; must be from 0 to 20"),
        ({"n": 0}, "options.n", "is 0; must be from 1 to 16"),
        ({"n": 17}, "options.n", "is 17"),
        ({"min_tokens": -1}, "options.stop_conditions.min_tokens", "is -1; must be from 0 to 512"),
        ({"min_tokens": 513}, "options.stop_conditions.min_tokens", "is 513"),
        ({"min_tokens": 9, "max_tokens": 8}, "options.stop_conditions.min_tokens", "is 9; must be at most max_tokens"),
        ({"logit_bias": ((5, 100.5),)}, "options.sampling.logit_bias[5]", "is 100.5; must be from -100 to 100"),
        ({"logit_bias": ((5, math.nan),)}, "options.sampling.logit_bias[5]", "is nan"),
        ({"logit_bias": ((257, 1.0),)}, "options.sampling.logit_bias[257]", "must be from 0 to 256"),
        ({"logit_bias": tuple((i, 1.0) for i in range(301))}, "options.sampling.logit_bias", "has 301 tokens"),
        ({"max_tokens": 0}, "options.stop_conditions.max_tokens", "is 0; must be from 1 to 512"),
        ({"max_tokens": -5}, "options.stop_conditions.max_tokens", "is -5"),
        ({"max_tokens": 513}, "options.stop_conditions.max_tokens", "is 513"),
        ({"stop": ("x",) * 17}, "options.stop_conditions.stop", "has 17 strings; at most 16"),
        ({"stop": ("ok", "")}, "options.stop_conditions.stop[1]", "has 0 characters"),
        ({"stop": ("x" * 257,)}, "options.stop_conditions.stop[0]", "has 257 characters; use 1 to 256"),
        ({"stop_token_ids": (1,) * 33}, "options.stop_conditions.stop_token_ids", "has 33 ids; at most 32"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "options.stop_conditions.stop_token_ids", "[0] is 257"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(change: dict[str, Any], field: str, words: str) -> None:
    found = violations_of(changed(**change))
    assert list(found) == [field]
    assert words in found[field]


def test_all_violations_are_found_at_once() -> None:
    found = violations_of(changed(prompt=Text(""), temperature=-1.0, top_p=2.0, max_tokens=0))
    assert set(found) == {
        "text",
        "options.sampling.temperature",
        "options.sampling.top_p",
        "options.stop_conditions.max_tokens",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"top_k": 0},
        {"seed": 2**64 - 1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.125},
        {"repetition_penalty": 8.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"n": 16},
        {"min_tokens": 512},
        {"min_tokens": 8, "max_tokens": 8},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(257))},
        {"max_tokens": 512},
        {"stop": ("x" * 256,) * 16},
        {"stop_token_ids": (VOCAB_SIZE - 1,) * 32},
        {"request_id": "a" * 64},
        {"prompt": TokenIds((0,) * (MAX_CONTEXT - 1))},
        {"prompt": Text("x" * 1000)},
    ],
    ids=str,
)
def test_values_at_their_limits_are_taken(change: dict[str, Any]) -> None:
    assert violations_of(changed(**change)) == {}


numbers = st.none() | st.floats() | st.integers(-(2**70), 2**70).map(float)
integers = st.none() | st.integers(-(2**70), 2**70)
prompts: st.SearchStrategy[Prompt] = (
    st.builds(Text, st.text(st.characters(), max_size=40))
    | st.builds(TokenIds, st.lists(st.integers(-5, 400), max_size=20).map(tuple))
    | st.builds(
        Conversation,
        st.lists(st.fixed_dictionaries({"role": st.text(max_size=9), "content": st.text(max_size=9)}), max_size=3).map(
            tuple
        ),
    )
)


biases = st.lists(st.tuples(st.integers(-5, 400), st.floats()), max_size=9).map(tuple)
any_options = st.builds(
    GenerateOptions,
    request_id=st.text(max_size=70),
    lane=st.text(max_size=70),
    n=integers,
    temperature=numbers,
    top_k=integers,
    top_p=numbers,
    min_p=numbers,
    seed=integers,
    repetition_penalty=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    logit_bias=biases,
    logprobs=integers,
    prompt_logprobs=integers,
    max_tokens=integers,
    min_tokens=integers,
    stop=st.lists(st.text(max_size=300), max_size=20).map(tuple),
    stop_token_ids=st.lists(st.integers(-5, 400), max_size=20).map(tuple),
    ignore_eos=st.booleans(),
)
client_requests = st.builds(
    ClientRequest,
    operation=st.sampled_from(Operation),
    prompt=prompts,
    names=st.just(GRPC_NAMES),
    # mostly sound ones too: of so many numbers one is nearly always wrong
    options=any_options | st.builds(GenerateOptions, temperature=numbers, logit_bias=biases),
)


@given(client_requests)
def test_whatever_comes_is_either_sound_or_refused_by_name(client_request: ClientRequest) -> None:
    if violations_of(client_request):
        return
    checked = check_prompt(client_request, MODEL, LIMITS, [1, 2, 3], SCOPE)
    assert 0 <= checked.sampling.temperature <= 2
    assert 0 < checked.sampling.top_p <= 1
    assert 0 <= checked.sampling.top_k < 2**31
    assert 0 <= checked.sampling.seed < 2**64
    assert 1 <= checked.stop_rules.max_tokens <= MAX_CONTEXT - 3
    assert checked.stop_rules.min_tokens <= checked.stop_rules.max_tokens
    assert all(0 <= token_id < VOCAB_SIZE and -100 <= bias <= 100 for token_id, bias in checked.sampling.logit_bias)
    # what passes here passes at the worker too, whatever the wire's 32-bit floats make of it
    assert sampling_problems(sampling_to_pb(checked.sampling)) == []


def test_defaults_are_filled_in_and_a_seed_is_drawn() -> None:
    first, second = (check_prompt(GOOD, MODEL, LIMITS, [1, 2, 3], SCOPE) for _ in range(2))
    assert first.stop_rules == StopRules(max_tokens=64, stop_token_ids=(EOS,))
    assert first.sampling == SamplingParams(seed=first.sampling.seed)
    assert first.sampling.seed != second.sampling.seed


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    wanted = changed(max_tokens=512)
    assert check_prompt(wanted, MODEL, LIMITS, [1] * 500, SCOPE).stop_rules.max_tokens == 12
    assert check_prompt(GOOD, MODEL, LIMITS, [1] * 511, SCOPE).stop_rules.max_tokens == 1


def test_the_models_end_tokens_are_left_out_when_ignored_and_never_repeated() -> None:
    ignoring = changed(ignore_eos=True, stop_token_ids=(5,))
    assert check_prompt(ignoring, MODEL, LIMITS, [1], SCOPE).stop_rules.stop_token_ids == (5,)
    repeating = changed(stop_token_ids=(5, EOS, 5))
    assert check_prompt(repeating, MODEL, LIMITS, [1], SCOPE).stop_rules.stop_token_ids == (EOS, 5)


@pytest.mark.parametrize(("num_tokens", "words"), [(0, "is empty"), (512, "is 512 tokens; bytes takes at most 511")])
def test_a_prompt_that_tokenizes_to_nothing_or_too_much_is_refused(num_tokens: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"text: {words}"):
        check_prompt(GOOD, MODEL, LIMITS, [1] * num_tokens, SCOPE)


def test_an_unknown_model_is_not_found_and_none_means_the_only_one() -> None:
    models = ModelDirectory([MODEL])
    assert models.find("", "options.model") is MODEL
    assert models.find("bytes", "options.model") is MODEL
    with pytest.raises(NotFound, match=r"options.model: 'nope' is not served here; one of bytes is") as missing:
        models.find("nope", "options.model")
    assert missing.value.field == "options.model"


def test_how_many_log_probabilities_of_a_prompt_may_come_is_bounded() -> None:
    limits = dataclasses.replace(LIMITS, max_prompt_logprobs=30)
    checked = [check_prompt(changed(prompt_logprobs=2), MODEL, limits, [1] * num, SCOPE) for num in (4, 6, 1)]
    check_all_prompts(checked[:2], limits)
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs: is 2; 11 tokens .* are 33, at most 30"):
        check_all_prompts(checked, limits)


def test_min_tokens_is_cut_with_max_tokens() -> None:
    rules = check_prompt(changed(max_tokens=100, min_tokens=50), MODEL, LIMITS, [1] * 500, SCOPE).stop_rules
    assert (rules.max_tokens, rules.min_tokens) == (12, 12)


def test_every_option_has_a_name_for_errors() -> None:
    not_named = {
        "include_stop",
        "ignore_eos",
        "skips_prefix_cache",
        "partial_at_deadline",
    }  # yes or no: nothing can be wrong
    options = {field.name for field in dataclasses.fields(GenerateOptions)} - not_named
    assert options <= set(GRPC_NAMES)
    assert options <= set(HTTP_NAMES)
