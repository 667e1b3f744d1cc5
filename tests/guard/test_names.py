"""One name means one thing."""

import ast

from tests.guard.sources import ROOT, modules


def test_a_public_class_name_is_unique_in_the_tree() -> None:
    places: dict[str, list[str]] = {}
    for path in modules().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
