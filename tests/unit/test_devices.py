"""Devices of parameters and buffers, and the places of the package that ask for the kind of a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import composable_fsdp
from composable_fsdp import fully_shard
from composable_fsdp.errors import MeshError, ParameterError
from tests._internals import data_parallel_axes, full_mesh, like, on_other_accelerators, shard_over_axes

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.behaviour("A-13")
def test_parameters_on_a_device_that_is_not_the_meshs_are_all_named() -> None:
    other = nn.Linear(3, 3)
    with FakeTensorMode():  # creates tensors of a device that does not exist
        other.weight, other.bias = (nn.Parameter(torch.empty(3, device="cuda")) for _ in range(2))
    model = nn.Sequential(nn.Linear(3, 3), other)
    match = (
        r"of Sequential are neither on CPU nor on cpu.*: \{'1\.weight': 'cuda:0', '1\.bias': 'cuda:0'\}\. "
        r"Pass device='cpu' to have"
    )
    with pytest.raises(ParameterError, match=match):
        fully_shard(model)
    assert type(model) is nn.Sequential


@pytest.mark.behaviour("A-13")
def test_only_cpu_and_meta_parameters_are_moved_by_default() -> None:
    devices = {name: torch.device(name) for name in ("cpu", "meta", "cuda:0", "cuda:1", "xpu:0")}
    assert on_other_accelerators(devices, torch.device("cuda:1")) == {"cuda:0": "cuda:0", "xpu:0": "xpu:0"}


@pytest.mark.behaviour("A-13")
@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda:1"), "meta"], ids=repr)
def test_a_device_that_contradicts_the_mesh_is_refused(device: torch.device | str) -> None:
    match = (
        rf"^device='{device}' contradicts the mesh, whose ranks compute on cpu\. Leave device out, or build the mesh"
    )
    with pytest.raises(MeshError, match=match):
        fully_shard(nn.Linear(3, 3), device=device)


@pytest.mark.behaviour("A-03")
@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo", "cpu")],
    ids=["native", "staged", "none"],
)
def test_the_default_mesh_is_on_the_accelerator_if_a_backend_is_native_to_it(monkeypatch, backends, device) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(full_mesh, "known_meshes", dict)
    monkeypatch.setattr(full_mesh, "init_device_mesh", lambda kind, shape: made.append(kind))
    full_mesh.default_mesh()
    assert made == [device]


@pytest.mark.behaviour("D-02")
def test_offloaded_shards_take_gradients_and_state_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    axes = data_parallel_axes(init_device_mesh("cuda", (1,)))
    sharding = shard_over_axes(torch.ones(4, 4), axes, 0)
    parameter: Any = nn.Parameter(sharding.wrap_shard(torch.ones(4, 4)))
    parameter.grad = sharding.wrap_shard(torch.ones(4, 4))
    state: Any = like(parameter, torch.ones(4, 4, dtype=torch.bfloat16))
    for tensor in (parameter, parameter.grad, state):
        assert (tensor.device.type, tensor.to_local().device.type) == ("cpu", "cpu")
    assert (state.shape, state.dtype, state.placements) == ((4, 4), torch.bfloat16, parameter.placements)


@pytest.mark.behaviour("A-13")
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), 0], ids=repr)
def test_the_device_of_the_mesh_may_be_named(device: torch.device | str | int) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), device=device)
    model(torch.ones(2, 3)).sum().backward()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


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
    Comparing the kinds of two devices is no branch on a kind: it asks whether tensors are in the same memory."""
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


def test_branches_are_found() -> None:
    source = """
pinned = self.pin_memory and device.type != 'meta'
if mesh.device_type in NAMES: pass
average = backend in ('nccl', 'xccl')
if tensor.is_cuda: pass
match device.type:
  case 'cpu': pass
"""
    assert sorted(int(found.partition(":")[0]) for found in branches(source)) == [2, 3, 4, 5, 6]
