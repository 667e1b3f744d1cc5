"""A repository of the hub at one commit: its files, which of them make the model, and how each gets into the cache."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

from weir.model.errors import PullError
from weir.model.files.hub_cache import hub_cache_dir, link_blob
from weir.model.files.hub_reference import HubReference, is_commit, is_plain_path
from weir.model.files.safetensors import INDEX_NAME
from weir.model.hub.blobs import FetchWatch, RemoteFile, RetryPolicy, fetch_blob, kept_bytes

CONFIG_NAME = "config.json"
HEAD_NAMES = (CONFIG_NAME, "generation_config.json", INDEX_NAME)
"""What says whether a folder can be served, and which weights it has; fetched before the plan is told."""
TEXT_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

MAX_TEXT_BYTES = 64 << 20
"""Of a file that is no weights. The largest tokenizers have some 40 MB."""
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_PART_OF_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models come from and where they are kept. The token is the library's business."""

    endpoint: str
    cache_dir: Path
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def of_environment(cls) -> "Hub":
        """HF_ENDPOINT, HF_HUB_CACHE and HF_HOME, as huggingface_hub has read them."""
        return cls(constants.ENDPOINT, hub_cache_dir())


@dataclass(frozen=True, slots=True)
class Repository:
    """`files` by name. Those of an odd name, or without size and digest, are left out: nothing could be checked."""

    hub: Hub
    reference: HubReference
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def folder(self) -> Path:
        return self.hub.cache_dir / self.reference.folder_name

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.commit

    def missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """What has yet to come of `files`."""
        return sum(file.size_bytes - kept_bytes(file, self.folder / "blobs") for file in files)

    def fetch(self, file: RemoteFile, watch: FetchWatch) -> None:
        """Its blob, the digest found right. Raises PullError."""
        repository, endpoint = self.reference.repository, self.hub.endpoint
        if kept_bytes(file, self.folder / "blobs") < file.size_bytes:
            _need_http(self, file)
        with pull_errors(self.reference, self.hub):
            url = hf_hub_url(repository, file.name, revision=self.commit, endpoint=endpoint)
            fetch_blob(url, file, self.folder / "blobs", watch, self.hub.retries)

    def link(self, files: Sequence[RemoteFile]) -> None:
        """Into the snapshot, once their blobs are here. Raises PullError."""
        with pull_errors(self.reference, self.hub):
            for file in files:
                # not by hf_hub_download: it names the blob, and so a path, after whatever ETag the server sends
                link_blob(self.folder / "blobs" / file.digest, self.snapshot / file.name)


def open_repository(reference: HubReference, hub: Hub) -> Repository:
    """One request. Raises PullError."""
    with pull_errors(reference, hub):
        try:
            info = HfApi(endpoint=hub.endpoint).model_info(
                reference.repository,
                revision=reference.revision or None,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            commit, siblings = info.sha or "", info.siblings or []
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, HfHubHTTPError):
                raise
            raise PullError(f"{hub.endpoint} does not answer as the hub does ({error!r:.200})") from error
    if not is_commit(commit):
        raise PullError(f"{hub.endpoint} does not answer as the hub does: it says commit {commit[:60]!r}")
    files = [file for sibling in siblings if (file := _try_read_file(sibling)) is not None]
    return Repository(hub, reference, commit, {file.name: file for file in files})


def _try_read_file(sibling: RepoSibling) -> RemoteFile | None:
    """None: not a file that can be fetched and checked."""
    name = sibling.rfilename
    size_bytes, digest = sibling.size, sibling.blob_id
    if sibling.lfs is not None:
        size_bytes, digest = sibling.lfs.size, sibling.lfs.sha256
    if not isinstance(name, str) or not is_plain_path(name) or not isinstance(size_bytes, int) or size_bytes < 0:
        return None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    return RemoteFile(name, size_bytes, digest)


def choose_gguf(repository: Repository) -> RemoteFile | None:
    """The GGUF file that was named, or the only one; None: the repository is a folder of safetensors.

    Raises PullError: lists what there is to name, or says that there is nothing that Weir reads.
    """
    reference, files = repository.reference, repository.files
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if reference.filename:
        if reference.filename not in files:
            raise PullError(f"file {reference.filename!r}: {reference.repository} has {_listed(repository, ggufs)}")
        return _whole_gguf(files[reference.filename])
    if CONFIG_NAME in files and any(_is_weights(name) for name in files):
        return None
    if len(ggufs) == 1:
        return _whole_gguf(files[ggufs[0]])
    if ggufs:
        raise PullError(
            f"{reference}: name a file after a colon; {reference.repository} has {_listed(repository, ggufs)}"
        )
    pickles = sorted(name for name in files if name.endswith(_PICKLES))
    instead = f"; {pickles[0]} is a pickle, which may run code and is never loaded" if pickles else ""
    raise PullError(f"{reference}: has neither {CONFIG_NAME} with *.safetensors nor a *.gguf file{instead}")


