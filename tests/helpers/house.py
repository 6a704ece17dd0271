"""Measure the source of the package: lines, the files that an import reads, fields of classes, and imported names.
Nothing of the package is imported. tests/unit/test_house.py bounds the figures."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "composable_fsdp"


class Size(NamedTuple):
    """The size of source: all lines, and lines with a statement that is no import, docstring or ``__all__``."""

    lines: int
    code: int

    def __add__(self, other: object) -> Size:
        assert isinstance(other, Size)
        return Size(self.lines + other.lines, self.code + other.code)


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file by its path below the package, such as ``_core/comm.py``."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in files}


def sizes_by_folder() -> dict[str, Size]:
    """Return the size of each folder at the top of the package; ``"."`` for the files beside them."""
    sizes: dict[str, Size] = {}
    for path in trees():
        folder = path.split("/")[0] if "/" in path else "."
        source = (PACKAGE / path).read_text()
        size = Size(len(source.splitlines()), len(code_lines(source)))
        sizes[folder] = sizes.get(folder, Size(0, 0)) + size
    return sizes


def code_lines(source: str) -> set[int]:
    """Return the lines with a statement that is no import, docstring or ``__all__``. Comments are free."""
    tree = ast.parse(source)
    stripped = [line.strip() for line in source.splitlines()]
    silent = {number for number, line in enumerate(stripped, 1) if not line or line.startswith("#")}
    found: set[int] = set()
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or _is_declaration(statement):
            continue
        body = getattr(statement, "body", None)
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        last = max(first, body[0].lineno - 1) if body else statement.end_lineno or first
        found.update(range(first, last + 1))
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return found - docstrings - silent


def _is_declaration(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets)
    return isinstance(statement, (ast.Import, ast.ImportFrom))


def imported_by(path: str) -> set[str]:
    """Return the files that importing the file ``path`` reads, itself included. ``TYPE_CHECKING`` blocks do not count.
    The ``__init__.py`` of the package itself does not count: it imports everything."""
    seen: set[str] = set()
    left = [path]
    while left:
        current = left.pop()
        if current not in seen:
            seen.add(current)
            left += _direct_imports(trees()[current])
    return seen


def _direct_imports(tree: ast.Module) -> Iterator[str]:
    for statement in _at_import(tree.body):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == PACKAGE.name:
            module = "/".join((statement.module or "").split(".")[1:])
            for alias in statement.names:
                candidates = (f"{module}/{alias.name}.py", f"{module}.py", f"{module}/__init__.py")
                yield from [each.lstrip("/") for each in candidates if each.lstrip("/") in trees()][:1]


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _at_import(statement.orelse)
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _at_import([*statement.body, *getattr(statement, "orelse", ())])
        else:
            yield statement


def class_fields() -> Counter[str]:
    """Return the number of fields of each class: attributes that it gives ``self``, and annotated class attributes.
    Classes of the same name count as the widest of them."""
    fields: Counter[str] = Counter()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields[node.name] = max(fields[node.name], len(_fields(node)))
    return fields


def _fields(node: ast.ClassDef) -> set[str]:
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    own = {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}
    annotated = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
    return own | {target.id for target in annotated if isinstance(target, ast.Name)}


def imported_names() -> Counter[str]:
    return Counter(
        {
            path: sum(
                len(node.names)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name
            )
            for path, tree in trees().items()
            if not path.endswith("__init__.py")
        }
    )


def imported_code(path: str) -> int:
    return sum(len(code_lines((PACKAGE / each).read_text())) for each in imported_by(path))


def loops_over_sets() -> list[str]:
    return [f"{path}:{line}" for path in trees() for line in sorted(lines_over_sets((PACKAGE / path).read_text()))]


def lines_over_sets(source: str) -> set[int]:
    """Return the lines with a loop over a set, or over a name that its function binds to one. A loop whose result has
    no order, such as that of ``any`` or of a set comprehension, does not count."""
    found: set[int] = set()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        bound = [(node.targets[0], node.value) for node in ast.walk(function) if isinstance(node, ast.Assign)]
        names = {target.id for target, value in bound if isinstance(target, ast.Name) and _is_set(value, frozenset())}
        skipped: set[ast.AST] = set()
        for node in ast.walk(function):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            loops: list[ast.expr] = []
            if isinstance(node, ast.Call) and called in _WITHOUT_ORDER:
                skipped.update(node.args)
            elif isinstance(node, ast.Call) and called in _IN_ORDER and node not in skipped:
                loops += node.args
            elif isinstance(node, ast.For):
                loops.append(node.iter)
            elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)) and node not in skipped:
                loops += [generator.iter for generator in node.generators]
            found.update(loop.lineno for loop in loops if _is_set(loop, names))
    return found


_WITHOUT_ORDER = {"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum"}
_IN_ORDER = {"enumerate", "filter", "list", "map", "tuple", "zip"}


def _is_set(value: ast.expr, names: AbstractSet[str]) -> bool:
    """Return whether the expression ``value`` is seen to be a set. ``names`` are bound to sets."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)):
        return _is_set(value.left, names) or _is_set(value.right, names)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in ("frozenset", "set", "WeakSet")
    return isinstance(value, (ast.Set, ast.SetComp)) or (isinstance(value, ast.Name) and value.id in names)
