"""Rows of a static batch whose sequences have ended: computed on until the batch has ended, as a padded batch does."""

from collections.abc import Iterator

from weir.core.sampling import SamplingParams
from weir.engine.memory.pages import PagePool
from weir.engine.messages import PageBundle
from weir.engine.plan import ChunkPlan, SampleSpec
from weir.engine.sequence import Sequence
from weir.kv.geometry import num_pages_for

_GREEDY = SamplingParams(temperature=0.0)


class HeldRows:
    """Each computes its last token again and again, at its last length: as cheap as a held row can be."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._rows: list[tuple[ChunkPlan, tuple[int, ...]]] = []  # chunk, all pages

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, sequence: Sequence) -> None:
        """Takes slot and pages of a sequence that has ended after at least one computed token."""
        assert sequence.slot is not None, "only a sequence with a slot was computed"
        end = sequence.num_computed
        chunk = ChunkPlan(
            slot=sequence.slot,
            start=end - 1,
            token_ids=(sequence.token_ids[end - 1],),
            block_table=sequence.block_table[: num_pages_for(end)],
            sample=SampleSpec(_GREEDY, output_index=0),
        )
        self._rows.append((chunk, sequence.block_table))

    def chunks(self) -> Iterator[ChunkPlan]:
        """One token each; what is sampled for them is dropped."""
        return (chunk for chunk, _ in self._rows)

    def release(self) -> bool:
        """Frees everything. False: there was nothing."""
        rows, self._rows = self._rows, []
        for chunk, page_ids in rows:
            self._pool.put_back(chunk.slot, page_ids)
        return bool(rows)

    @property
    def bundle(self) -> PageBundle:
        """All pages and slots of the rows."""
        return PageBundle(
            tuple(page_id for _, page_ids in self._rows for page_id in page_ids),
            tuple(chunk.slot for chunk, _ in self._rows),
        )
