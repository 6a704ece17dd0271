"""The only file of the example that shards: it chooses groups, mesh and policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import (
    CommunicationPolicy,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from .model import Transformer
from .options import Options


def make_mesh(options: Options, device: torch.device, world_size: int) -> DeviceMesh:
    """Return a 1-d mesh of all ranks, or a 2-d mesh of copies (axis 0) by shards (axis 1)."""
    if options.hybrid == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (options.hybrid, world_size // options.hybrid)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def compute_dtype(options: Options) -> torch.dtype:
    """Return the dtype in which parameters are gathered and used. They are stored and updated in float32."""
    return torch.bfloat16 if options.bf16 else torch.float32


def build_sharded_model(
    options: Options, mesh: DeviceMesh, *, seed: int, communication: CommunicationPolicy | None = None
) -> Transformer:
    """Build the model of ``seed`` on the mesh's device, with one group per block and one for the rest.

    Every rank builds the same full model on the CPU and keeps its shards. The blocks are sharded first, because a group
    contains all parameters that are in no earlier group.
    """
    torch.manual_seed(seed)
    model = Transformer(options.shape, options.seq, activation_checkpointing=options.activation_checkpointing)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard,
            mp_policy=precision if options.bf16 else MixedPrecisionPolicy(),
            offload_policy=offload if options.cpu_offload else OffloadPolicy(),
            comm_policy=communication,
        )
    return model


def reshard_all(model: nn.Module) -> None:
    """Free parameters that a forward without backward left unsharded, so that they are DTensors again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True, slots=True)
class Group:
    """The sizes of one group.

    ``bytes_at_rest`` are the bytes of this rank's shards. ``bytes_gathered`` are the bytes of the outputs of all
    all-gathers in one step, in their dtype.
    """

    name: str
    parameters: int
    bytes_at_rest: int
    bytes_gathered: int


def groups_of(model: nn.Module, mesh: DeviceMesh, options: Options) -> list[Group]:
    """Return the groups of a sharded model, the root first."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return [
        _describe(name, module, compute_dtype(options), _gathers_per_step(options, mesh, is_root=not name))
        for name, module in modules.items()
        if isinstance(module, FSDPModule)
    ]


def _describe(name: str, module: nn.Module, dtype: torch.dtype, gathers: int) -> Group:
    parameters = list(dict.fromkeys(_own_parameters(module)))  # a tied weight counts once
    numel = sum(parameter.numel() for parameter in parameters)
    shards = [parameter.to_local() for parameter in parameters if isinstance(parameter, DTensor)]
    return Group(
        name=name or "root",
        parameters=numel,
        bytes_at_rest=sum(shard.numel() * shard.element_size() for shard in shards),
        bytes_gathered=numel * dtype.itemsize * gathers,
    )


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters under ``module`` that belong to no group inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _gathers_per_step(options: Options, mesh: DeviceMesh, *, is_root: bool) -> int:
    """Return the number of all-gathers per step: one in forward, and one in backward unless parameters were kept."""
    if mesh.size(-1) == 1:
        return 0  # every rank has the full model
    kept = is_root if options.reshard is None else options.reshard is False
    return 1 if kept else 2
