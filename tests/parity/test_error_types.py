"""Errors are also instances of the builtin class that torch's FSDP2 raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
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


def meta_forward(library: Any) -> None:
    library.fully_shard(on_meta())(torch.ones(2, 4))


def meta_beside_real(library: Any) -> None:
    library.fully_shard(beside_meta())(torch.ones(2, 4))


def meta_unshard(library: Any) -> None:
    library.fully_shard(on_meta()).unshard()


def sharded_twice(library: Any) -> None:
    library.fully_shard(library.fully_shard(linear()))


def the_same_twice_in_a_list(library: Any) -> None:
    module = linear()
    library.fully_shard([module, module])


def no_module(library: Any) -> None:
    library.fully_shard(3)


def a_module_list(library: Any) -> None:
    library.fully_shard(nn.ModuleList([linear()]))


def three_dims(library: Any) -> None:
    library.fully_shard(linear(), mesh=init_device_mesh("cpu", (1, 1, 1)))


def reshard_after_a_word(library: Any) -> None:
    library.fully_shard(linear(), reshard_after_forward="yes")


def reshard_to_no_factor(library: Any) -> None:
    library.fully_shard(linear(), reshard_after_forward=5)


def a_scalar_parameter(library: Any) -> None:
    module = linear()
    module.scale = nn.Parameter(torch.tensor(1.0))
    library.fully_shard(module)


def a_placement_that_is_none(library: Any) -> None:
    library.fully_shard(linear(), shard_placement_fn=lambda _: "0")


def shard_dim(dim: int) -> Callable[[Any], None]:
    def case(library: Any) -> None:
        library.fully_shard(linear(), shard_placement_fn=lambda _: Shard(dim))

    case.__name__ = f"shard_dim_{dim}"
    return case


def a_dict_of_modules(library: Any) -> None:
    library.fully_shard(nn.ModuleDict({"one": linear()}))


def no_mesh_dims(library: Any) -> None:
    library.DataParallelMeshDims()


def mesh_dims(names: tuple[str, ...] | None, **dims: str) -> Callable[[Any], None]:
    def case(library: Any) -> None:
        mesh = init_device_mesh("cpu", (1,) * len(names or "1"), mesh_dim_names=names)
        library.fully_shard(linear(), mesh=mesh, dp_mesh_dims=library.DataParallelMeshDims(**dims))

    case.__name__ = f"mesh_dims_{names}_{'_'.join(dims.values())}"
    return case


def placed_on(placement: Placement, names: tuple[str, str]) -> Callable[[Any], None]:
    """A parameter that is placed on a mesh of these names, and sharded on dims of the mesh ("a", "b")."""

    def case(library: Any) -> None:
        meshes = {each: init_device_mesh("cpu", (1, 1), mesh_dim_names=each) for each in (("a", "b"), names)}
        module = linear()
        for name, parameter in list(module.named_parameters()):
            placed = distribute_tensor(parameter.detach(), meshes[names], [placement, Replicate()])
            setattr(module, name, nn.Parameter(placed))
        dims = library.DataParallelMeshDims(shard="a")
        library.fully_shard(module, mesh=meshes["a", "b"], dp_mesh_dims=dims)

    case.__name__ = f"placed_by_{placement}_on_{'_'.join(names)}"
    return case


def weights_tied_between_groups(library: Any) -> None:
    model = nn.Sequential(linear(), linear())
    model[0].weight = model[1].weight
    for module in (model[0], model[1], model):
        library.fully_shard(module)
    model(torch.ones(2, 4))


def one_hook_of_two(library: Any) -> None:
    module = library.fully_shard(linear())
    module.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
    module(torch.ones(2, 4))


def a_hook_with_too_few_arguments(library: Any) -> None:
    module = library.fully_shard(linear())
    module.weight._local_tensor.fsdp_pre_all_gather = lambda mesh, size: None
    module.weight._local_tensor.fsdp_post_all_gather = lambda *_, out=None: None
    module(torch.ones(2, 4))


def custom_all_gather_and_pool(library: Any) -> None:
    module = library.fully_shard(linear())
    module.set_custom_all_gather(OwnAllGather())
    module.set_allocate_memory_from_process_group_for_comm(True)


def custom_reduce_scatter_and_pool(library: Any) -> None:
    module = library.fully_shard(linear())
    module.set_custom_reduce_scatter(OwnAllGather())
    module.set_allocate_memory_from_process_group_for_comm(True)


def a_stream_on_a_hybrid_mesh(library: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    module = library.fully_shard(linear(), mesh=mesh)
    module.set_all_reduce_hook(lambda _: None, stream=torch.cpu.Stream())


def a_hook_that_is_none(library: Any) -> None:
    module = library.fully_shard(linear())
    module.set_all_reduce_hook(3)
    module(torch.ones(2, 4)).sum().backward()


def a_divide_factor_of_text(library: Any) -> None:
    module = library.fully_shard(linear())
    module.set_gradient_divide_factor("2")
    module(torch.ones(2, 4)).sum().backward()


def set_reshard_after_a_number(library: Any) -> None:
    library.fully_shard(linear()).set_reshard_after_forward(2)


def prefetch_of_a_plain_module(library: Any) -> None:
    library.fully_shard(linear()).set_modules_to_forward_prefetch([linear()])


def prefetch_in_backward_of_a_plain_module(library: Any) -> None:
    library.fully_shard(linear()).set_modules_to_backward_prefetch([linear()])


def buffers_of(number: object) -> Callable[[Any], None]:
    def case(library: Any) -> None:
        library.fully_shard(linear()).set_reduce_scatter_max_input_buffers(number)

    case.__name__ = f"max_input_buffers_{number!r}"
    return case


def no_such_method(library: Any) -> None:
    library.register_fsdp_forward_method(library.fully_shard(linear()), "none")


def streams_of_a_plain_module(library: Any) -> None:
    library.share_comm_ctx([linear()])


CASES = [
    meta_forward,
    meta_beside_real,
    meta_unshard,
    sharded_twice,
    the_same_twice_in_a_list,
    no_module,
    a_module_list,
    three_dims,
    reshard_after_a_word,
    reshard_to_no_factor,
    a_scalar_parameter,
    *map(shard_dim, (1, 2, -3)),
    a_dict_of_modules,
    one_hook_of_two,
    a_hook_with_too_few_arguments,
    custom_all_gather_and_pool,
    custom_reduce_scatter_and_pool,
    a_stream_on_a_hybrid_mesh,
    a_hook_that_is_none,
    a_divide_factor_of_text,
    set_reshard_after_a_number,
    prefetch_of_a_plain_module,
    prefetch_in_backward_of_a_plain_module,
    no_such_method,
    streams_of_a_plain_module,
]
CASES_FROM_2_13 = [
    a_placement_that_is_none,
    no_mesh_dims,
    mesh_dims(None, shard="a"),
    mesh_dims(("a",), shard="b"),
    mesh_dims(("a",), shard="a", replicate="b"),
    mesh_dims(("a", "b"), shard="a"),
    placed_on(Shard(0), ("a", "b")),
    placed_on(Replicate(), ("a", "c")),
    weights_tied_between_groups,
    *map(buffers_of, (2.5, True, None, "2", 0)),
]
"""Torch 2.11 has no such name, or does not check the argument."""


@pytest.mark.parametrize(
    "case",
    CASES if TorchVersion(torch.__version__) < "2.13" else [*CASES, *CASES_FROM_2_13],
    ids=lambda case: case.__name__,
)
def test_errors_are_of_the_class_that_torch_raises(case: Callable[[ModuleType], None]) -> None:
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
