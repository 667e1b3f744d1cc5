"""Output lengths in a gateway: what is submitted, what is learned, and that no predictor can hurt a request."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.gateway.fake_model import ByteTokenizer
from tests.unit.gateway.fake_workers import LENGTH, update
from tests.unit.gateway.world import World, open_world
from tests.unit.predictors.words import QUICK, samples_of, word_table

from weir.client import AsyncWeirClient, GenerateOptions
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.predictor import Predictions, Predictor
from weir.policy.predictors.predictor_file import save_predictor
from weir.policy.predictors.token_table import make_token_table
from weir.runtime.config import ConfigError
from weir.sim.workloads.traces import read_trace
from weir.training.make import train_predictor
from weir.training.samples import Samples
from weir_gateway.config import GatewayConfig
from weir_gateway.output_lengths import OutputLengths, PredictionLimits, PredictionQueue, load_lengths
from weir_gateway.request_log import RequestLog, RequestLogSettings
from weir_gateway.requests.validation import OutputPrediction

OPTIONS = GenerateOptions(max_tokens=50, temperature=0.0)
ANSWER_TOKENS = len("hello world") + 1
MODEL = "dummy:tiny"


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """Bytes from "n" on mean long answers."""
    source = np.random.default_rng(0)
    vectors = source.normal(size=(257, 4)).astype(np.float32)
    vectors[ord("n") :, 0] += 8
    table = make_token_table(vectors, ByteTokenizer().token_bytes)
    is_long = source.integers(2, size=150).astype(bool)
    prompts = [source.integers(*((110, 123) if long else (97, 110)), 8).tolist() for long in is_long]
    lengths = np.where(is_long, 40, 8) + source.integers(0, 4, 150)
    return train_predictor(table, Samples(PromptFeatures(table).of(prompts), lengths), "bytes", settings=QUICK)


async def ask(world: World, text: str, options: GenerateOptions = OPTIONS) -> str:
    async with AsyncWeirClient(world.grpc_address) as client:
        return "".join([chunk.text async for chunk in client.generate(text, options)])


async def test_what_is_predicted_is_submitted(predictor: Predictor) -> None:
    async with open_world(lengths=OutputLengths(predictor)) as world:
        assert await ask(world, "zzzzzzzz") == await ask(world, "aaaaaaaa") == "hello world"
        long, short = world.scheduler.submits
        assert long.predicted_output_tokens > 2 * short.predicted_output_tokens > 0
        assert long.output_score is not None
        assert short.output_score is not None
        assert short.output_score > long.output_score, "higher is shorter"
        assert world.metric("predictions_made_total") == 2


async def test_nothing_is_predicted_without_a_predictor() -> None:
    async with open_world() as world:
        await ask(world, "zzzz")
        (submit,) = world.scheduler.submits
        assert (submit.predicted_output_tokens, submit.output_score) == (0.0, None)
        assert "predictions_made_total" not in world.gateway.describe().metrics


async def test_a_prediction_is_never_above_what_may_be_sampled(predictor: Predictor) -> None:
    async with open_world(lengths=OutputLengths(predictor)) as world:
        await ask(world, "zzzzzzzz", replace(OPTIONS, max_tokens=5))
        assert world.scheduler.submits[0].predicted_output_tokens == 5


async def test_a_clients_estimate_comes_before_the_predictors(predictor: Predictor) -> None:
    async with open_world(lengths=OutputLengths(predictor)) as world:
        for text, estimate in (("zzzzzzzz", 9), ("aaaaaaaa", 39)):
            await ask(world, text, replace(OPTIONS, expected_output_tokens=estimate))
        short, long = world.scheduler.submits
        assert short.predicted_output_tokens == 9
        assert short.output_score is not None
        assert long.output_score is not None
        assert short.output_score > long.output_score
        assert world.metric("predictions_made_total") == 0


async def test_a_tenant_that_claims_too_little_is_believed_less_and_less() -> None:
    async with open_world(lengths=OutputLengths()) as world:
        for _ in range(25):
            await ask(world, "zzzz", replace(OPTIONS, expected_output_tokens=1))
        submits = world.scheduler.submits
        assert submits[0].predicted_output_tokens == 1
        assert submits[-1].predicted_output_tokens > 0.75 * (ANSWER_TOKENS - 1)
        assert submits[-1].expected_output_tokens == 1


async def test_predictions_drift_to_what_is_seen(predictor: Predictor) -> None:
    async with open_world(lengths=OutputLengths(predictor)) as world:
        for _ in range(12):
            await ask(world, "zzzzzzzz")
        first, *_, last = world.scheduler.submits
        assert last.predicted_output_tokens < first.predicted_output_tokens
        assert last.output_score == first.output_score
        assert world.metric("prediction_factor") < 1


class Failing(Predictor):
    """One that has lost its mind, after its cost was measured."""

    num_calls = 0

    def predict(self, prompts: Sequence[Sequence[int]]) -> Predictions:
        self.num_calls += 1
        if self.num_calls > 20:
            raise ValueError("lost my mind")
        return super().predict(prompts)


async def test_a_failing_predictor_fails_no_request(predictor: Predictor, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(predictor.features, predictor.head, predictor.info)
    async with open_world(lengths=OutputLengths(failing)) as world:
        assert await ask(world, "zzzzzzzz") == "hello world"
        assert await ask(world, "zzzzzzzz") == "hello world"
        assert world.metric("predictions_failed_total") == 2
        assert world.scheduler.submits[0].predicted_output_tokens == 0.0
    assert len([record for record in caplog.records if "output-length predictor failed" in record.message]) == 1


async def test_ended_requests_are_logged_and_cancelled_ones_are_not(tmp_path: Path) -> None:
    log = RequestLog(RequestLogSettings(tmp_path / "log", 1 << 20, keeps_tokens=True), None)
    async with open_world(lengths=OutputLengths(log=log)) as world:
        await ask(world, "abc")
        await ask(world, "abc", replace(OPTIONS, max_tokens=3))
        world.pair.stops_after = 2
        with pytest.raises(Exception, match=r"(?i)deadline"):
            await ask_briefly(world, "abc")
        await world.until(lambda: world.metric("request_log_written_total") == 2, "the log is written")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["num_output_tokens"], line["is_cut"], line["max_tokens"]) for line in lines] == [
        (len("hello world"), False, 50),
        (3, True, 3),
    ]
    assert lines[0]["prompt_token_ids"] == list(b"abc")


async def test_a_request_log_is_a_trace_for_the_simulator(tmp_path: Path) -> None:
    log = RequestLog(RequestLogSettings(tmp_path / "requests.jsonl", 1 << 20, keeps_tokens=True), None)
    async with open_world(lengths=OutputLengths(log=log)) as world:
        await ask(world, "abcde")
        await asyncio.sleep(0.1)
        await ask(world, "ab", replace(OPTIONS, max_tokens=3))
        await world.until(lambda: world.metric("request_log_written_total") == 2, "the log is written")
    first, last = read_trace(tmp_path / "requests.jsonl").requests
    assert (first.num_prompt_tokens, first.num_output_tokens, first.max_tokens) == (5, len("hello world"), 50)
    assert (last.num_prompt_tokens, last.num_output_tokens, last.max_tokens) == (2, 3, 3)
    assert 0.1 <= last.arrival_s - first.arrival_s < 60


async def test_the_log_has_when_a_request_came_not_when_it_ended(tmp_path: Path) -> None:
    log = RequestLog(RequestLogSettings(tmp_path / "log", 1 << 20, keeps_tokens=True), None)
    async with open_world(lengths=OutputLengths(log=log, unix_time_s=lambda: 1000.0)) as world:
        world.pair.stops_after = 0
        asking = asyncio.create_task(ask(world, "abc"))
        await world.until(lambda: world.pair.starts, "started")
        await asyncio.sleep(0.2)
        [request_id] = world.pair.starts
        world.decode.send(update(request_id, 0, list(b"hi"), finish=LENGTH))
        assert await asking == "hi"
        await world.until(lambda: world.metric("request_log_written_total") == 1, "the log is written")
    record = json.loads((tmp_path / "log").read_text())
    assert 0.2 <= record["at_s"] - record["arrival_s"] < 60


async def ask_briefly(world: World, text: str) -> None:
    async with AsyncWeirClient(world.grpc_address, timeout_s=0.3) as client:
        async for _ in client.generate(text, OPTIONS):
            pass


class Slow:
    """Writes its batches down; each takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.batches: list[int] = []

    def predict(self, prompts: Sequence[Sequence[int]]) -> Predictions:
        self.batches.append(len(prompts))
        time.sleep(self.seconds)
        lengths = np.array([len(prompt) for prompt in prompts], np.float32)
        return Predictions(-lengths, lengths)


