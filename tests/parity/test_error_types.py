"""Errors are also instances of the builtin class that torch's FSDP2 raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

import composable_fsdp as ours
from composable_fsdp import FSDPError
from tests.helpers.sharding import single_rank

pytestmark = pytest.mark.behaviour("I-01")

Case = Callable[[Any], object]
"""Makes a mistake with the library that it is given."""


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with single_rank():
        yield


class OwnAllGather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None: ...


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def on_meta() -> nn.Linear:
    with torch.device("meta"):
        return linear()


def beside_meta() -> nn.Linear:
    module = linear()
    module.bias = nn.Parameter(torch.empty(4, device="meta"))
    return module


def forward(module: Any) -> Any:
    return module(torch.ones(2, 4))


def a_scalar_parameter(library: Any) -> None:
    module = linear()
    module.scale = nn.Parameter(torch.tensor(1.0))
    library.fully_shard(module)


def mesh_dims(library: Any, names: tuple[str, ...] | None, **dims: str) -> None:
    mesh = init_device_mesh("cpu", (1,) * len(names or "1"), mesh_dim_names=names)
    library.fully_shard(linear(), mesh=mesh, dp_mesh_dims=library.DataParallelMeshDims(**dims))


def placed_on(library: Any, placement: Placement, names: tuple[str, str]) -> None:
    """Shard a parameter that is placed on a mesh of these names on dims of the mesh ("a", "b")."""
    meshes = {each: init_device_mesh("cpu", (1, 1), mesh_dim_names=each) for each in (("a", "b"), names)}
    module = linear()
    for name, parameter in list(module.named_parameters()):
        placed = distribute_tensor(parameter.detach(), meshes[names], [placement, Replicate()])
        setattr(module, name, nn.Parameter(placed))
    library.fully_shard(module, mesh=meshes["a", "b"], dp_mesh_dims=library.DataParallelMeshDims(shard="a"))


def weights_tied_between_groups(library: Any) -> None:
    model = nn.Sequential(linear(), linear())
    model[0].weight = model[1].weight
    for module in (model[0], model[1], model):
        library.fully_shard(module)
    model(torch.ones(2, 4))


def hooks(library: Any, **methods: Any) -> None:
    module = library.fully_shard(linear())
    for name, method in methods.items():
        setattr(module.weight._local_tensor, f"fsdp_{name}_all_gather", method)
    forward(module)


def setter(name: str, *values: Any, runs: bool = False) -> Case:
    """Call a setter of a sharded module, and train with it if it is asked for."""

    def case(library: Any) -> None:
        module = library.fully_shard(linear())
        getattr(module, name)(*values)
        if runs:
            forward(module).sum().backward()

    return case


def with_a_pool(name: str) -> Case:
    def case(library: Any) -> None:
        module = library.fully_shard(linear())
        getattr(module, name)(OwnAllGather())
        module.set_allocate_memory_from_process_group_for_comm(True)

    return case


def a_stream_on_a_hybrid_mesh(library: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    library.fully_shard(linear(), mesh=mesh).set_all_reduce_hook(lambda _: None, stream=torch.cpu.Stream())


CASES: dict[str, Case] = {
    "meta, forward": lambda library: forward(library.fully_shard(on_meta())),
    "meta beside real": lambda library: forward(library.fully_shard(beside_meta())),
    "meta, unshard": lambda library: library.fully_shard(on_meta()).unshard(),
    "sharded twice": lambda library: library.fully_shard(library.fully_shard(linear())),
    "the same twice in a list": lambda library: library.fully_shard([linear()] * 2),
    "no module": lambda library: library.fully_shard(3),
    "a module list": lambda library: library.fully_shard(nn.ModuleList([linear()])),
    "a dict of modules": lambda library: library.fully_shard(nn.ModuleDict({"one": linear()})),
    "three dims": lambda library: library.fully_shard(linear(), mesh=init_device_mesh("cpu", (1, 1, 1))),
    "reshard after a word": lambda library: library.fully_shard(linear(), reshard_after_forward="yes"),
    "reshard to no factor": lambda library: library.fully_shard(linear(), reshard_after_forward=5),
    "a scalar parameter": a_scalar_parameter,
    "shard dim 1": lambda library: library.fully_shard(linear(), shard_placement_fn=lambda _: Shard(1)),
    "shard dim 2": lambda library: library.fully_shard(linear(), shard_placement_fn=lambda _: Shard(2)),
    "shard dim -3": lambda library: library.fully_shard(linear(), shard_placement_fn=lambda _: Shard(-3)),
    "one hook of two": lambda library: hooks(library, pre=lambda mesh: None),
    "a hook with too few arguments": lambda library: hooks(
        library, pre=lambda mesh, size: None, post=lambda *_, out=None: None
    ),
    "custom all-gather and pool": with_a_pool("set_custom_all_gather"),
    "custom reduce-scatter and pool": with_a_pool("set_custom_reduce_scatter"),
    "a stream on a hybrid mesh": a_stream_on_a_hybrid_mesh,
    "a hook that is none": setter("set_all_reduce_hook", 3, runs=True),
    "a divide factor of text": setter("set_gradient_divide_factor", "2", runs=True),
    "set reshard after a number": setter("set_reshard_after_forward", 2),
    "prefetch of a plain module": setter("set_modules_to_forward_prefetch", [nn.Linear(4, 4)]),
    "prefetch in backward of a plain module": setter("set_modules_to_backward_prefetch", [nn.Linear(4, 4)]),
    "no such method": lambda library: library.register_fsdp_forward_method(library.fully_shard(linear()), "none"),
    "streams of a plain module": lambda library: library.share_comm_ctx([linear()]),
}
CASES_FROM_2_13: dict[str, Case] = {
    "a placement that is none": lambda library: library.fully_shard(linear(), shard_placement_fn=lambda _: "0"),
    "no mesh dims": lambda library: library.DataParallelMeshDims(),
    "a mesh without names": lambda library: mesh_dims(library, None, shard="a"),
    "shards on another dim": lambda library: mesh_dims(library, ("a",), shard="b"),
    "replicas on another dim": lambda library: mesh_dims(library, ("a",), shard="a", replicate="b"),
    "a dim that is left": lambda library: mesh_dims(library, ("a", "b"), shard="a"),
    "sharded on a dim of data": lambda library: placed_on(library, Shard(0), ("a", "b")),
    "replicated on another mesh": lambda library: placed_on(library, Replicate(), ("a", "c")),
    "weights tied between groups": weights_tied_between_groups,
    **{
        f"max input buffers {number!r}": setter("set_reduce_scatter_max_input_buffers", number)
        for number in (2.5, True, None, "2", 0)
    },
}
"""Torch 2.11 has no such name, or does not check the argument."""

CHECKED = CASES if TorchVersion(torch.__version__) < "2.13" else CASES | CASES_FROM_2_13


@pytest.mark.parametrize("case", CHECKED.values(), ids=CHECKED)
def test_errors_are_of_the_class_that_torch_raises(case: Case) -> None:
    with pytest.raises(Exception) as of_torch:  # noqa: PT011 (torch's class is what is asked)
        case(torch_fsdp)
    with pytest.raises(FSDPError) as of_ours:
        case(ours)
    assert isinstance(of_ours.value, of_torch.type), f"torch raises {of_torch.type.__name__}: {of_torch.value}"


def accept_all(library: Any) -> list[torch.Tensor]:
    policies = [
        {"offload_policy": library.OffloadPolicy},
        {"offload_policy": None},
        {"mp_policy": library.MixedPrecisionPolicy},
    ]
    return [library.fully_shard(nn.Linear(4, 4), **each)(torch.ones(2, 4)) for each in policies]


def test_classes_of_policies_stand_for_their_defaults_and_none_offloads_nothing() -> None:
    assert [out.dtype for out in accept_all(ours)] == [torch.float32] * 3
    if TorchVersion(torch.__version__) < "2.15":
        assert [out.dtype for out in accept_all(torch_fsdp)] == [torch.float32] * 3
    else:  # its class of mixed precision is no longer a policy there
        with pytest.raises(TypeError, match="dataclass instances"):
            accept_all(torch_fsdp)
    assert dist.get_world_size() == 1
    for wrong in ("cpu", 3, nn.Linear):
        with pytest.raises(TypeError, match=r"offload_policy must be an OffloadPolicy or None, not (str|int|type)\."):
            ours.fully_shard(nn.Linear(4, 4), offload_policy=wrong)  # type: ignore[arg-type]
