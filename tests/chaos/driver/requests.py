"""The requests of a run, and what an answer must be beside its undisturbed one."""

import random
from collections.abc import Callable

import grpc

from weir.testing.load import StreamRecord, greedy_request
from weir.wire.v1 import inference_pb2


def make_requests(seed: int, num_requests: int) -> list[inference_pb2.GenerateRequest]:
    """Greedy and seeded ones; some with stop texts, penalties, log-probabilities, long prompts."""
    source = random.Random(seed)
    requests = []
    for index in range(num_requests):
        num_prompt_tokens = source.choice([5, 40, 40, 120, 120, 500])
        prompt = [source.randrange(100, 40_000) for _ in range(num_prompt_tokens)]
        request = greedy_request(prompt, max_tokens=source.choice([15, 40, 100]), ignore_eos=index % 3 > 0)
        sampling = request.options.sampling
        if index % 2:
            sampling.temperature, sampling.seed, sampling.top_p = 0.9, index, 0.95
        if index % 4 == 1:
            sampling.presence_penalty, sampling.repetition_penalty = 0.6, 1.2
        if index % 5 == 2:
            request.options.stop_conditions.stop.append(" the")
        if index % 6 == 3:
            sampling.logprobs = 3
        requests.append(request)
    return requests


def try_find_problem(record: StreamRecord, expected: StreamRecord, *, is_part: bool) -> str | None:
    """None: the stream is what it was undisturbed, or, where only a part is asked for, the beginning of that."""
    num_tokens = len(record.token_ids)
    checks: list[tuple[Callable[[], bool], str]] = [
        (lambda: record.num_terminal_events == 1, f"{record.num_terminal_events} terminal events"),
        (lambda: record.num_index_errors == 0, f"{record.num_index_errors} gaps or repeats"),
        (
            lambda: record.token_ids == expected.token_ids[:num_tokens],
            f"tokens {record.token_ids[-8:]} end a wrong beginning of {num_tokens}",
        ),
        (lambda: record.logprobs == expected.logprobs[: len(record.logprobs)], "other log-probabilities"),
    ]
    if is_part:
        checks.append((lambda: expected.text.startswith(record.text), f"text {record.text[-40:]!r}"))
    else:
        checks += [
            (lambda: record.code is grpc.StatusCode.OK, f"{record.code.name} {record.details}"),
            (lambda: num_tokens == len(expected.token_ids), f"{num_tokens} of {len(expected.token_ids)} tokens"),
            (lambda: len(record.logprobs) == len(expected.logprobs), f"{len(record.logprobs)} log-probabilities"),
            (lambda: record.text == expected.text, f"text {record.text[-40:]!r}, not {expected.text[-40:]!r}"),
            (lambda: record.finish_reasons == expected.finish_reasons, f"ends {record.finish_reasons}"),
        ]
    return next((problem for holds, problem in checks if not holds()), None)
