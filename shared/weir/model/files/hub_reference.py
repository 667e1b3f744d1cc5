"""How a model of the Hugging Face Hub is named: ORG/NAME[:FILE.gguf][@REVISION]. Read without any request."""

import re
from dataclasses import dataclass

from weir.model.errors import ModelNotFound

_MAX_REPOSITORY_CHARS = 96  # the hub's own limit
_MAX_NAME_CHARS = 200  # with what a cache adds to it, less than the 255 bytes of a file's name
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_PATH_IN_REPOSITORY = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "write ORG/NAME, ORG/NAME:FILE.gguf, or either with @REVISION"

DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class HubReference:
    """`filename` is a GGUF file of the repository; empty: all of it. `revision` empty: the default branch."""

    repository: str
    filename: str = ""
    revision: str = ""

    @property
    def name(self) -> str:
        """What requests call the model: a revision changes what it says, not what it is."""
        return f"{self.repository}:{self.filename}" if self.filename else self.repository

    @property
    def folder_name(self) -> str:
        """Of the repository, in the hub's cache."""
        return f"models--{self.repository.replace('/', '--')}"

    def at(self, revision: str) -> "HubReference":
        return HubReference(self.repository, self.filename, revision)

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def is_commit(text: str) -> bool:
    """Whether it names one state of a repository for ever, and not a branch or a tag that moves."""
    return _COMMIT.fullmatch(text) is not None


def is_plain_path(text: str) -> bool:
    """Whether a path in a repository can be joined to a folder: relative, no part of it hidden, none leads out."""
    return len(text) <= _MAX_NAME_CHARS and _PATH_IN_REPOSITORY.fullmatch(text) is not None


def may_be_hub_reference(text: str) -> bool:
    """Whether somebody who wrote it may mean the hub: one slash, and no path that says where it starts."""
    return re.split("[:@]", text, maxsplit=1)[0].count("/") == 1 and not text.startswith(("/", "./", "../", "~"))


def parse_hub_reference(text: str) -> HubReference:
    """Raises ModelNotFound: names the part that cannot be one, its limit, and the form."""
    if "://" in text:
        raise _wrong(text, f"is a URL; {_FORM}, and the hub by HF_ENDPOINT")
    head, at, revision = text.partition("@")
    repository, colon, filename = head.partition(":")
    problem = _problem_of_repository(repository)
    if problem is None and (colon or filename):
        problem = _problem_of_filename(filename)
    if problem is None and (at or revision) and not is_plain_path(revision):
        problem = f"revision {revision[:80]!r}: not a branch, a tag or a commit of at most {_MAX_NAME_CHARS} characters"
    if problem is not None:
        raise _wrong(text, f"{problem}; {_FORM}")
    return HubReference(repository, filename, revision)


def _problem_of_repository(repository: str) -> str | None:
    shown = repr(repository[:80])
    if len(repository) > _MAX_REPOSITORY_CHARS:
        return f"repository {shown}…: {len(repository)} characters, the hub has at most {_MAX_REPOSITORY_CHARS}"
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        return f"repository {shown}: not ORG/NAME of letters, digits and single . _ - between them"
    if repository.endswith((".", "-", ".git")) or "./" in repository or "-/" in repository:
        return f"repository {shown}: neither part ends with . or -, and the name not with .git"
    if repository.endswith(".gguf"):
        return f"repository {shown}: no such file here, and a file of the hub comes after a colon"
    return None


def _problem_of_filename(filename: str) -> str | None:
    if not is_plain_path(filename):
        return f"file {filename[:80]!r}: not a relative path of at most {_MAX_NAME_CHARS} plain characters"
    if not filename.endswith(".gguf"):
        return f"file {filename[:80]!r}: only a .gguf file is named; a folder of safetensors is fetched as a whole"
    return None


def _wrong(text: str, problem: str) -> ModelNotFound:
    shown = text if len(text) <= _MAX_NAME_CHARS else f"{text[:80]}…"
    return ModelNotFound(f"no model {shown!r}: {problem}")
