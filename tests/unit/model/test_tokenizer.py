"""The tokenizer is the model's own, and text comes out of ids whole."""

import gzip
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from weir.core.errors import InvalidRequest
from weir.model.errors import ModelError
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.source import ModelKind, ModelSource, resolve_model
from weir.model.tokens.decoders import ByteLevelDecoder, byte_of_character
from weir.model.tokens.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello world",
    "  two spaces, then three   x\t\ttabs\n\n\nlines\r\n",
    "The year 2024, 3.14159, x1y22z333 and 1,000,000; ½ and Ⅷ and ٣",
    "naïve café, Ελληνικά, Русский, 日本語のテキスト, العربية, 한국어, हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and combining e\u0301, zero\u200bwidth, \ufeffmark",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><jupyter_code><not_special>",
    "def f(x):\n    return x  # it's we'll I've don't\n",
    "\x00\x01\x7f control",
    "",
]


# SmolLM's training text never held these bytes, so its vocabulary has no token for them: six control characters, and
# the first byte of planes 4 to 11, where Unicode has no characters.
MISSING_BYTES = frozenset({0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2})


def has_tokens(character: str) -> bool:
    return MISSING_BYTES.isdisjoint(character.encode())


encodable_text = st.text(st.characters(exclude_categories=["Cs"]).filter(has_tokens))


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model(SMOLLM2_135M.name)


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def reference(smollm2: transformers.PreTrainedTokenizerBase) -> tokenizers.Tokenizer:
    """What transformers reads from the same file."""
    backend = smollm2.backend_tokenizer
    assert isinstance(backend, tokenizers.Tokenizer)
    return backend


@pytest.fixture(scope="module")
def smollm_reference(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """transformers leaves out the pre-tokenizer that `tokenizer.ggml.pre` smollm stands for: digits apart, first."""
    complete = tokenizers.Tokenizer.from_str(reference.to_str())
    complete.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return complete


def data_texts() -> Iterator[str]:
    root = os.environ.get("WEIR_TEST_DATA")
    if root is None:
        pytest.skip(
            "WEIR_TEST_DATA is not set: a folder with traces/humaneval.jsonl.gz and traces/gsm8k_train.jsonl.gz"
        )
    for name, fields in (
        ("humaneval", ("prompt", "canonical_solution", "test")),
        ("gsm8k_train", ("question", "answer")),
    ):
        with gzip.open(Path(root) / "traces" / f"{name}.jsonl.gz", "rt") as lines:
            for line in list(lines)[:500]:
                row = json.loads(line)
                yield from (row[field] for field in fields)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_reference(
    text: str, tokenizer: Tokenizer, smollm_reference: tokenizers.Tokenizer
) -> None:
    assert tokenizer.encode(text) == smollm_reference.encode(text).ids


def test_real_text_gives_the_ids_of_the_reference(tokenizer: Tokenizer, smollm_reference: tokenizers.Tokenizer) -> None:
    for text in data_texts():
        assert tokenizer.encode(text) == smollm_reference.encode(text).ids


def test_a_long_text_gives_the_ids_of_the_reference_too(
    tokenizer: Tokenizer, smollm_reference: tokenizers.Tokenizer
) -> None:
    source = random.Random(5)
    for _ in range(20):
        text = "".join(source.choices(TEXTS, k=200))
        assert len(text) > 4096
        assert tokenizer.encode(text) == smollm_reference.encode(text).ids


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    num_turns = 0
    is_done = threading.Event()

    def take_turns() -> None:
        nonlocal num_turns
        while not is_done.wait(0.001):
            num_turns += 1

    other = threading.Thread(target=take_turns, daemon=True)
    other.start()
    try:
        num_before = num_turns
        tokenizer.encode("0123456789" * 50_000)
        num_after = num_turns
    finally:
        is_done.set()
        other.join(timeout=60)
    assert not other.is_alive()
    assert num_after - num_before >= 5


@settings(deadline=None)
@given(text=st.text())
def test_text_without_digits_gives_the_ids_of_transformers_as_it_is(
    text: str, tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    text = "".join(character for character in text if not character.isnumeric())
    assert tokenizer.encode(text) == reference.encode(text).ids


def test_digits_stand_apart_from_the_spaces_before_them(tokenizer: Tokenizer) -> None:
    def words(text: str) -> list[str]:
        return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]

    assert words("  1") == ["  ", "1"]
    assert words(" 123") == [" ", "1", "2", "3"]


@settings(deadline=None, max_examples=300)
@given(text=encodable_text)
def test_decoding_gives_the_text_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_bytes_that_the_vocabulary_lacks_are_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("\x04") == []
    assert tokenizer.encode("a\x04b") == tokenizer.encode("a") + tokenizer.encode("b")


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_any_ids_decode_as_the_reference_decodes_them(
    ids: list[int], tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@st.composite
def cut_into_pushes(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=4), max_size=12))


