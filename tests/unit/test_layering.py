"""The layout of the package: layers, file names and sizes of folders. A file imports from layers above its own and from
its own layer, and imports are not circular. All imports count: at the top, in functions, under ``TYPE_CHECKING``, by
``importlib.import_module("...")``, and by attribute access such as ``torch.distributed.fsdp`` after ``import
torch``."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "composable_fsdp"
ROOT = Path(__file__).parents[2] / PACKAGE

# Files and folders without the package prefix. A folder includes all of its files that have no row of their own. Layers
# in one row do not import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("_other_names",),
    ("errors", "trace", "_files", "_first_use"),
    ("policies", "_torch_version", "_text"),
    ("_core",),
    ("_extents", "codecs", "_consistency", "plan.dry_run"),
    ("_api.strategy",),
    ("_api.torch_types",),
    ("wrap",),
    ("plugins",),
    ("checkpoint._archive",),
    ("optim", "checkpoint._coordination"),
    ("_api.conversions",),
    ("init",),
    ("_api",),
    ("checkpoint._state_dict", "diagnostics"),
    ("checkpoint._safetensors",),
    ("checkpoint._dcp",),
    ("checkpoint._convert",),
    ("checkpoint",),
    ("_attached",),
    (PACKAGE,),
    ("interop", "plan", "testing"),
    ("cli",),
    ("__main__",),
)
ROW = {layer: row for row, layers in enumerate(ROWS) for layer in layers}

# Pure modules use no process groups, streams or modules. Placements are plain values, so layouts may use them.
PURE = (*("_consistency.rank_report", "_core.layout", "_core.group_plan"),)
IMPURE = ("torch.distributed", "torch.nn", "torch.cuda", "torch.accelerator")
PLACEMENTS = "torch.distributed.tensor.placement_types"

# Torch's own implementation, which only these files may import.
PEER = ("torch.distributed.fsdp", "torch.distributed._composable")
COMPAT = ("_api.torch_types", "plugins.torch_views", "wrap.torch_policies")

MOST_ENTRIES = 24
"""The maximum number of files and folders in one folder, without ``__init__.py`` and ``__main__.py``."""


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def module_name(path: Path) -> str:
    """Convert ``_core/comm.py`` to ``_core.comm``, and ``codecs/__init__.py`` to ``codecs``."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or PACKAGE


def absolute_name(name: str, package: str, level: int) -> str:
    """Return the full name of a relative import in a file of ``package``."""
    if level == 0:
        return name
    base = package.split(".")
    return ".".join([*base[: len(base) - level + 1], *([name] if name else [])])


