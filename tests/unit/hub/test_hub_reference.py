"""A name of the hub is read without asking it, and a hostile one goes no further."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.model.errors import ModelNotFound
from weir.model.files.hub_cache import find_cached
from weir.model.files.hub_reference import HubReference, parse_hub_reference
from weir.model.files.source import resolve_model

HOSTILE = (
    "../../etc/passwd",
    "/etc/passwd",
    "a/../b",
    "a/b/c",
    "a/..",
    "../b",
    ".a/b",
    "a/b.",
    "a..b/c",
    "a./b",
    "a-/b",
    "a/b--c",
    "a/b.git",
    "a b/c",
    "a/b c",
    "a/b\n",
    "a/b\0",
    "a/é",
    "https://huggingface.co/a/b",
    "hf://a/b",
    "file:///etc/passwd",
    "a/" + "b" * 95,
    "a/" + "b" * 100_000,
    "a/b:",
    "a/b@",
    "a/b:model.bin",
    "a/b:../x.gguf",
    "a/b:/x.gguf",
    "a/b:.hidden.gguf",
    "a/b:x/../y.gguf",
    "a/b:x//y.gguf",
    "a/b:" + "x" * 300 + ".gguf",
    "a/b:x y.gguf",
    "a/b@../../main",
    "a/b@/main",
    "a/b@-x",
    "a/b@x y",
    "a/b@" + "x" * 300,
    "a/b?x=1",
    "a/b#x",
    "a/b%2e%2e",
    "models/tiny.gguf",
    "",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubReference("org/name")),
        ("Org-1/Name_2.5-B", HubReference("Org-1/Name_2.5-B")),
        ("o/n:x-Q4_K_M.gguf", HubReference("o/n", "x-Q4_K_M.gguf")),
        ("o/n:sub/x.gguf@v1.0", HubReference("o/n", "sub/x.gguf", "v1.0")),
        ("o/n@refs/pr/1", HubReference("o/n", "", "refs/pr/1")),
    ],
)
def test_a_name_is_taken_apart_and_put_together(text: str, expected: HubReference) -> None:
    assert parse_hub_reference(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:30]))
def test_a_hostile_name_is_refused_in_a_short_line(text: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        parse_hub_reference(text)
    assert len(str(refused.value)) < 800
    with pytest.raises(ModelNotFound):
        resolve_model(text)


@given(st.text(alphabet=string.ascii_letters + "./-_:@ ~\\%", max_size=40))
def test_whatever_is_taken_stays_inside_of_its_folder(text: str) -> None:
    try:
        reference = parse_hub_reference(text)
    except ModelNotFound:
        return
    assert "/" not in reference.folder_name
    for path in (reference.folder_name, reference.filename, reference.revision):
        assert not path.startswith("/")
        assert not {"..", ""} & set(path.split("/")) or not path
    with pytest.raises(ModelNotFound):
        find_cached(reference)
