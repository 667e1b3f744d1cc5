"""Token tables from a model's own embeddings."""

import numpy as np

from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import ChatTemplate, load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import frame_of, load_token_table, principal_parts
from weir.policy.predictors.features import PromptFeatures, earlier_answers
from weir.policy.predictors.token_table import NO_FRAME, ChatFrame


def test_principal_parts_keep_what_differs_most() -> None:
    source = np.random.default_rng(0)
    wide = source.normal(size=(500, 2)) @ source.normal(size=(2, 8)) * 10
    embeddings = (wide + 0.01 * source.normal(size=(500, 8)) + 5).astype(np.float32)
    parts = principal_parts(embeddings, 2)
    centred = embeddings - embeddings.mean(axis=0)
    left = centred - parts @ np.linalg.lstsq(parts, centred, rcond=None)[0]
    assert np.abs(left).max() < 0.2
    np.testing.assert_allclose(parts.std(axis=0), 1, rtol=1e-3)


def test_more_dimensions_than_there_are_give_those_there_are() -> None:
    embeddings = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    assert principal_parts(embeddings, 100).shape == (50, 6)


def test_the_table_of_a_model_is_always_the_same_and_leaves_its_template_out() -> None:
    source = resolve_model("dummy:tiny")
    tokenizer, template = load_tokenizer(source), load_chat_template(source)
    table = load_token_table(source, tokenizer, template, num_dims=8)
    assert table.digest == load_token_table(source, tokenizer, template, num_dims=8).digest
    assert (table.vocab_size, table.num_dims) == (tokenizer.vocab_size, 8)
    asked = tokenizer.encode(template.render([{"role": "user", "content": "Why?"}]), add_bos=False)
    bare = tokenizer.encode("Why?", add_bos=False)
    assert len(asked) > len(bare)
    features = PromptFeatures(table).of([asked, bare])
    np.testing.assert_array_equal(features[0], features[1])


def test_the_frame_is_what_all_rendered_messages_share() -> None:
    tokenizer = load_tokenizer(resolve_model("dummy:tiny"))
    around = ChatTemplate("around", "<<{{ messages[0].content }}>>", {})
    assert frame_of(tokenizer, around) == ChatFrame(tuple(b"<<"), tuple(b">>"))


def test_a_model_without_a_template_has_no_frame() -> None:
    tokenizer = load_tokenizer(resolve_model("dummy:tiny"))
    assert frame_of(tokenizer, ChatTemplate("bare", None, {})) == NO_FRAME


def test_the_frame_of_an_earlier_answer_is_what_stands_around_it_in_a_conversation() -> None:
    source = resolve_model("dummy:tiny")
    frame = frame_of(load_tokenizer(source), load_chat_template(source))
    assert (bytes(frame.before_answer), bytes(frame.after_answer)) == (b"\nassistant: ", b"\nuser: ")


def test_the_built_in_style_of_template_gives_answers_as_long_as_they_were() -> None:
    tokenizer, template = load_tokenizer(resolve_model("dummy:tiny")), load_chat_template(resolve_model("dummy:tiny"))
    answers = ["Four.", "It is four because two and two are four."]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    prompt = tokenizer.encode(template.render(messages), add_bos=False)
    assert earlier_answers(prompt, frame_of(tokenizer, template)) == [len(answer) for answer in answers]


def test_a_template_that_writes_no_earlier_answer_has_no_frame_of_one() -> None:
    tokenizer = load_tokenizer(resolve_model("dummy:tiny"))
    frame = frame_of(tokenizer, ChatTemplate("last", "<<{{ messages[-1].content }}>>", {}))
    assert frame == ChatFrame(tuple(b"<<"), tuple(b">>"))