def imported_names(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield ``(line, full dotted name)`` of each import, and of each attribute access on an imported module. ``from a
    import b`` gives ``a.b`` even if ``b`` is no module. Attribute access on this project's packages is not included,
    because the rows put the files of a package above the package itself."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                bound[alias.asname or head] = alias.name if alias.asname else head
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name(node.module or "", package, node.level)
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{base}.{alias.name}"
                yield node.lineno, f"{base}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, *rest = ast.unparse(node).split(".")
            if head in bound and not is_within(bound[head], (PACKAGE,)):
                yield node.lineno, ".".join([bound[head], *rest])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = ast.unparse(node.func).split(".")[-1]
            name = node.args[0].value
            if bound.get(function, function).endswith(("import_module", "__import__")) and isinstance(name, str):
                relative = name.lstrip(".")
                yield node.lineno, absolute_name(relative, package, len(name) - len(relative))


def own_modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the package by module name."""
    return {module_name(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


def own_module(name: str, modules: dict[str, Path]) -> str | None:
    """Return this project's module that a full dotted name refers to, or None for other projects. The result is the
    longest known module: ``errors`` for ``composable_fsdp.errors.MeshError``. Names without a known module, such as
    ``composable_fsdp.fully_shard``, belong to the package itself."""
    if not is_within(name, (PACKAGE,)):
        return None
    return longest_prefix(".".join(name.split(".")[1:]), modules) or PACKAGE


def longest_prefix(name: str, known: Container[str]) -> str | None:
    inside = name.split(".")
    return next((each for end in range(len(inside), 0, -1) if (each := ".".join(inside[:end])) in known), None)


MODULES = own_modules()


@cache
def imports(source: str, path: str) -> tuple[tuple[int, str], ...]:
    module = module_name(Path(path))
    here = PACKAGE if module == PACKAGE else f"{PACKAGE}.{module}"
    package = here if path.endswith("__init__.py") else here.rpartition(".")[0]
    return tuple(imported_names(ast.parse(source), package))


def violations(source: str, path: str) -> list[str]:
    """Describe each import in the source of ``composable_fsdp/<path>`` that violates a rule in one sentence."""
    module = module_name(Path(path))
    layer = longest_prefix(module, ROW)
    if layer is None:
        return [f"{PACKAGE}/{path} is in no layer. Add {module!r} to ROWS in tests/unit/test_layering.py"]
    found = []
    for line, name in imports(source, path):
        target = own_module(name, MODULES)
        above = longest_prefix(target, ROW) if target is not None else None
        if target is not None and above != layer and (above is None or ROW[above] >= ROW[layer]):
            found.append(f"{PACKAGE}/{path}:{line} imports {target}, which is not in a layer above {layer}")
        if is_within(name, PEER) and module not in COMPAT:
            found.append(f"{PACKAGE}/{path}:{line} uses {name}, which only {list(COMPAT)} may")
        if is_within(module, PURE) and is_within(name, IMPURE) and not is_within(name, (PLACEMENTS,)):
            found.append(f"{PACKAGE}/{path}:{line} uses {name}, but {module} is pure")
    return sorted(set(found))


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(module) for module in error.args[1]]
    return []


def test_every_import_of_the_package_keeps_to_the_layers() -> None:
    assert MODULES, f"no source under {ROOT}"
    found = [line for p in MODULES.values() for line in violations(p.read_text(), p.relative_to(ROOT).as_posix())]
    assert not found, "\n".join(found)


def test_there_are_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        targets = {
            own_module(name, MODULES) for _, name in imports(path.read_text(), path.relative_to(ROOT).as_posix())
        }
        graph[module] = {target for target in targets if target is not None and target != module}
    assert find_cycle(graph) == []
    assert {"errors", "codecs.protocol"} <= set(find_cycle(graph | {"errors": {"codecs.protocol"}}))


def test_no_layer_has_two_rows_and_each_has_files() -> None:
    assert len(ROW) == sum(map(len, ROWS))
    assert {longest_prefix(module, ROW) for module in MODULES} == set(ROW)


def test_the_contributing_page_shows_the_layers() -> None:
    page = (ROOT.parent / "docs" / "contributing.md").read_text()
    drawn = [tuple(line.split("│")[1].strip().split(", ")) for line in page.splitlines() if line.endswith(" │")]
    assert tuple(drawn) == ROWS


def test_plugins_do_not_import_each_other() -> None:
    for path in MODULES.values():
        module = module_name(path)
        if module.startswith("plugins."):
            plugin = ".".join(module.split(".")[:2])
            found = [
                own_module(name, MODULES) or ""
                for _, name in imports(path.read_text(), path.relative_to(ROOT).as_posix())
            ]
            others = {each for each in found if is_within(each, ("plugins",)) and not is_within(each, (plugin,))}
            assert not others, (module, others)


def test_tests_import_private_names_only_through_internals() -> None:
    tests = ROOT.parent / "tests"
    found = []
    for path in sorted(tests.rglob("*.py")):
        if path.name != "_internals.py":
            names = imported_names(ast.parse(path.read_text()), "tests")
            found += [f"{path.relative_to(tests)}:{line} {name}" for line, name in names if is_private(name)]
    assert not found, "import these from tests/_internals.py:\n" + "\n".join(found)


def is_private(name: str) -> bool:
    return is_within(name, (PACKAGE,)) and any(part.startswith("_") and part[:2] != "__" for part in name.split("."))


def test_file_names_in_the_package_are_unique() -> None:
    names = Counter(path.name for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_no_folder_has_too_many_files() -> None:
    entries = Counter(path.parent for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py"))
    entries.update(folder.parent for folder in {path.parent for path in MODULES.values()} - {ROOT})
    assert {folder.relative_to(ROOT): count for folder, count in entries.items() if count > MOST_ENTRIES} == {}


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("_core/memory.py", "import composable_fsdp.codecs.cast", "imports codecs.cast"),
        ("_core/memory.py", "from ..wrap._plan import x", "imports wrap._plan"),
        ("_core/comm.py", "from ..wrap import _plan", "imports wrap._plan"),
        ("_core/mesh.py", "from composable_fsdp import fully_shard", "imports composable_fsdp"),
        ("codecs/cast.py", "def f():\n    from .._consistency import main_thread", ":2 imports _consistency.main_th"),
        ("trace.py", "if TYPE_CHECKING:\n    from composable_fsdp.policies import X", ":2 imports policies"),
        ("trace.py", "import importlib\nimportlib.import_module('.policies', __package__)", "imports policies"),
        ("trace.py", "from composable_fsdp.novel import x", "imports composable_fsdp"),
    ],
)
def test_an_upward_import_is_found(path: str, source: str, message: str) -> None:
    (found,) = violations(source, path)
    assert message in found


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed import fsdp",
        "from torch.distributed._composable.contract import STATE_KEY",
        "from importlib import import_module as load\nload('torch.distributed.fsdp')",
        "__import__('torch.distributed.fsdp')",
        "import torch\ntorch.distributed.fsdp",
        "import torch.distributed as dist\ndist.fsdp",
    ],
)
def test_only_three_files_import_torchs_fsdp(source: str) -> None:
    (found,) = violations(source, "_core/hooks.py")
    assert "which only" in found
    assert violations(source, "_api/torch_types.py") == []


@pytest.mark.parametrize("path", ["_core/layout.py", "_core/group_plan.py"])
@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "from torch import nn",
        "from torch.nn import Module",
        "from torch.distributed.tensor import DTensor",
        "import torch\nx: torch.nn.Parameter",
        "def f():\n    import torch.cuda",
    ],
)
def test_pure_modules_stay_pure(path: str, source: str) -> None:
    assert any("is pure" in line for line in violations(source, path))
    assert violations(source, "_core/group.py") == []


def test_a_new_top_level_file_must_have_a_layer() -> None:
    (found,) = violations("", "novel.py")
    assert found == "composable_fsdp/novel.py is in no layer. Add 'novel' to ROWS in tests/unit/test_layering.py"
