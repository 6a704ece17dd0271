"""The layers: a file imports only from rows above its own, and some files only what keeps them pure.

Imports count wherever they stand: in functions, under ``TYPE_CHECKING``, as ``importlib.import_module("...")`` and as
attribute access such as ``torch.distributed.fsdp`` after ``import torch``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "composable_fsdp"
ROOT = Path(__file__).parents[2] / PACKAGE

# Modules without the package prefix; a sub-package stands for its own __init__.py. Modules in one row are peers,
# which do not import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "grad_mode", "labels"),
    ("policy",),
    ("trace",),
    ("lifecycle",),
    ("codec.fused", "codec.hadamard", "codec.protocol", "codec.scales"),
    ("codec.blockwise", "codec.cast", "codec.float8"),
    ("codec.feedback",),
    ("codec.encoder",),
    ("codec.choice",),
    ("codec",),
    ("layout.shard",),
    ("layout.extent",),
    ("layout.placement", "layout.reduction"),
    ("layout.bucket", "layout.pack"),
    ("layout.plan", "layout.runs"),
    ("layout",),
    ("memory.lanes",),
    ("memory.storage",),
    ("memory.store",),
    ("memory",),
    ("comm.interrupt", "comm.passes", "comm.protocol", "comm.roll", "comm.shown"),
    ("comm.sums", "comm.watch"),
    ("comm.agreement", "comm.alike"),
    ("comm.line", "comm.loopback", "comm.shared.faults", "comm.shared.memory", "comm.shared.rounds"),
    ("comm.c10d", "comm.gloo", "comm.shared.operation", "comm.shared.wire"),
    ("comm.custom", "comm.shared.engine"),
    ("comm.shared.communicator", "comm.shared.connect"),
    ("comm.shared",),
    ("comm.choose",),
    ("comm",),
    ("mesh",),
    ("sharding", "strategy"),
    ("runtime.starting_values", "runtime.tensor_classes"),
    ("runtime.parameter", "runtime.channel", "runtime.compile", "runtime.steps"),
    ("runtime.containers", "runtime.registration"),
    ("runtime.exchange", "runtime.gradient_extension"),
    ("runtime.common", "runtime.scatter", "runtime.extension"),
    ("runtime.repeated",),
    ("runtime.bucket",),
    ("runtime.extended",),
    ("runtime.messages", "runtime.traffic"),
    ("runtime.gathering", "runtime.reduction"),
    ("runtime.tensors",),
    ("runtime.joined",),
    ("runtime.gradients",),
    ("runtime.group",),
    ("runtime.changes", "runtime.schedule"),
    ("runtime.unit",),
    (
        "runtime.call",
        "runtime.company",
        "runtime.instep",
        "runtime.late_ties",
        "runtime.manifest",
        "runtime.order",
        "runtime.recovery",
        "runtime.refusals",
        "runtime.settings",
        "runtime.strangers",
        "runtime.underway",
    ),
    ("runtime.unsharding",),
    ("runtime.reductions",),
    ("runtime.backward",),
    ("runtime.iteration",),
    ("runtime.assemble",),
    ("runtime.hooks",),
    ("runtime",),
    ("grouping", "tied"),
    ("wrap",),
    ("testing.messages", "testing.template", "testing.text"),
    ("testing.fake", "testing.faults", "testing.partition", "testing.pool", "testing.trace", "testing.worker"),
    ("testing.ranks",),
    ("testing",),
    ("acceptance",),
    ("bypass", "client_state", "collect", "copying", "setters"),
    ("module",),
    ("broadcast", "placed", "registered"),
    ("loan", "sharded_rng", "whole"),
    ("clip", "communication", "full_params", "initialize", "nonfinite", "twins"),
    ("communication_state", "describe", "optim", "wrapping"),
    (
        "checkpoint.options",
        "checkpoint.param_groups",
        "checkpoint.pending",
        "checkpoint.progress",
        "checkpoint.reports",
    ),
    ("checkpoint.names", "checkpoint.part", "checkpoint.ranks"),
    ("checkpoint.rekey", "checkpoint.tensor_classes"),
    ("checkpoint.holders", "checkpoint.local_state", "checkpoint.tensor_forms"),
    ("checkpoint.forms", "checkpoint.ema"),
    ("checkpoint.optimizer_in", "checkpoint.optimizer_offers", "checkpoint.optimizer_out"),
    ("checkpoint.contents", "checkpoint.folder"),
    ("checkpoint.manifest", "checkpoint.planners"),
    ("checkpoint.intact", "checkpoint.storage"),
    ("checkpoint.restore",),
    ("checkpoint.loading", "checkpoint.saving"),
    ("checkpoint.store",),
    ("checkpoint.safetensors_keys", "checkpoint.tensor_files"),
    ("checkpoint.safetensors_replace", "checkpoint.stored"),
    ("checkpoint.safetensors_load", "checkpoint.safetensors_save"),
    ("checkpoint.items", "checkpoint.tree"),
    ("checkpoint.sources",),
    ("checkpoint.conversion", "checkpoint.describe", "checkpoint.mapped", "checkpoint.verify"),
    ("checkpoint.convert_to_dcp", "checkpoint.convert_to_files"),
    ("checkpoint.convert",),
    ("checkpoint.commands",),
    ("checkpoint",),
    ("checkpoint.__main__",),
    ("diagnostics.records", "diagnostics.signals"),
    ("diagnostics.compare", "diagnostics.recording"),
    ("diagnostics",),
    ("diagnostics.commands",),
    ("diagnostics.__main__",),
    ("api",),
    ("from_rank0",),
    (PACKAGE,),
    ("interop.patch",),
    ("interop",),
    ("interop.__main__",),
)
ROW = {module: row for row, modules in enumerate(ROWS) for module in modules}

# Pure: no process groups, streams or modules. Placements are plain values, so the layout may speak of them.
PURE = ("comm.roll", "lifecycle", "layout", "runtime.schedule")
IMPURE = ("torch.distributed", "torch.nn", "torch.cuda", "torch.accelerator")
PLACEMENTS = "torch.distributed.tensor.placement_types"

# Torch's own implementation, which only the acceptance layer may know.
PEER = ("torch.distributed.fsdp", "torch.distributed._composable")


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the packages or something inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def module_name(path: Path) -> str:
    """``runtime/group.py`` -> ``runtime.group``; ``runtime/__init__.py`` -> ``runtime``."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or PACKAGE


