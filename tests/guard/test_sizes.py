"""Files of at most about 300 lines, functions of about 40: when one grows, an idea is missing."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50

# path: why it may be longer. An entry that is not needed any more fails the test too.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {
    "tests/unit/gateway/world.py:open_world": "puts a whole gateway together, in the order of its parts",
}


def own_sources() -> list[Path]:
    rooms = ("shared", "services", "tests", "proto")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    return [path for path in sources if "wire/v1" not in str(path)]


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body without the docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def test_files_stay_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in own_sources()}
    too_long = {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert too_long.keys() == LONG_FILES.keys(), too_long


def test_functions_stay_short() -> None:
    too_long = {
        f"{path.relative_to(ROOT)}:{node.name}": code_lines(node)
        for path in own_sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES
    }
    assert too_long.keys() == LONG_FUNCTIONS.keys(), too_long
