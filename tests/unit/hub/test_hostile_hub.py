"""A hub, or a mirror or proxy before it, that is broken or means harm: nothing of it is believed unchecked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.hub.hub_server import LocalHub, sha256
from tests.unit.hub.pulling import pull, refusal

from weir.model.errors import ModelNotFound
from weir.model.files.hub_cache import find_cached
from weir.model.files.hub_reference import parse_hub_reference
from weir.model.hub.blobs import RetryPolicy
from weir.model.hub.repository import Hub


def test_wrong_bytes_are_refused_and_not_kept(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.wrong_bytes = True
    assert f"the hub says {sha256(gguf)}" in refusal(hub, "org/tiny")
    assert list((hub.cache_dir / "models--org--tiny/blobs").iterdir()) == []
    with pytest.raises(ModelNotFound):
        find_cached(parse_hub_reference("org/tiny"), hub.cache_dir)


def test_what_a_server_without_ranges_sends_over_and_over_is_no_advance(
    hub: Hub, server: LocalHub, gguf: bytes
) -> None:
    server.behaviour.ignores_ranges = True
    server.behaviour.cut_after = [150_000, 160_000] * 20
    assert "the connection was lost (RemoteProtocolError), 5 times in a row" in refusal(hub, "org/tiny")
    assert len(server.downloads()) == 6


def test_lines_that_give_a_byte_each_come_to_an_end(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.cut_after = [1] * 20
    assert f"5 times in a row; 5 of {len(gguf)} bytes are kept" in refusal(hub, "org/tiny")


def test_a_line_that_drips_counts_as_broken(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.piece_bytes = 100
    server.behaviour.pause_s = 0.02
    impatient = replace(hub, retries=RetryPolicy(first_wait_s=0.0, stalled_after_s=0.0))
    assert "the server sends less than 65536 bytes in 0 s, 5 times in a row" in refusal(impatient, "org/tiny")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_texts_of_the_size_of_weights_are_refused_before_anything_comes(
    hub: Hub, server: LocalHub, folder: dict[str, bytes], name: str
) -> None:
    described = server.described("org/tiny")
    (sibling,) = (one for one in described["siblings"] if one["rfilename"] == name)
    sibling["size"] = 1 << 30
    sibling.pop("lfs", None)
    server.behaviour.api_body = json.dumps(described).encode()
    assert f"{name} has 1074 MB, and may have 67 MB" in refusal(hub, "org/tiny")
    assert [asked.path for asked in server.asked] == ["/api/models/org/tiny"]


@pytest.mark.parametrize("tag", ["odd", "{tmp_path}/planted.pth", "../../../../planted.pth"])
def test_no_file_gets_its_name_from_an_etag(hub: Hub, server: LocalHub, gguf: bytes, tmp_path: Path, tag: str) -> None:
    server.behaviour.etag = tag.format(tmp_path=tmp_path)
    path = pull(hub, "org/tiny")
    assert path.read_bytes() == gguf
    files = {file.name for file in tmp_path.rglob("*") if file.is_file() and not file.is_symlink()}
    assert files == {sha256(gguf), "main", "weir.lock", "config.json", "model.safetensors"}
    assert path.readlink() == Path("../../blobs") / sha256(gguf)


def test_another_file_in_the_place_of_a_link_gives_way_to_the_checked_one(hub: Hub, gguf: bytes) -> None:
    path = pull(hub, "org/tiny:tiny.gguf")
    path.unlink()
    path.write_bytes(b"GGUF of somebody else")
    assert pull(hub, "org/tiny:tiny.gguf").read_bytes() == gguf


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"id": "a", "sha": "../x"}', b'{"id": 1, "siblings": 5}'])
def test_a_server_that_is_no_hub_is_named(hub: Hub, server: LocalHub, body: bytes) -> None:
    server.behaviour.api_body = body
    assert "does not answer as the hub does" in refusal(hub, "org/tiny")


@pytest.mark.parametrize(
    "changes",
    [
        {"rfilename": "../../tiny.gguf"},
        {"rfilename": "/tiny.gguf"},
        {"lfs": {"sha256": "../../x", "size": 5, "pointerSize": 1}},
        {"lfs": {"sha256": "0" * 64, "size": -5, "pointerSize": 1}},
    ],
)
def test_files_that_lead_elsewhere_are_none(hub: Hub, server: LocalHub, gguf: bytes, changes: dict[str, Any]) -> None:
    described = server.described("org/tiny")
    described["siblings"] = [described["siblings"][0] | changes]
    server.behaviour.api_body = json.dumps(described).encode()
    assert "has neither config.json" in refusal(hub, "org/tiny")