def absolute(name: str, package: str, level: int) -> str:
    """The full name of a relative import in a file of ``package``."""
    if level == 0:
        return name
    base = package.split(".")
    return ".".join([*base[: len(base) - level + 1], *([name] if name else [])])


def imported_names(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """``(line, full dotted name)`` of everything that the source imports, or reaches through a module that it imported.

    ``from a import b`` gives ``a.b``, whether ``b`` is a module or not. What is reached through one of our own packages
    needs no second look: the rows put everything in a package above the package itself.
    """
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.split(".")[0]
                bound[alias.asname or head] = alias.name if alias.asname else head
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", package, node.level)
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{base}.{alias.name}"
                yield node.lineno, f"{base}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, *rest = ast.unparse(node).split(".")
            if head in bound and not within(bound[head], (PACKAGE,)):
                yield node.lineno, ".".join([bound[head], *rest])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = ast.unparse(node.func).split(".")[-1]
            name = node.args[0].value
            if bound.get(function, function).endswith(("import_module", "__import__")) and isinstance(name, str):
                relative = name.lstrip(".")
                yield node.lineno, absolute(relative, package, len(name) - len(relative))


def own_module(name: str) -> str | None:
    """The module of ours that a full dotted name leads to; None for what is not ours.

    The longest known module counts: ``errors`` for ``composable_fsdp.errors.MeshError``. A name that leads to none
    belongs to the package itself, as ``composable_fsdp.fully_shard`` does.
    """
    if not within(name, (PACKAGE,)):
        return None
    inside = name.split(".")[1:]
    if not inside:
        return PACKAGE
    known = (".".join(inside[:end]) for end in range(len(inside), 0, -1))
    return next((module for module in known if module in ROW), PACKAGE)


def violations(source: str, path: str) -> list[str]:
    """What the source of ``composable_fsdp/<path>`` imports against the rules, one sentence each."""
    module = module_name(Path(path))
    if module not in ROW:
        return [f"{PACKAGE}/{path} is in no row. Add {module!r} to ROWS in tests/unit/test_layering.py"]
    is_package = path.endswith("__init__.py")
    here = PACKAGE if module == PACKAGE else f"{PACKAGE}.{module}"
    package = here if is_package else here.rpartition(".")[0]
    found = []
    for line, name in imported_names(ast.parse(source), package):
        target = own_module(name)
        if target is not None and target != module and ROW[target] >= ROW[module]:
            found.append(f"{PACKAGE}/{path}:{line} imports {target}, which is not in a row above {module}")
        if within(name, PEER) and module != "acceptance":
            found.append(f"{PACKAGE}/{path}:{line} uses {name}, which only acceptance.py may")
        if within(module, PURE) and within(name, IMPURE) and not within(name, (PLACEMENTS,)):
            found.append(f"{PACKAGE}/{path}:{line} uses {name}, but {module} is pure")
    return sorted(set(found))


def test_every_import_of_the_package_keeps_to_the_layers() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert files, f"no source under {ROOT}"
    found = [line for file in files for line in violations(file.read_text(), file.relative_to(ROOT).as_posix())]
    assert not found, "\n".join(found)


def test_no_module_has_two_rows() -> None:
    assert len(ROW) == sum(map(len, ROWS))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layout/plan.py", "from composable_fsdp.layout import bucket, shard"),
        ("layout/plan.py", "from .bucket import Bucket\nfrom ..errors import PlanError"),
        ("layout/__init__.py", "from .plan import GroupPlan"),
        (
            "layout/placement.py",
            "from torch.distributed.tensor.placement_types import Shard\nimport torch\ntorch.nonzero",
        ),
        (
            "runtime/group.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from composable_fsdp.mesh import Axis",
        ),
        ("acceptance.py", "from torch.distributed.fsdp import FSDPModule"),
        ("api.py", "import importlib\nimportlib.import_module('torch.distributed')\nprint('torch.distributed.fsdp')"),
        ("__init__.py", "from composable_fsdp.api import fully_shard"),
    ],
)
def test_imports_from_above_are_fine(path: str, source: str) -> None:
    assert violations(source, path) == []


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        pytest.param("layout/shard.py", "import composable_fsdp.layout.plan", "imports layout.plan", id="upward"),
        pytest.param("layout/shard.py", "from .plan import GroupPlan", "imports layout.plan", id="upward, relative"),
        pytest.param("layout/shard.py", "from . import plan", "imports layout.plan", id="upward, module by name"),
        pytest.param("mesh.py", "from composable_fsdp import fully_shard", "imports composable_fsdp", id="the top"),
        pytest.param(
            "comm/line.py",
            "def f():\n    from composable_fsdp.comm.loopback import LoopbackCommunicator",
            ":2 imports comm.loopback",
            id="peer, in a function",
        ),
        pytest.param(
            "trace.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from composable_fsdp.lifecycle import State",
            ":3 imports lifecycle",
            id="upward, only for types",
        ),
        pytest.param(
            "trace.py", "import importlib\nimportlib.import_module('.api', __package__)", "imports api", id="by call"
        ),
        pytest.param(
            "trace.py", "from composable_fsdp.novel import x", "imports composable_fsdp", id="unlisted target"
        ),
    ],
)
def test_an_arrow_up_is_caught(path: str, source: str, message: str) -> None:
    (found,) = violations(source, path)
    assert message in found


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.fsdp",
        "from torch.distributed import fsdp",
        "from torch.distributed.fsdp import fully_shard",
        "from torch.distributed._composable.contract import STATE_KEY",
        "from importlib import import_module\nimport_module('torch.distributed.fsdp')",
        "from importlib import import_module as load\nload('torch.distributed.fsdp')",
        "import importlib\nimportlib.import_module('torch.distributed.fsdp')",
        "__import__('torch.distributed.fsdp')",
        "import torch\ntorch.distributed.fsdp",
        "import torch.distributed as dist\ndist.fsdp",
    ],
)
def test_the_peer_is_known_to_acceptance_only(source: str) -> None:
    (found,) = violations(source, "runtime/hooks.py")
    assert "which only acceptance.py may" in found
    assert violations(source, "acceptance.py") == []


@pytest.mark.parametrize("path", ["layout/shard.py", "lifecycle.py", "runtime/schedule.py"])
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
    assert violations(source, "runtime/group.py") == []


def test_a_new_file_must_be_given_a_row() -> None:
    (found,) = violations("", "layout/novel.py")
    assert found == (
        "composable_fsdp/layout/novel.py is in no row. Add 'layout.novel' to ROWS in tests/unit/test_layering.py"
    )