@settings(deadline=None, max_examples=300)
@given(pushes=cut_into_pushes(49_160))
def test_the_pieces_joined_are_the_text_of_all_ids(pushes: list[list[int]], tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(ids) for ids in pushes]
    all_ids = [token_id for ids in pushes for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(all_ids)


@settings(deadline=None, max_examples=200)
@given(text=encodable_text)
def test_half_a_character_is_never_emitted(text: str, tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(skip_special=False)
    emitted = ""
    for token_id in tokenizer.encode(text):
        emitted += detokenizer.push([token_id])
        assert text.startswith(emitted)
    assert emitted == text
    assert detokenizer.finish() == ""


def test_a_character_that_is_never_completed_shows_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_detokenizer_can_be_used_again_after_its_end(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("日本 🦜")
    detokenizer.push(ids[:-1])
    detokenizer.finish()
    assert detokenizer.push(ids) + detokenizer.finish() == "日本 🦜"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffcd"])
def test_a_lone_surrogate_is_the_clients_mistake(text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        tokenizer.encode(text, field="messages[2].content")
    assert caught.value.violations[0].field == "messages[2].content"


def test_special_tokens_are_left_out_of_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hi<|im_end|>")
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special=False) == "Hi<|im_end|>"


def sentencepiece_folder(folder: Path) -> Path:
    """A Llama-2 kind of tokenizer: U+2581 for spaces, single bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *"\u2581abcdé", "\u2581a", "ab"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece"))
    return load_tokenizer(ModelSource("sentencepiece", folder, ModelKind.HF_FOLDER))


def test_the_models_first_token_is_added_where_it_wants_one(sentencepiece: Tokenizer, tokenizer: Tokenizer) -> None:
    assert sentencepiece.encode("a")[0] == 1
    assert sentencepiece.encode("a", add_bos=False)[0] != 1
    assert tokenizer.encode("a") == tokenizer.encode("a", add_bos=False)


@settings(deadline=None)
@given(text=st.text())
def test_a_byte_fallback_vocabulary_gives_the_text_back(text: str, sentencepiece: Tokenizer) -> None:
    if "\u2581" not in text and text not in {"<unk>", "<s>", "</s>"}:
        assert sentencepiece.decode(sentencepiece.encode(text)) == text


@settings(deadline=None)
@given(pushes=cut_into_pushes(267))
def test_byte_fallback_pieces_joined_are_the_text_of_all_ids(pushes: list[list[int]], sentencepiece: Tokenizer) -> None:
    detokenizer = sentencepiece.detokenizer()
    pieces = [detokenizer.push(ids) for ids in pushes]
    all_ids = [token_id for ids in pushes for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == sentencepiece.decode(all_ids)


def test_what_a_file_says_of_cutting_and_filling_texts_does_not_count(tmp_path: Path) -> None:
    source = ModelSource("cutting", sentencepiece_folder(tmp_path), ModelKind.HF_FOLDER)
    expected = load_tokenizer(source).encode("abc" * 20)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for change in ("truncation", "padding"):
        if change == "truncation":
            backend.enable_truncation(5)
        else:
            backend.enable_padding(length=200)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert load_tokenizer(source).encode("abc" * 20) == expected


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decoder WordPiece"):
        load_tokenizer(ModelSource("other", tmp_path, ModelKind.HF_FOLDER))


@pytest.mark.parametrize(("content", "problem"), [(None, "no such file"), ("{", "not a tokenizer")])
def test_a_folder_without_a_readable_tokenizer_is_refused(content: str | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=problem):
        load_tokenizer(ModelSource("broken", tmp_path, ModelKind.HF_FOLDER))


def test_a_token_is_spelled_as_the_vocabulary_has_it(tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    ids = [*range(0, tokenizer.vocab_size, 97), tokenizer.vocab_size - 1]
    assert [tokenizer.token_spelling(token_id) for token_id in ids] == [reference.id_to_token(one) for one in ids]
    assert tokenizer.token_spelling(tokenizer.vocab_size) == ""


def test_special_tokens_that_are_asked_for_are_in_the_text() -> None:
    tokenizer = load_tokenizer(resolve_model(SMOLLM2_135M.name))
    token_ids = tokenizer.encode("<|im_start|>Hi<|im_end|>", add_bos=False)
    assert tokenizer.detokenizer().push(token_ids) == "Hi"
    assert tokenizer.detokenizer(shown=frozenset(token_ids[:1])).push(token_ids) == "<|im_start|>Hi"


@given(token=st.text(st.one_of(st.characters(max_codepoint=0x150), st.sampled_from(sorted(byte_of_character())))))
def test_a_byte_level_token_is_its_characters_bytes_and_where_one_has_none_its_text(token: str) -> None:
    byte_of = byte_of_character()
    is_of_bytes = all(character in byte_of for character in token)
    expected = bytes(byte_of[character] for character in token) if is_of_bytes else token.encode()
    assert ByteLevelDecoder().bytes_of(token) == expected
