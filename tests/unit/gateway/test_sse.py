"""Chunks that are rendered once and filled with text say what the renderer would have said of each."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.life import FinishReason
from weir.core.sampling import TokenLogprobs
from weir_gateway.frontends.openai.render import Rendering
from weir_gateway.frontends.sse import ChunkEvents
from weir_gateway.requests.output import OutputDelta

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


class PlainRenderer:
    """Puts everything that a chunk depends on into it."""

    rendering = Rendering()

    def chunk(self, delta: OutputDelta, text_offset: int) -> dict[str, object]:
        del text_offset
        reason = delta.finish_reason.value if delta.finish_reason else None
        choice = {"index": delta.choice, "delta": {"content": delta.text} if delta.text else {}, "reason": reason}
        return {"id": "x-é", "choices": [{**choice, "logprobs": [entry.logprob for entry in delta.logprobs]}]}


def plain(delta: OutputDelta, event_id: str) -> bytes:
    head = f"id: {event_id}\n" if event_id else ""
    data = json.dumps(PlainRenderer().chunk(delta, 0), ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {data}\n\n".encode()


@given(st.lists(st.tuples(TEXTS, st.integers(0, 2), st.booleans(), st.booleans(), st.sampled_from(["", "3.1"]))))
def test_every_chunk_is_the_same_as_without_a_template(
    pieces: list[tuple[str, int, bool, bool, str]],
) -> None:
    chunks = ChunkEvents(PlainRenderer())  # type: ignore[arg-type]  # it renders chunks, and that is all that is asked
    for text, choice, is_last, has_logprobs, event_id in pieces:
        logprobs = [TokenLogprobs(1, -0.5, 1, ())] if has_logprobs else []
        delta = OutputDelta(0, [1], text, logprobs, choice=choice)
        delta.finish_reason = FinishReason.STOP if is_last else None
        assert chunks.event(delta, 0, event_id) == plain(delta, event_id)


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\x00\x1f\x7f", "\u2028é€🙂", "\ufdd0"])
def test_what_json_escapes_is_escaped(text: str) -> None:
    delta = OutputDelta(0, [1], text)
    assert ChunkEvents(PlainRenderer()).event(delta, 0) == plain(delta, "")  # type: ignore[arg-type]  # as above
