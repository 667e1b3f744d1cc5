"""One name means one thing, and a mark is where it is looked for."""

import ast
import re

from tests.guard.sources import ROOT, modules

MARK = "mark." + "stack"
"""Written so that this file has none."""


def test_a_public_class_name_is_unique_in_the_tree() -> None:
    places: dict[str, list[str]] = {}
    for path in modules().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_stacks_are_started_where_make_test_looks_for_them() -> None:
    """Elsewhere the first run of pytest would leave them out, and the second would not find them."""
    folders = re.findall(r"^STACKS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    marked = [path for path in (ROOT / "tests").rglob("*.py") if MARK in path.read_text()]
    assert marked != []
    assert [str(path) for path in marked if not any(path.is_relative_to(ROOT / folder) for folder in folders)] == []