async def many(queue: PredictionQueue, num: int) -> list[OutputPrediction | None]:
    return await asyncio.gather(*(queue.try_predict([1] * (i + 1)) for i in range(num)))


async def test_prompts_that_come_meanwhile_are_one_batch_and_answers_are_their_own() -> None:
    slow = Slow(0.02)
    with ThreadPoolExecutor(1) as executor:
        queue = PredictionQueue(slow.predict, 1.0, PredictionLimits(wait_s=10.0, max_batch=8), executor)
        found = await many(queue, 20)
    assert [prediction and prediction.uncalibrated_tokens for prediction in found] == [float(i + 1) for i in range(20)]
    assert slow.batches == [8, 8, 4]


class Held(Slow):
    """Predicts nothing before it is released."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.released = threading.Event()

    def predict(self, prompts: Sequence[Sequence[int]]) -> Predictions:
        assert self.released.wait(60)
        return super().predict(prompts)


async def test_a_late_prediction_is_not_waited_for() -> None:
    held = Held()
    with ThreadPoolExecutor(1) as executor:
        queue = PredictionQueue(held.predict, 1.0, PredictionLimits(wait_s=0.02), executor)
        assert await queue.try_predict([1, 2]) is None
        assert queue.metrics()["predictions_late_total"] == 1
        held.released.set()


async def test_nothing_is_predicted_of_prompts_that_were_not_waited_for() -> None:
    held = Held()
    with ThreadPoolExecutor(1) as executor:
        queue = PredictionQueue(held.predict, 1.0, PredictionLimits(wait_s=0.02, max_batch=1), executor)
        assert await many(queue, 2) == [None, None]
        assert await queue.try_predict([1]) is None
        held.released.set()
        assert queue._pump is not None
        await asyncio.wait_for(queue._pump, 30)
    assert held.batches == [1]
    assert queue.metrics()["predictions_late_total"] == 3


async def test_too_many_that_wait_are_sent_on_without() -> None:
    with ThreadPoolExecutor(1) as executor:
        queue = PredictionQueue(Slow(0.02).predict, 1.0, PredictionLimits(wait_s=10.0, max_waiting=3), executor)
        found = await many(queue, 9)
    assert sum(prediction is None for prediction in found) == 6
    assert queue.metrics()["predictions_skipped_total"] == 6


async def test_a_predictor_that_fails_in_its_thread_fails_its_batch_alone() -> None:
    class Once(Slow):
        def predict(self, prompts: Sequence[Sequence[int]]) -> Predictions:
            if not self.batches:
                self.batches.append(0)
                raise RuntimeError("once")
            return super().predict(prompts)

    with ThreadPoolExecutor(1) as executor:
        queue = PredictionQueue(Once(0.0).predict, 1.0, PredictionLimits(wait_s=10.0), executor)
        assert await queue.try_predict([1]) is None
        assert await queue.try_predict([1, 2]) == OutputPrediction(2.0, -2.0, uncalibrated_tokens=2.0)
    assert queue.metrics() == {
        "predictions_made_total": 1,
        "predictions_failed_total": 1,
        "predictions_late_total": 0,
        "predictions_skipped_total": 0,
    }


def save_one_for_the_model(path: Path) -> None:
    source = resolve_model(MODEL)
    tokenizer = load_tokenizer(source)
    table = load_token_table(source, tokenizer, load_chat_template(source), num_dims=8)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tokenizer.vocab_size, 10).tolist() for _ in range(120)]
    samples = Samples(PromptFeatures(table).of(prompts), rng.integers(1, 100, 120))
    save_predictor(path, train_predictor(table, samples, MODEL, settings=QUICK))


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    save_one_for_the_model(tmp_path / "p.npz")
    predictor, log = str(tmp_path / "p.npz"), str(tmp_path / "log")
    for config, parts in (
        (GatewayConfig(model=MODEL), set()),
        (GatewayConfig(model=MODEL, predictor=predictor), {"prediction"}),
        (GatewayConfig(model=MODEL, request_log=log), {"log"}),
        (
            GatewayConfig(model=MODEL, predictor=predictor, request_log=log, request_log_text=True),
            {"prediction", "log"},
        ),
    ):
        lengths = load_lengths(config)
        metrics = lengths.metrics()
        lengths.close()
        found = {"prediction": "prediction_factor", "log": "request_log_written_total"}
        assert {part for part, metric in found.items() if metric in metrics} == parts


def test_a_predictor_of_another_model_stops_the_start(tmp_path: Path) -> None:
    table = word_table()
    save_predictor(
        tmp_path / "p.npz", train_predictor(table, samples_of(table, 120, noise=0.3), "words", settings=QUICK)
    )
    with pytest.raises(ConfigError, match=r"predictor: .*p\.npz: was made for another tokenizer"):
        load_lengths(GatewayConfig(model=MODEL, predictor=str(tmp_path / "p.npz")))
