"""What a gateway asks of a prompt is what the engine works with."""

from tests.unit.worker.rig import MAX_CONTEXT_TOKENS, VOCAB_SIZE, start_command

from weir.core.life import SchedulingParams
from weir.core.sampling import SamplingParams, StopRules
from weir.rpc.conversions import sampling_to_pb
from weir.wire.v1 import types_pb2
from weir.worker.engine.model_loading import ModelSpec
from weir.worker.requests.commands import start_from_pb

MODEL = ModelSpec("hash", VOCAB_SIZE, MAX_CONTEXT_TOKENS, digest="digest", page_bytes=64)
PARAMS = SamplingParams(
    0.5,
    top_k=7,
    top_p=0.25,
    seed=2**64 - 1,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((3, -100.0), (9, 2.5)),
    logprobs=4,
)


def test_sampling_stop_rules_and_urgency_are_those_of_the_start() -> None:
    start = start_command(
        "decode-0-00000000",
        sampling=sampling_to_pb(PARAMS),
        max_tokens=30,
        min_tokens=8,
        stop_token_ids=[4, 5],
        scheduling=types_pb2.SchedulingParams(
            lane_priority=2, rank=-1.5, itl_target_ms=70, predicted_output_tokens=12.5
        ),
        keep_ms=30_000,
    )
    params = start_from_pb(start, "gateway-0-00000000", MODEL).params
    assert params.sampling == PARAMS
    assert params.stop == StopRules(30, (4, 5), 8)
    assert params.scheduling == SchedulingParams(2, -1.5, 70, 12.5)
    assert params.prefix_seed != b""
    assert params.decode_worker_id == "decode-0-00000000"
    assert params.keep_ms == 30_000


def test_more_tokens_than_the_vocabulary_has_are_all_of_them() -> None:
    start = start_command("decode-0-00000000", sampling=sampling_to_pb(SamplingParams(top_k=2**31 - 1)))
    assert start_from_pb(start, "g", MODEL).params.sampling.top_k == VOCAB_SIZE


def test_a_prompt_that_is_scored_has_no_place_in_the_prefix_cache() -> None:
    start = start_command("decode-0-00000000", sampling=sampling_to_pb(SamplingParams(prompt_logprobs=0)))
    assert start_from_pb(start, "g", MODEL).params.prefix_seed == b""
