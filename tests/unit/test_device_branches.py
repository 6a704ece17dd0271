"""Branches on the kind of a device, or on the name of a backend, are in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import composable_fsdp

ROOT = Path(composable_fsdp.__file__).parent
HOME = "_core/memory.py"
ELSEWHERE = {
    "_consistency/shutdown.py": "lets threads of gloo end, after the last step",
    "plan/simulated_job.py": "leaves out tensors on the meta device, in a plan without a device",
    "diagnostics/meters.py": "reads the statistics of an allocator, or of the process",
    "_api/group_setters.py": "runs a hook of the user on a stream of the user",
    "checkpoint/_dcp/save.py": "the random state of an accelerator, by its name in the checkpoint",
}
"""Other modules that may ask, and why. In these, nothing of a step differs between devices."""

KINDS = {"cpu", "cuda", "xpu", "mps", "meta", "gloo", "nccl", "xccl", "mpi", "fake"}
"""Names of kinds of devices and of backends."""
ASKING = {
    *("get_device_module", "current_accelerator", "is_cpu", "is_cuda", "is_mps", "is_xpu"),
    *("is_current_stream_capturing", "get_backend"),
}
"""Attributes that depend on the kind of a device or on the backend."""


def branches(source: str) -> Iterator[str]:
    """Yield ``line: text`` of each expression that asks for the kind of a device or for the name of a backend.

    Comparing the kinds of two devices is no branch on a kind: it asks whether tensors are in the same memory.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.expr, ast.Match)):
            continue
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            is_asking = any(map(_is_kind, operands)) and not all(map(_is_kind, operands))
            is_asking |= any(constant.value in KINDS for each in operands for constant in _constants(each))
        elif isinstance(node, ast.Match):
            is_asking = _is_kind(node.subject)
        else:
            is_asking = isinstance(node, ast.Attribute) and node.attr in ASKING
        if is_asking:
            line = node.lineno if isinstance(node, ast.expr) else node.subject.lineno
            yield f"{line}: {ast.unparse(node).splitlines()[0]}"


def _is_kind(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.endswith(("device.type", "device_type", "accelerator.type"))


def _constants(node: ast.expr) -> list[ast.Constant]:
    inside = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return [each for each in inside if isinstance(each, ast.Constant) and isinstance(each.value, str)]


@pytest.mark.behaviour("M-03")
def test_only_one_module_branches_on_the_kind_of_a_device() -> None:
    found = {path.relative_to(ROOT).as_posix(): list(branches(path.read_text())) for path in ROOT.rglob("*.py")}
    assert found.pop(HOME), f"nothing found in {HOME}, so nothing would be found elsewhere"
    new = [f"{path}:{line}" for path, lines in sorted(found.items()) for line in lines if path not in ELSEWHERE]
    assert not new, f"make these a capability in {HOME}, asked for where communicators are made:\n" + "\n".join(new)
    assert {path for path in ELSEWHERE if not found[path]} == set(), "these are no exceptions any more"


@pytest.mark.parametrize(
    "source",
    [
        "if shard.device.type == 'cpu': pass",
        "pinned = self.pin_memory and device.type != 'meta'",
        "if mesh.device_type in NAMES: pass",
        "average = backend in ('nccl', 'xccl')",
        "if tensor.is_cuda: pass",
        "module = torch.get_device_module(device)",
        "match device.type:\n  case 'cpu': pass",
        "if dist.get_backend(group).startswith('gl'): pass",
    ],
)
def test_a_branch_is_found(source: str) -> None:
    assert len(list(branches(source))) == 1
