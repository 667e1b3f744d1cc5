"""A file is one thought: long enough to be one, short enough to be read; a folder holds what one idea needs."""

from collections import Counter
from pathlib import Path

from tests.guard.sources import ROOT, importers, modules, outline

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_FOLDER_FILES = 25
MAX_CONSTRUCTOR_ARGUMENTS = 7
TINY_FILE_LINES = 30

# path: why it may be as it is. An entry that is not needed any more fails the test too.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
LARGE_FOLDERS: dict[str, str] = {}
WIDE_CONSTRUCTORS: dict[str, str] = {}
TINY_FILES: dict[str, str] = {}


def own_sources() -> list[Path]:
    return [*modules().values(), *(path for room in ("tests", "proto") for path in sorted((ROOT / room).rglob("*.py")))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_stay_readable() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in own_sources()}
    too_long = {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert too_long.keys() == LONG_FILES.keys(), too_long


def test_functions_stay_short() -> None:
    too_long = {
        f"{name_of(path)}:{name}": num_lines
        for path in own_sources()
        for name, num_lines in outline(path).functions
        if num_lines > MAX_FUNCTION_LINES
    }
    assert too_long.keys() == LONG_FUNCTIONS.keys(), too_long


def test_a_folder_holds_what_one_idea_needs() -> None:
    counts = Counter(name_of(path.parent) for path in modules().values() if path.name != "__init__.py")
    too_many = {folder: count for folder, count in counts.items() if count > MAX_FOLDER_FILES}
    assert too_many.keys() == LARGE_FOLDERS.keys(), too_many


def test_no_constructor_takes_more_than_a_reader_can_hold() -> None:
    """Of classes that say `__init__` themselves; dataclasses are records, and name each field."""
    wide = {
        name_of(path): most
        for path in modules().values()
        if (most := max(outline(path).constructors, default=0)) > MAX_CONSTRUCTOR_ARGUMENTS
    }
    assert wide.keys() == WIDE_CONSTRUCTORS.keys(), wide


def test_a_tiny_file_with_one_importer_has_a_reason_to_be_one() -> None:
    tiny = {
        name_of(path): sorted(importers()[module])
        for module, path in modules().items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(importers()[module]) == 1
        and len(path.read_text().splitlines()) <= TINY_FILE_LINES
        and not module.startswith("weir.cli.")  # a file a command
    }
    assert tiny.keys() == TINY_FILES.keys(), tiny
