"""A pull from a server that answers as the hub does ends with a whole model, or with a clear word and what came."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.unit.hub.hub_server import LocalHub, sha256
from tests.unit.hub.pulling import Watching, pull, refusal
from tests.unit.model.tiny import LogitsProbe, TinyLlama, chunk

from weir.core.file_lock import file_lock
from weir.model.errors import ModelNotFound, PullError
from weir.model.files.catalog import PullProgress
from weir.model.files.config import load_model_config
from weir.model.files.hub_cache import find_cached, write_absent
from weir.model.files.hub_reference import parse_hub_reference
from weir.model.files.source import ModelKind, ModelSource
from weir.model.hub.local_models import list_local_models
from weir.model.hub.pull import PullWatch, pull_from_hub
from weir.model.hub.repository import Hub


def test_a_folder_comes_whole_and_computes_what_transformers_does(
    hub: Hub, folder: dict[str, bytes], server: LocalHub, tiny_folder: TinyLlama
) -> None:
    folder |= {"pytorch_model.bin": b"pickle" * 9000, "onnx/model.onnx": b"x" * 30_000, "model.gguf": b"GGUF" * 9000}
    watching = Watching()
    path = pull(hub, "org/tiny", watching)
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    wanted |= {f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)}
    assert {file.name for file in path.iterdir()} == wanted
    assert all((path / name).read_bytes() == folder[name] for name in wanted)
    (plan,) = watching.plans
    assert (plan.num_files, plan.total_bytes) == (len(wanted), sum(len(folder[name]) for name in wanted))
    assert watching.progress[-1].done_bytes == plan.total_bytes
    found = find_cached(parse_hub_reference("org/tiny"), hub.cache_dir)
    assert (found.path, found.commit) == (path, server.commit("org/tiny"))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    source = ModelSource("org/tiny", found.path, ModelKind.HF_FOLDER)
    logits = LogitsProbe(source).run_alone(chunk(0, ids, 0, len(ids), (0,)))
    torch.testing.assert_close(logits, tiny_folder.logits(ids), rtol=1e-4, atol=1e-4)


def test_a_gguf_file_comes_under_its_digest(hub: Hub, gguf: bytes) -> None:
    path = pull(hub, "org/tiny")
    assert path.read_bytes() == gguf
    assert path.resolve().name == sha256(gguf)
    assert find_cached(parse_hub_reference("org/tiny"), hub.cache_dir).path == path
    assert load_model_config(ModelSource("org/tiny", path, ModelKind.GGUF)).num_layers > 0


def test_a_file_of_several_has_to_be_named(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.repositories["org/tiny"] = {"a.gguf": gguf, "sub/b.gguf": gguf}
    message = refusal(hub, "org/tiny")
    assert "name a file after a colon" in message
    assert "a.gguf (0.00 GB), sub/b.gguf" in message
    assert server.downloads() == []
    assert pull(hub, "org/tiny:sub/b.gguf").name == "b.gguf"
    assert "has a.gguf (0.00 GB), sub/b.gguf" in refusal(hub, "org/tiny:c.gguf")


def test_a_line_that_breaks_is_taken_up_where_it_broke(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.cut_after = [100_000, 50_000]
    assert pull(hub, "org/tiny").read_bytes() == gguf
    assert [asked.range for asked in server.downloads()] == ["", "bytes=100000-", "bytes=150000-"]


def test_a_pull_after_one_that_failed_asks_for_the_rest_alone(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.cut_after = [100_000, *([0] * 5)]
    message = refusal(hub, "org/tiny")
    assert f"100000 of {len(gguf)} bytes are kept" in message
    watching = Watching()
    assert pull(hub, "org/tiny", watching).read_bytes() == gguf
    assert server.downloads()[-1].range == "bytes=100000-"
    assert watching.plans[0].missing_bytes == len(gguf) - 100_000


def test_a_server_without_ranges_sends_all_of_it_again(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.cut_after = [100_000]
    server.behaviour.ignores_ranges = True
    assert pull(hub, "org/tiny").read_bytes() == gguf


def test_what_was_kept_and_is_wrong_is_fetched_again(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    blobs = hub.cache_dir / "models--org--tiny/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(gguf)}.weir.incomplete").write_bytes(bytes(5000))
    assert pull(hub, "org/tiny").read_bytes() == gguf
    (blobs / sha256(gguf)).write_bytes(bytes(len(gguf)))
    assert pull(hub, "org/tiny").read_bytes() == gguf


def test_a_second_pull_checks_what_is_there_and_downloads_nothing(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    pull(hub, "org/tiny")
    server.asked.clear()
    pull(hub, "org/tiny")
    assert server.downloads() == []


def test_the_branch_stands_for_a_new_commit_once_all_of_it_is_here(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    old = pull(hub, "org/tiny")
    server.repositories["org/tiny"]["tiny.gguf"] = gguf + bytes(32)
    server.behaviour.status = 403
    refusal(hub, "org/tiny")
    assert find_cached(parse_hub_reference("org/tiny"), hub.cache_dir).path == old
    server.behaviour.status = 0
    new = pull(hub, "org/tiny")
    assert new != old
    assert find_cached(parse_hub_reference("org/tiny"), hub.cache_dir).path == new
    commit = old.parent.name
    assert find_cached(parse_hub_reference(f"org/tiny@{commit}"), hub.cache_dir).path == old


def test_an_architecture_that_is_not_served_is_refused_before_its_weights(
    hub: Hub, server: LocalHub, folder: dict[str, bytes]
) -> None:
    folder["config.json"] = folder["config.json"].replace(b'"llama"', b'"gpt_oss"')
    assert "org/tiny: config.json: model_type 'gpt_oss'; Weir serves 'llama'" in refusal(hub, "org/tiny")
    assert server.downloads() == []


def test_so_is_that_of_a_gguf_file_by_its_first_bytes(
    hub: Hub, server: LocalHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.model.hub.blobs._CHECK_HEAD_AT_BYTES", 50_000)
    other = gguf.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gemma", 1)
    server.repositories["org/tiny"]["tiny.gguf"] = other + bytes(4 << 20)
    server.behaviour.pause_s = 0.001
    assert "org/tiny: general.architecture 'gemma'; Weir serves" in refusal(hub, "org/tiny")
    assert list((hub.cache_dir / "models--org--tiny/blobs").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "pytorch_model.bin is a pickle"),
        ({"README.md": b"x"}, "has neither config.json with *.safetensors nor a *.gguf file"),
        ({"x-00001-of-00002.gguf": b"x"}, "GGUF models of one file"),
        ({"config.json": b"[]", "model.safetensors": b"x"}, "config.json: expected a JSON object"),
    ],
)
def test_a_repository_without_a_model_for_weir_is_refused(
    hub: Hub, server: LocalHub, files: dict[str, bytes], expected: str
) -> None:
    server.repositories["org/odd"] = files
    assert expected in refusal(hub, "org/odd")


def test_an_index_that_names_what_is_not_there_is_refused(hub: Hub, folder: dict[str, bytes]) -> None:
    folder["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    assert "names '../../x.safetensors', which is no file of it" in refusal(hub, "org/tiny")


def test_who_may_not_read_is_told_how_to_give_a_token(
    hub: Hub, server: LocalHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_right"
    assert "no such repository, or a private one; look at its name, or give a token" in refusal(hub, "org/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token that was given (HF_TOKEN, or of `hf auth login`) may not read it" in refusal(hub, "org/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(hub, "org/tiny").read_bytes() == gguf
    assert not any(asked.has_token for asked in server.asked if asked.at == "store")
    server.behaviour.gated = True
    shutil.rmtree(hub.cache_dir)
    assert f"is gated; accept its terms at {server.endpoint}/org/tiny" in refusal(hub, "org/tiny")


def test_what_the_hub_does_not_have_is_named(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    assert "no such repository" in refusal(hub, "org/none")
    assert "has no revision 'v9'" in refusal(hub, "org/tiny@v9")


def test_a_server_that_is_overloaded_is_asked_five_times(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.status = 503
    assert "tiny.gguf: the server answers 503, 5 times in a row" in refusal(hub, "org/tiny")
    assert len(server.downloads()) == 5


def test_a_file_that_the_hub_does_not_give_by_http_is_refused_with_the_way_to_get_it(
    hub: Hub, server: LocalHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    assert "`hf download org/tiny tiny.gguf` fetches it into the same cache" in refusal(hub, "org/tiny")
    assert server.downloads() == []


def test_two_pulls_at_once_download_a_file_once(hub: Hub, server: LocalHub, gguf: bytes) -> None:
    server.behaviour.pause_s = 0.01
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda name: pull(hub, name), ["org/tiny", "org/tiny:tiny.gguf"]))
    assert paths[0] == paths[1]
    assert len(server.downloads()) == 1


def test_one_file_of_a_repository_is_not_taken_for_all_of_it(
    hub: Hub, folder: dict[str, bytes], gguf_bytes: bytes
) -> None:
    folder["tiny.gguf"] = gguf_bytes
    pull(hub, "org/tiny:tiny.gguf")
    with pytest.raises(ModelNotFound, match=r"a file that is: org/tiny:tiny\.gguf"):
        find_cached(parse_hub_reference("org/tiny"), hub.cache_dir)
    assert pull(hub, "org/tiny").is_dir()
    assert find_cached(parse_hub_reference("org/tiny"), hub.cache_dir).path.is_dir()


def test_a_folder_of_which_transformers_noted_that_it_has_no_single_file_is_one(
    hub: Hub, folder: dict[str, bytes]
) -> None:
    path = pull(hub, "org/tiny")
    write_absent(hub.cache_dir / "models--org--tiny", path.name, ["model.safetensors", "adapter_config.json"])
    assert find_cached(parse_hub_reference("org/tiny"), hub.cache_dir).path == path


def test_a_folder_without_its_tokenizer_is_not_whole(hub: Hub, folder: dict[str, bytes]) -> None:
    (pull(hub, "org/tiny") / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json\); run `weir pull org/tiny`"):
        find_cached(parse_hub_reference("org/tiny"), hub.cache_dir)


def test_weights_are_in_the_snapshot_once_all_of_them_are_here(
    hub: Hub, server: LocalHub, folder: dict[str, bytes]
) -> None:
    server.behaviour.cut_after = [1 << 30, *([0] * 5)]
    refusal(hub, "org/tiny")
    assert len(server.downloads()) > 5
    (snapshot,) = (hub.cache_dir / "models--org--tiny/snapshots").iterdir()
    assert list(snapshot.glob("*.safetensors")) == []


def test_a_blob_is_on_the_disk_before_it_has_its_name(hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        fsync(file)
        synced.append((Path(f"/proc/self/fd/{file}").readlink().name, os.fstat(file).st_size))

    monkeypatch.setattr("os.fsync", watched)
    pull(hub, "org/tiny")
    assert synced == [(f"{sha256(gguf)}.weir.incomplete", len(gguf))]


def test_who_waits_for_another_pull_asks_the_hub_afterwards(
    hub: Hub, server: LocalHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.model.hub.pull._LOCK_TIMEOUT_S", 0.0)
    locks = hub.cache_dir / ".locks/models--org--tiny"
    locks.mkdir(parents=True)
    with file_lock(locks / "weir.lock", "pulling", timeout_s=0.0):
        assert "another process has held" in refusal(hub, "org/tiny")
    assert server.asked == []


def test_the_list_leaves_out_a_partial_file_that_goes_while_it_looks(hub: Hub, gguf: bytes) -> None:
    pull(hub, "org/tiny")
    gone = hub.cache_dir / f"models--org--tiny/blobs/{'0' * 64}.weir.incomplete"
    gone.symlink_to("gone")  # is listed, and has no size
    assert [model.partial_bytes for model in list_local_models(hub.cache_dir)] == [0, 0]


def test_a_hub_that_does_not_answer_is_named(hub: Hub, tmp_path: Path) -> None:
    nobody = Hub("http://127.0.0.1:9", tmp_path)
    assert "no answer from http://127.0.0.1:9 (ConnectError)" in refusal(nobody, "org/tiny")


def test_a_disk_without_room_is_told_before_the_download(
    hub: Hub, server: LocalHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("weir.model.hub.pull.shutil.disk_usage", lambda _: free)
    message = refusal(hub, "org/tiny")
    assert f"{hub.cache_dir} has 0.00 GB free; make room there, or set HF_HOME" in message
    assert server.downloads() == []


def test_a_disk_that_fills_up_meanwhile_keeps_what_came(hub: Hub, gguf: bytes) -> None:
    def full(_: PullProgress) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PullError, match=r"No space left on device.*What has come is kept"):
        pull_from_hub(parse_hub_reference("org/tiny"), hub, PullWatch(lambda _: None, full))
    (partial,) = (hub.cache_dir / "models--org--tiny/blobs").iterdir()
    assert partial.stat().st_size > 0


def test_offline_what_is_there_is_found_and_what_is_not_is_named(
    hub: Hub, server: LocalHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull(hub, "org/tiny")
    server.asked.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert pull(hub, "org/tiny") == path
    with pytest.raises(ModelNotFound, match="once HF_HUB_OFFLINE is not set"):
        pull(hub, "org/other")
    assert server.asked == []


def test_the_list_says_what_is_here_and_what_is_not_served(
    hub: Hub, server: LocalHub, gguf: bytes, tiny_folder: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_CACHE", str(hub.cache_dir.parent / "weir"))
    server.add_folder("org/folder", tiny_folder.folder)
    pull(hub, "org/tiny")
    pull(hub, "org/folder")
    server.repositories["org/half"] = {"half.gguf": gguf + bytes(64)}
    server.behaviour.cut_after = [100_000, *([0] * 5)]
    refusal(hub, "org/half")
    built_in, folder, half, tiny = list_local_models(hub.cache_dir)
    assert (half.name, half.partial_bytes) == ("org/half", 100_000)
    assert "only partly here: `weir pull org/half`" in half.obstacle
    assert (built_in.name, built_in.obstacle) == ("smollm2-135m", "not here yet: `weir pull smollm2-135m`")
    assert (folder.name, folder.obstacle, folder.digest) == ("org/folder", "", "")
    assert folder.revision == server.commit("org/folder")
    assert (tiny.name, tiny.obstacle) == ("org/tiny:tiny.gguf", "")
    assert (tiny.size_bytes, tiny.digest) == (len(gguf), sha256(gguf))
    (Path(folder.path) / "model-00002-of-00003.safetensors").unlink()
    _, broken, _, _ = list_local_models(hub.cache_dir)
    assert "is not whole in the hub's cache" in broken.obstacle
