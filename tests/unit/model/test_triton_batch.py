"""What a step uploads is what the plain form of it here makes, chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is installed on Linux only")

import torch

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import SAMPLED_BEFORE, ChunkPlan, SampleSpec, ScoreSpec, StepPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.rows import SampledRow, ordered_chunks, rows_with_logits, whole
from weir.model.triton.batch import (
    EMPTY_BATCH,
    MAX_PADDED_PROMPTS,
    BatchMaker,
    DecodeIndex,
    DeviceBatch,
    MixedSize,
    PrefillIndex,
    TritonLimits,
    device_batch,
    padded_decodes,
    padded_mixed,
)
from weir.model.triton.memory import StepUpload
from weir.model.triton.sampled_before import SampledBefore
from weir.model.triton.sampling import draw_arrays
from weir.ops.gpu.decode_work import DecodeTiles, WorkSize
from weir.ops.gpu.paged_prefill import tiles_of
from weir.ops.gpu.sampling import NOT_A_NUMBER, philox_uniforms

LIMITS = TritonLimits(max_rows=64, max_sequences=4, max_context_tokens=200)
NUM_PAGES, VOCAB_SIZE, QUERIES_PER_TILE, NUM_SLOTS = 40, 50, 8, 7
TILES = DecodeTiles(split_tokens=32, block_tokens=16, num_warps=4, num_stages=2, num_programs=3)
MOST_WORK = WorkSize(99, 9)
Arrays = dict[str, npt.NDArray[np.generic]]


def plain_uniform(seed: int, output_index: int) -> float:
    key = np.array([seed, output_index], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def plain_tables(chunks: Sequence[ChunkPlan]) -> npt.NDArray[np.int32]:
    counts = [num_pages_for(chunk.end) for chunk in chunks]
    tables = np.zeros((len(chunks), max(counts)), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.block_table[:count]
    return tables


def plain_slot_mapping(chunk: ChunkPlan) -> list[int]:
    return [
        chunk.block_table[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
        for position in range(chunk.start, chunk.end)
    ]


Work = list[tuple[int, int, int, tuple[int, ...]]]
"""Row, split, length and table of each item."""


def plain_work(decodes: Sequence[ChunkPlan]) -> Work:
    """By row; the kernel takes items in any order."""
    return [
        (row, split, chunk.end, tuple(chunk.block_table[: num_pages_for(chunk.end)]))
        for row, chunk in enumerate(decodes)
        for split in range(-(-chunk.end // TILES.split_tokens))
    ]


def work_of(index: DecodeIndex) -> Work:
    """As the kernel reads it."""
    ints = index.work.items.tolist()
    work = []
    for item in range(int(index.work.num_items[0])):
        row, split, place, length = ints[4 * item : 4 * item + 4]
        work.append((row, split, length, tuple(ints[place : place + num_pages_for(length)])))
    return sorted(work)


def plain_form(plan: StepPlan) -> tuple[Arrays, list[ChunkPlan], list[ChunkPlan]]:
    """The arrays by name, the decodes and the other chunks, in the order of the flat batch."""
    short, long = ordered_chunks(plan, NUM_PAGES, VOCAB_SIZE, LIMITS.max_context_tokens)
    decodes = [chunk for chunk in short if chunk.sample is not None and chunk.sample.output_index > 0]
    prefills = [chunk for chunk in short if chunk not in decodes] + long
    chunks = [*decodes, *prefills]
    sampled, _ = rows_with_logits(whole(chunks))
    found: Arrays = {
        "token_ids": np.array([token for chunk in chunks for token in chunk.token_ids], np.int32),
        "positions": np.array([place for chunk in chunks for place in range(chunk.start, chunk.end)], np.int32),
        "slot_mapping": np.array([place for chunk in chunks for place in plain_slot_mapping(chunk)], np.int32),
    }
    if decodes:
        found["decode work"] = np.array(plain_work(decodes), dtype=object)
    if prefills:
        lengths, ends = [len(chunk.token_ids) for chunk in prefills], [chunk.end for chunk in prefills]
        found |= {
            "prefill tables": plain_tables(prefills),
            "first rows": np.cumsum([len(decodes), *lengths]).astype(np.int32),
            "prefill ends": np.array(ends, np.int32),
            "tiles": np.array(tiles_of(lengths, ends, QUERIES_PER_TILE), np.int32),
        }
    if sampled:
        found["rows"] = np.array([row.row for row in sampled], np.int32)
    return found, decodes, prefills


def arrays_of(index: DeviceBatch) -> Arrays:
    found = {"token_ids": index.token_ids, "positions": index.positions, "slot_mapping": index.slot_mapping}
    if index.decode is not None:
        assert index.decode.num_rows == len({item[0] for item in work_of(index.decode)})
        assert index.decode.work.size.max_items == int(index.decode.work.num_items[0])
    if index.prefill is not None:
        prefill = index.prefill
        found |= {"prefill tables": prefill.block_tables, "first rows": prefill.first_rows}
        found |= {"prefill ends": prefill.ends, "tiles": prefill.tile_list}
    if index.sampled_rows is not None:
        found["rows"] = index.sampled_rows
    arrays: Arrays = {name: tensor.numpy() for name, tensor in found.items()}
    if index.decode is not None:
        arrays["decode work"] = np.array(work_of(index.decode), dtype=object)
    return arrays


def check_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tolist() == array.tolist(), name


@dataclass
class Simulated:
    """A sequence as an engine has it: its table grows, is cut for a step, or is another one after a preemption."""

    num_computed: int
    table: tuple[int, ...]
    params: SamplingParams
    has_prompt: bool


@dataclass
class Engine:
    """Draws steps of up to four sequences in seven slots, which come, go, and come again."""

    draw: st.DataObject
    sequences: dict[int, Simulated] = field(default_factory=dict)

    def plan(self) -> StepPlan:
        slots = self.draw.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=4, unique=True))
        return StepPlan(0, tuple(self._chunk(slot) for slot in slots))

    def _chunk(self, slot: int) -> ChunkPlan:
        draw = self.draw.draw
        if slot not in self.sequences or draw(st.integers(0, 9)) == 0:
            temperature = draw(st.sampled_from([0.0, 1e-6, 0.7, 1.5]))
            params = SamplingParams(temperature=temperature, seed=draw(st.integers(0, 2**64 - 1)))
            self.sequences[slot] = Simulated(draw(st.integers(0, 150)), (), params, draw(st.booleans()))
        sequence = self.sequences[slot]
        length = 1 if not sequence.has_prompt else draw(st.integers(1, 12))
        end = min(sequence.num_computed + length, LIMITS.max_context_tokens)
        start = min(sequence.num_computed, end - 1)
        is_new = not sequence.table or draw(st.integers(0, 9)) == 0
        kept = () if is_new else sequence.table
        num_ahead = draw(st.integers(0, 1))
        pages = st.integers(0, NUM_PAGES - 1)
        while len(kept) < num_pages_for(end) + num_ahead:
            kept += (draw(pages),)
        sequence.table, sequence.num_computed = kept, end
        table = kept[: num_pages_for(end)] if draw(st.booleans()) else kept
        token_ids = tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=end - start, max_size=end - start)))
        output_index = draw(st.integers(0, 3)) if sequence.has_prompt else draw(st.integers(1, 2**33))
        sample = None if sequence.has_prompt and draw(st.booleans()) else SampleSpec(sequence.params, output_index)
        sequence.has_prompt = sequence.has_prompt and sample is None
        return ChunkPlan(slot, start, token_ids, table, sample)


def maker() -> BatchMaker:
    return BatchMaker(NUM_PAGES, VOCAB_SIZE, LIMITS)


def upload() -> StepUpload:
    return StepUpload(1 << 16, torch.device("cpu"))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_step_after_step_the_arrays_are_those_of_the_plain_form(data: st.DataObject) -> None:
    engine, batches, step_upload = Engine(data), maker(), upload()
    for _ in range(data.draw(st.integers(1, 8))):
        plan = engine.plan()
        expected, decodes, prefills = plain_form(plan)
        batch = batches.make(plan)
        assert [*batch.decodes.chunks, *batch.prefills] == [*decodes, *prefills]
        assert (batch.sampled, batch.scored) == rows_with_logits(whole([*decodes, *prefills]))
        check_same(arrays_of(device_batch(batch, step_upload, QUERIES_PER_TILE, TILES)), expected)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_steps_with_prompts_are_filled_up_and_else_those_of_the_plain_form(data: st.DataObject) -> None:
    engine, batches, step_upload, fixed = Engine(data), maker(), upload(), set[tuple[int, ...]]()
    size = MixedSize.of(LIMITS.max_rows, LIMITS)
    for _ in range(data.draw(st.integers(1, 8))):
        plan = engine.plan()
        expected, _, _ = plain_form(plan)
        index = padded_mixed(batches.make(plan), size, step_upload, QUERIES_PER_TILE, TILES, MOST_WORK)
        assert index.decode is not None
        assert index.prefill is not None
        check_same(without_what_fills_up(index, plan), expected)
        fixed.add(addresses(index))
    assert len(fixed) == 1


def without_what_fills_up(index: DeviceBatch, plan: StepPlan) -> Arrays:
    """What is taken away here writes nothing and attends to nothing."""
    assert index.decode is not None
    assert index.prefill is not None
    num_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
    assert index.slot_mapping[num_rows:].tolist() == [-1] * (LIMITS.max_rows - num_rows)
    first_rows, ends = index.prefill.first_rows.tolist(), index.prefill.ends.tolist()
    num_prompts = sum(first < last for first, last in pairwise(first_rows))
    assert first_rows[num_prompts:] == [num_rows] * (len(first_rows) - num_prompts)
    tiles = [tile for tile in index.prefill.tile_list.tolist() if first_rows[tile[0]] < first_rows[tile[0] + 1]]
    width = num_pages_for(max(ends))
    num_decodes = len({item[0] for item in work_of(index.decode)})
    work = replace(index.decode.work, size=WorkSize(int(index.decode.work.num_items[0]), 1))
    prefill = PrefillIndex(
        index.prefill.block_tables[:num_prompts, :width],
        index.prefill.first_rows[: num_prompts + 1],
        index.prefill.ends[:num_prompts],
        torch.tensor(tiles, dtype=torch.int32),
    )
    rows = (index.token_ids[:num_rows], index.positions[:num_rows], index.slot_mapping[:num_rows])
    decode = DecodeIndex(num_decodes, work) if num_decodes else None
    return arrays_of(DeviceBatch(*rows, decode, prefill if num_prompts else None, index.sampled_rows))


def decode(slot: int, start: int, table: Sequence[int], token_id: int = 1) -> ChunkPlan:
    return ChunkPlan(slot, start, (token_id,), tuple(table), SampleSpec(SamplingParams(), 3))


def test_decodes_are_filled_up_to_the_rows_of_a_graph_at_the_same_addresses() -> None:
    step_upload, batches = upload(), maker()

    def padded(plan: StepPlan) -> DeviceBatch:
        return padded_decodes(batches.make(plan), 4, step_upload, TILES, MOST_WORK)

    plan = StepPlan(0, (decode(5, 40, (7, 8, 9)), decode(2, 17, (3, 4))))
    index = padded(plan)
    assert index.slot_mapping.tolist() == [4 * PAGE_TOKENS + 1, 9 * PAGE_TOKENS + 8, -1, -1]
    assert index.positions.tolist() == [17, 40, 0, 0]
    assert index.sampled_rows is not None
    assert index.sampled_rows.tolist() == [0, 1, 2, 3]
    assert index.decode is not None
    assert index.decode.num_rows == 4
    assert index.decode.work.size == MOST_WORK
    assert work_of(index.decode) == [(0, 0, 18, (3, 4)), (1, 0, 41, (7, 8, 9)), (1, 1, 41, (7, 8, 9))]
    longer = padded(StepPlan(0, (decode(1, 199, tuple(range(13))),)))
    assert longer.decode is not None
    assert addresses(longer) == addresses(index)


def addresses(index: DeviceBatch) -> tuple[int, ...]:
    """Of what a graph reads."""
    assert index.decode is not None
    work = index.decode.work
    assert work.items.data_ptr() != 0
    tensors = [index.token_ids, index.positions, index.slot_mapping, work.items, work.num_items]
    if index.prefill is not None:
        tensors += [getattr(index.prefill, each.name) for each in fields(index.prefill)]
    elif index.sampled_rows is not None:
        tensors.append(index.sampled_rows)
    return tuple(tensor.data_ptr() for tensor in tensors)


def test_an_empty_batch_fills_up_at_the_same_addresses_and_has_no_work() -> None:
    step_upload = upload()
    full = padded_decodes(maker().make(StepPlan(0, (decode(5, 40, (7, 8, 9)),))), 2, step_upload, TILES, MOST_WORK)
    index = padded_decodes(EMPTY_BATCH, 2, step_upload, TILES, MOST_WORK)
    assert addresses(index) == addresses(full)
    assert index.slot_mapping.tolist() == [-1, -1]
    assert index.decode is not None
    assert index.decode.work.num_items.tolist() == [0]


def test_the_upload_holds_the_largest_step_there_may_be() -> None:
    limits = TritonLimits(max_rows=4, max_sequences=4, max_context_tokens=32 * 64 * 3)
    batches = BatchMaker(600, VOCAB_SIZE, limits)
    longest = tuple(range(num_pages_for(limits.max_context_tokens)))
    plan = StepPlan(0, tuple(decode(slot, limits.max_context_tokens - 1, longest) for slot in range(4)))
    step_upload = StepUpload(limits.upload_bytes, torch.device("cpu"))
    index = padded_decodes(batches.make(plan), 4, step_upload, TILES, MOST_WORK)
    assert index.decode is not None
    assert index.decode.work.num_items.tolist() == [4 * 64], "splits grow with the row, and are no more than 64"


@pytest.mark.parametrize("max_sequences", [1, 4, 40])
def test_the_upload_holds_the_largest_mixed_step_too(max_sequences: int) -> None:
    limits = TritonLimits(max_rows=256, max_sequences=max_sequences, max_context_tokens=32 * 64 * 3)
    longest = tuple(range(num_pages_for(limits.max_context_tokens)))
    num_prompts = min(MAX_PADDED_PROMPTS, max_sequences)
    num_tokens = (limits.max_rows - max_sequences + num_prompts) // num_prompts
    start = limits.max_context_tokens - num_tokens
    prompts = [ChunkPlan(slot, start, (1,) * num_tokens, longest, None) for slot in range(num_prompts)]
    decodes = [decode(slot, limits.max_context_tokens - 1, longest) for slot in range(num_prompts, max_sequences)]
    batch = BatchMaker(600, VOCAB_SIZE, limits).make(StepPlan(0, (*prompts, *decodes)))
    step_upload = StepUpload(limits.upload_bytes, torch.device("cpu"))
    index = padded_mixed(batch, MixedSize.of(limits.max_rows, limits), step_upload, 1, TILES, MOST_WORK)
    assert index.slot_mapping[: batch.num_rows].min() >= 0


def test_scored_prompts_keep_the_rows_of_their_tokens() -> None:
    prompt = ChunkPlan(1, 0, (4, 5, 6), (2,), None, ScoreSpec((5, 6), 1))
    batch = maker().make(StepPlan(0, (prompt, decode(3, 20, (1, 2)))))
    assert [(scored.slot, scored.first_row) for scored in batch.scored] == [(1, 1)]


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (decode(3, -1, (1,)), "slot 3: 1 tokens from position -1"),
        (decode(3, 200, (1,) * 13), "reaches position 201, the model's context is 200"),
        (decode(3, 16, (1,)), "1 pages for 17 positions"),
        (decode(3, 16, (1, NUM_PAGES)), r"block table \(1, 40\) with 40 pages"),
        (decode(3, 0, (-1,)), r"block table \(-1,\) with 40 pages"),
        (decode(3, 0, (0,), VOCAB_SIZE), "a token id is outside the vocabulary of 50"),
        (decode(3, 0, (0,), -1), "a token id is outside the vocabulary of 50"),
        (decode(1, 0, (0,)), "a slot has two chunks"),
    ],
)
def test_a_decode_that_must_not_run_is_refused_and_the_next_step_runs(chunk: ChunkPlan, problem: str) -> None:
    batches, other = maker(), decode(1, 5, (6,))
    with pytest.raises(InternalError, match=problem):
        batches.make(StepPlan(0, (other, chunk)))
    good = StepPlan(0, (other, decode(3, 16, (1, 2))))
    check_same(arrays_of(device_batch(batches.make(good), upload(), QUERIES_PER_TILE, TILES)), plain_form(good)[0])


def test_a_page_that_is_not_there_is_refused_when_it_is_appended() -> None:
    batches = maker()
    batches.make(StepPlan(0, (decode(0, 15, (1,)),)))
    with pytest.raises(InternalError, match=r"block table \(1, 99\)"):
        batches.make(StepPlan(0, (decode(0, 16, (1, 99)),)))


def test_only_rows_that_draw_get_a_uniform_number() -> None:
    params = [SamplingParams(temperature=t, seed=7 + number) for number, t in enumerate([0.0, 0.5, 1e-6, 2.0] * 5)]
    temperatures, uniforms = draw_arrays([SampleSpec(each, 4) for each in params])
    assert temperatures.tolist() == [0.0, 0.5, 0.0, 2.0] * 5
    assert uniforms.tolist() == [0.0 if p.is_greedy else plain_uniform(p.seed, 4) for p in params]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=40))
def test_uniform_numbers_are_those_of_numpys_generator(keys: list[tuple[int, int]]) -> None:
    seeds, indices = (np.array([key[part] for key in keys], np.uint64) for part in (0, 1))
    assert philox_uniforms(seeds, indices).tolist() == [plain_uniform(*key) for key in keys]


@pytest.mark.parametrize("max_sequences", [1, 17, 30, 64])
def test_a_full_batch_reads_the_tokens_of_the_step_before(max_sequences: int) -> None:
    before = SampledBefore(max_sequences, torch.device("cpu"))
    specs = [SampleSpec(SamplingParams(temperature=0.0), 1) for _ in range(max_sequences)]
    sampled = torch.arange(100, 100 + max_sequences, dtype=torch.int32)
    before.note([SampledRow(slot, slot, spec) for slot, spec in enumerate(specs)], sampled)
    chunks = [ChunkPlan(slot, 5, (SAMPLED_BEFORE,), (slot,), spec) for slot, spec in enumerate(specs)][::-1]
    limits = TritonLimits(max_rows=64, max_sequences=max_sequences, max_context_tokens=32)
    batch = BatchMaker(max_sequences, VOCAB_SIZE, limits).make(StepPlan(0, tuple(chunks)))
    token_ids = torch.full((64,), -7, dtype=torch.int32)
    before.fill_in(batch.decodes, token_ids)
    slots = [chunk.slot for chunk in batch.decodes.chunks]
    assert token_ids.tolist() == [*(100 + slot for slot in slots), *[-7] * (64 - max_sequences)]


def test_a_token_that_is_none_is_not_looked_up() -> None:
    before = SampledBefore(1, torch.device("cpu"))
    spec = SampleSpec(SamplingParams(temperature=0.0), 1)
    before.note([SampledRow(0, 0, spec)], torch.tensor([NOT_A_NUMBER], dtype=torch.int32))
    limits = TritonLimits(max_rows=1, max_sequences=1, max_context_tokens=32)
    plan = StepPlan(0, (ChunkPlan(0, 5, (SAMPLED_BEFORE,), (0,), spec),))
    token_ids = torch.full((1,), -7, dtype=torch.int32)
    before.fill_in(BatchMaker(1, VOCAB_SIZE, limits).make(plan).decodes, token_ids)
    assert token_ids.tolist() == [0]
