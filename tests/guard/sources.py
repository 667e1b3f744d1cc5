"""The tree as the guards see it: Weir's own modules, and who imports whom."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_FOLDERS = (ROOT / "shared", ROOT / "services")


@dataclass(frozen=True)
class Import:
    """`path:line` imports `module`, a module of Weir's own or of somebody else. `is_late`: inside a function."""

    path: Path
    line: int
    module: str
    is_late: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def modules() -> dict[str, Path]:
    """All modules of the library, the benchmarks and the services by their dotted names; generated code left out."""
    found = {}
    for folder in SOURCE_FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[:3] != ("weir", "wire", "v1"):
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@dataclass(frozen=True)
class Outline:
    """What the guards ask of a file's tree, which would be too large to keep.

    `functions`: their names, and lines of their bodies without docstrings. `constructors`: the numbers of arguments.
    """

    docstring: str
    functions: tuple[tuple[str, int], ...]
    constructors: tuple[int, ...]


@cache
def outline(path: Path) -> Outline:
    """Of all files together it takes long: once a process."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Outline(
        docstring=ast.get_docstring(tree) or "",
        functions=tuple((node.name, _code_lines(node)) for node in functions),
        constructors=tuple(_num_arguments(node) for node in functions if node.name == "__init__"),
    )


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _num_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without self."""
    return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Every import statement of a module, late ones too, resolved to modules where a name is one."""
    path = modules()[module]
    return tuple(_imports(path, ast.parse(path.read_text()), is_late=False))


def _imports(path: Path, node: ast.AST, *, is_late: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(path, child.lineno, alias.name, is_late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            for name in (f"{child.module}.{alias.name}" for alias in child.names):
                yield Import(path, child.lineno, name if name in modules() else child.module, is_late)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(path, child, is_late=is_late or is_function)


@cache
def importers() -> dict[str, frozenset[str]]:
    """Of each module, the others that import it."""
    found: dict[str, set[str]] = {module: set() for module in modules()}
    for module in modules():
        for one in imports_of(module):
            if one.module in found and one.module != module:
                found[one.module].add(module)
    return {module: frozenset(names) for module, names in found.items()}


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
