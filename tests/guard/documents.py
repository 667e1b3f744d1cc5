"""The documents as their tests see them: links, anchors, fenced blocks, commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.guard.sources import ROOT

MANUALS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "compose/README.md")),
    ROOT / "compose/kubernetes/README.md",
    *sorted(path for path in (ROOT / "shared/docs").glob("*.md") if path.name != "RESULTS.md"),
    *sorted((ROOT / "shared/examples").rglob("*.md")),
)
"""Those that a user follows: their commands must work."""
RECORDS = (ROOT / "shared/docs/RESULTS.md", *sorted((ROOT / "shared/adr").glob("*.md")))
"""Those that say what was so when they were written."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_SEPARATORS = {"&&", "||", ";", "|"}
_REDIRECTIONS = {">", ">>", "<"}


@dataclass(frozen=True)
class Block:
    """A fenced block; `language` is empty for commands."""

    document: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {self.text.splitlines()[0]}"


@dataclass(frozen=True)
class Command:
    """One program with its arguments, and the variables that stand before it."""

    where: str
    variables: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


@cache
def blocks(document: Path) -> tuple[Block, ...]:
    return tuple(Block(document, *match.groups()) for match in _FENCE.finditer(document.read_text()))


def links(document: Path) -> list[str]:
    """Targets of links, those in code left out."""
    return _LINK.findall(_CODE.sub("", prose(document)))


def inline_code(document: Path) -> list[str]:
    return _CODE.findall(prose(document))


def prose(document: Path) -> str:
    """All but fenced blocks."""
    return _FENCE.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def tables(document: Path, heading: str) -> list[list[list[str]]]:
    """The tables of a section, down to the next heading, as rows of cells without head and rule."""
    section = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"{document}: no heading {heading!r}"
    found = re.findall(r"(?:^\|.*\n?)+", section[1], re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]] for table in found]


def commands(block: Block) -> Iterator[Command]:
    yield from parse_commands(block.text, str(block.document.relative_to(ROOT)))


def parse_commands(text: str, where: str) -> Iterator[Command]:
    """Every program that the lines start, also after `&&`."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _SEPARATORS:
                words.append(word)
            elif words:
                yield _command(where, words)
                words = []


def _command(where: str, words: list[str]) -> Command:
    cut = next((index for index, word in enumerate(words) if word in _REDIRECTIONS), len(words))
    plain = words[:cut]
    num_variables = next((i for i, word in enumerate(plain) if not re.fullmatch(r"\w+=\S*", word)), len(plain))
    return Command(where, tuple(word.split("=")[0] for word in plain[:num_variables]), tuple(plain[num_variables:]))
