"""Every wrong field is named, as the user wrote it, before anything costs much."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_model import EOS, MAX_CONTEXT, VOCAB_SIZE, byte_model

from weir.core.errors import InvalidRequest, NotFound
from weir.core.sampling import SamplingParams, StopRules
from weir_gateway.draft import GRPC_NAMES, Conversation, Operation, Prompt, RequestDraft, Text, TokenIds
from weir_gateway.models import ModelDirectory
from weir_gateway.validation import Limits, check_fields, check_prompt

MODEL = byte_model()
LIMITS = Limits(default_max_tokens=64, max_prompt_bytes=1000)
GOOD = RequestDraft(operation=Operation.TEXT_COMPLETION, prompt=Text("hello"), names=GRPC_NAMES)


def violations_of(draft: RequestDraft) -> dict[str, str]:
    """Field -> what is wrong with it."""
    try:
        check_fields(draft, MODEL, LIMITS)
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
        ({"max_tokens": 0}, "options.stop_conditions.max_tokens", "is 0; must be from 1 to 512"),
        ({"max_tokens": -5}, "options.stop_conditions.max_tokens", "is -5"),
        ({"max_tokens": 513}, "options.stop_conditions.max_tokens", "is 513"),
        ({"stop": ("x",) * 17}, "options.stop_conditions.stop", "has 17 strings; at most 16"),
        ({"stop": ("ok", "")}, "options.stop_conditions.stop[1]", "has 0 characters"),
        ({"stop": ("x" * 257,)}, "options.stop_conditions.stop[0]", "has 257 characters; use 1 to 256"),
        ({"stop_token_ids": (1,) * 17}, "options.stop_conditions.stop_token_ids", "has 17 ids; at most 16"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "options.stop_conditions.stop_token_ids", "[0] is 257"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(change: dict[str, object], field: str, words: str) -> None:
    found = violations_of(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert list(found) == [field]
    assert words in found[field]


def test_all_violations_are_found_at_once() -> None:
    found = violations_of(dataclasses.replace(GOOD, prompt=Text(""), temperature=-1.0, top_p=2.0, max_tokens=0))
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
        {"max_tokens": 512},
        {"stop": ("x" * 256,) * 16},
        {"stop_token_ids": (VOCAB_SIZE - 1,) * 16},
        {"request_id": "a" * 64},
        {"prompt": TokenIds((0,) * (MAX_CONTEXT - 1))},
        {"prompt": Text("x" * 1000)},
    ],
    ids=str,
)
def test_values_at_their_limits_are_taken(change: dict[str, object]) -> None:
    assert violations_of(dataclasses.replace(GOOD, **change)) == {}  # type: ignore[arg-type]


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


drafts = st.builds(
    RequestDraft,
    operation=st.sampled_from(Operation),
    prompt=prompts,
    names=st.just(GRPC_NAMES),
    request_id=st.text(max_size=70),
    lane=st.text(max_size=70),
    temperature=numbers,
    top_k=integers,
    top_p=numbers,
    seed=integers,
    max_tokens=integers,
    stop=st.lists(st.text(max_size=300), max_size=20).map(tuple),
    stop_token_ids=st.lists(st.integers(-5, 400), max_size=20).map(tuple),
    ignore_eos=st.booleans(),
)


@given(drafts)
def test_whatever_comes_is_either_sound_or_refused_by_name(draft: RequestDraft) -> None:
    if violations_of(draft):
        return
    checked = check_prompt(draft, MODEL, LIMITS, [1, 2, 3])
    assert 0 <= checked.sampling.temperature <= 2
    assert 0 < checked.sampling.top_p <= 1
    assert 0 <= checked.sampling.top_k < 2**31
    assert 0 <= checked.sampling.seed < 2**64
    assert 1 <= checked.stop_rules.max_tokens <= MAX_CONTEXT - 3
    assert len(checked.stop_rules.stop_token_ids) <= 32


def test_defaults_are_filled_in_and_a_seed_is_drawn() -> None:
    first, second = (check_prompt(GOOD, MODEL, LIMITS, [1, 2, 3]) for _ in range(2))
    assert first.stop_rules == StopRules(max_tokens=64, stop_token_ids=(EOS,))
    assert first.sampling == SamplingParams(1.0, 0, 1.0, first.sampling.seed)
    assert first.sampling.seed != second.sampling.seed


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    wanted = dataclasses.replace(GOOD, max_tokens=512)
    assert check_prompt(wanted, MODEL, LIMITS, [1] * 500).stop_rules.max_tokens == 12
    assert check_prompt(GOOD, MODEL, LIMITS, [1] * 511).stop_rules.max_tokens == 1


def test_the_models_end_tokens_are_left_out_when_ignored_and_never_repeated() -> None:
    ignoring = dataclasses.replace(GOOD, ignore_eos=True, stop_token_ids=(5,))
    assert check_prompt(ignoring, MODEL, LIMITS, [1]).stop_rules.stop_token_ids == (5,)
    repeating = dataclasses.replace(GOOD, stop_token_ids=(5, EOS, 5))
    assert check_prompt(repeating, MODEL, LIMITS, [1]).stop_rules.stop_token_ids == (EOS, 5)


@pytest.mark.parametrize(("num_tokens", "words"), [(0, "is empty"), (512, "is 512 tokens; bytes takes at most 511")])
def test_a_prompt_that_tokenizes_to_nothing_or_too_much_is_refused(num_tokens: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"text: {words}"):
        check_prompt(GOOD, MODEL, LIMITS, [1] * num_tokens)


def test_an_unknown_model_is_not_found_and_none_means_the_only_one() -> None:
    models = ModelDirectory([MODEL])
    assert models.find("", "options.model") is MODEL
    assert models.find("bytes", "options.model") is MODEL
    with pytest.raises(NotFound, match=r"options.model: 'nope' is not served here; one of bytes is") as missing:
        models.find("nope", "options.model")
    assert missing.value.field == "options.model"