def weights_of(repository: Repository) -> list[RemoteFile]:
    """The safetensors that the index in the snapshot names; without one, all that a folder is read from.

    Raises PullError: the index is broken, or names what the repository does not have.
    """
    files = repository.files
    if INDEX_NAME not in files:
        return [files[name] for name in sorted(files) if _is_weights(name)]
    try:
        weight_map = json.loads((repository.snapshot / INDEX_NAME).read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PullError(f"{repository.reference}: {INDEX_NAME} cannot be read as an index ({error!r:.200})") from error
    absent = [name for name in names if name not in files or not _is_weights(name)]
    if absent:
        raise PullError(f"{repository.reference}: {INDEX_NAME} names {absent[0][:80]!r}, which is no file of it")
    return [files[name] for name in names]


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")


def _whole_gguf(file: RemoteFile) -> RemoteFile:
    if _PART_OF_GGUF.search(file.name):
        raise PullError(f"file {file.name!r}: is a part of a model; Weir reads GGUF models of one file")
    return file


def _need_http(repository: Repository, file: RemoteFile) -> None:
    limit_bytes = constants.MAX_HTTP_DOWNLOAD_SIZE
    if file.size_bytes > limit_bytes:
        raise PullError(
            f"file {file.name!r}: has {file.size_bytes / 1e9:.0f} GB; the hub gives more than "
            f"{limit_bytes / 1e9:.0f} GB by a protocol of its own only. "
            f"`hf download {repository.reference.repository} {file.name}` fetches it into the same cache"
        )


def _listed(repository: Repository, names: Sequence[str]) -> str:
    shown = [f"{name} ({repository.files[name].size_bytes / 1e9:.2f} GB)" for name in names[:_MAX_NAMES_SHOWN]]
    more = len(names) - len(shown)
    return (", ".join(shown) or "no .gguf file") + (f", and {more} more" if more > 0 else "")


@contextmanager
def pull_errors(reference: HubReference, hub: Hub) -> Iterator[None]:
    """What the library and the disk say, as a PullError that says what to do. Never a URL: it may be a signed one."""
    try:
        yield
    except GatedRepoError as error:
        page = f"{hub.endpoint}/{reference.repository}"
        raise PullError(f"{reference}: is gated; accept its terms at {page}, and {_token_advice()}") from error
    except RepositoryNotFoundError as error:
        raise PullError(
            f"{reference}: {hub.endpoint} has no such repository, or a private one; look at its name, or "
            f"{_token_advice()}. (There is no file or folder of this name here either.)"
        ) from error
    except RevisionNotFoundError as error:
        raise PullError(f"{reference}: the repository has no revision {reference.revision or 'main'!r}") from error
    except OfflineModeIsEnabled as error:
        raise PullError(f"{reference}: HF_HUB_OFFLINE is set, and it is not in {hub.cache_dir}") from error
    except HfHubHTTPError as error:
        raise PullError(_refusal(reference, hub, error.response.status_code)) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise PullError(_silence(reference, hub, error)) from error
    except OSError as error:
        raise PullError(
            f"{reference}: cannot be kept in {hub.cache_dir} ({error.strerror or error}); make room or set "
            "HF_HOME to another folder. What has come is kept"
        ) from error


def _refusal(reference: HubReference, hub: Hub, status: int) -> str:
    if status in (401, 403):
        return f"{reference}: {hub.endpoint} refuses it ({status}); {_token_advice()}"
    return f"{reference}: {hub.endpoint} answers with status {status}; try again later"


def _silence(reference: HubReference, hub: Hub, error: BaseException) -> str:
    return (
        f"{reference}: no answer from {hub.endpoint} ({type(error).__name__}); is it reachable, or is a proxy or "
        "HF_ENDPOINT needed? A model that is on this machine can be named by its path"
    )


def _token_advice() -> str:
    if get_token() is None:
        return "give a token of somebody who may read it: HF_TOKEN, or `hf auth login`"
    return "the token that was given (HF_TOKEN, or of `hf auth login`) may not read it: give another"
