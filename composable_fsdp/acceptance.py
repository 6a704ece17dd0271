"""The one place that knows torch's own FSDP: what of it ours accepts, and what clients test against.

Clients check ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and silently drop features otherwise, so our
class inherits from that one. It inherits nothing else from it: a test walks the class and fails on any attribute that
resolves to torch's code.
"""

from __future__ import annotations

import gc
from typing import Any, cast

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import DataParallelMeshDims as TorchDataParallelMeshDims
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register_fsdp_forward_method
from torch.distributed.fsdp import share_comm_ctx as torch_share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as TorchFSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as TorchShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState
from torch.distributed.tensor.placement_types import Shard

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from composable_fsdp.sharding import ShardPlacementResult

__all__ = [
    "TorchFSDPModule",
    "TorchUnshardHandle",
    "as_mesh_dims",
    "as_mixed_precision_policy",
    "as_offload_policy",
    "as_placement",
    "enter_state",
    "find_state",
    "modules_sharded_by_torch",
    "sharded_by_torch",
    "torch_fully_shard",
    "torch_register_fsdp_forward_method",
    "torch_share_comm_ctx",
]


def as_mixed_precision_policy(policy: object) -> MixedPrecisionPolicy:
    """Ours, or torch's as ours."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    raise ConfigurationError(f"mp_policy must be a MixedPrecisionPolicy, not {type(policy).__name__}.")


def as_offload_policy(policy: object) -> OffloadPolicy:
    """Ours, or torch's as ours."""
    if isinstance(policy, OffloadPolicy):
        return policy
    if isinstance(policy, TorchCPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)
    if isinstance(policy, TorchOffloadPolicy):
        return OffloadPolicy()
    raise ConfigurationError(f"offload_policy must be an OffloadPolicy, not {type(policy).__name__}.")


def as_mesh_dims(dims: object) -> DataParallelMeshDims | None:
    """Ours, or torch's as ours."""
    if dims is None or isinstance(dims, DataParallelMeshDims):
        return dims
    if isinstance(dims, TorchDataParallelMeshDims):
        return DataParallelMeshDims(dims.shard, dims.replicate)
    raise ConfigurationError(f"dp_mesh_dims must be a DataParallelMeshDims, not {type(dims).__name__}.")


def as_placement(result: object, name: str) -> tuple[Shard, DeviceMesh | None]:
    """What ``shard_placement_fn`` returned for parameter ``name``: how it is cut, and over which mesh if another."""
    mesh: DeviceMesh | None = None
    if isinstance(result, (ShardPlacementResult, TorchShardPlacementResult)):
        info: object = result.mesh_info
        if isinstance(info, TorchFSDPMeshInfo):
            info = _mesh_of(info, name)
        mesh, result = cast(DeviceMesh, info), result.placement
        if not isinstance(mesh, DeviceMesh):
            raise ConfigurationError(
                f"shard_placement_fn returned a ShardPlacementResult for parameter {name!r} whose mesh_info is a "
                f"{type(mesh).__name__}; it must be a 1-d or 2-d DeviceMesh, or torch's FSDPMeshInfo."
            )
    if result is None:
        return Shard(0), mesh
    if not isinstance(result, Shard):
        raise ConfigurationError(
            f"shard_placement_fn returned {result!r} for parameter {name!r}; it must return Shard(dim), a "
            "ShardPlacementResult, or None."
        )
    return result, mesh


def _mesh_of(info: TorchFSDPMeshInfo, name: str) -> DeviceMesh:
    """The mesh of torch's ``info``, if it says of each dim what ours is taken to mean."""
    dims = (info.shard_mesh_dim,) if info.mesh.ndim == 1 else (info.replicate_mesh_dim, info.shard_mesh_dim)
    if dims != tuple(range(info.mesh.ndim)):
        raise ConfigurationError(
            f"shard_placement_fn returned a mesh_info for parameter {name!r} with shard_mesh_dim="
            f"{info.shard_mesh_dim} and replicate_mesh_dim={info.replicate_mesh_dim} of a {info.mesh.ndim}-d mesh; its "
            "dims must be (shard,) or (replicate, shard), in this order."
        )
    return info.mesh


def modules_sharded_by_torch() -> list[nn.Module]:
    """Those in this process that torch's own ``fully_shard`` was applied to. Slow where there may be some."""
    classes = {made for made in TorchFSDPModule.__subclasses__() if issubclass(made, nn.Module)}
    if not classes:
        return []
    gc.collect()  # a model that is no longer used dies in a cycle
    return [each for each in gc.get_objects() if type(each) in classes and _is_sharded_by_torch(each)]


def sharded_by_torch(module: nn.Module) -> str | None:
    """The name of a module within ``module``, or the class of ``module``, if torch's own ``fully_shard`` took it."""
    named = module.named_modules()
    return next((name or type(each).__name__ for name, each in named if _is_sharded_by_torch(each)), None)


def _is_sharded_by_torch(module: nn.Module) -> bool:
    return isinstance(find_state(module), TorchFSDPState)


def enter_state(module: nn.Module, state: object) -> None:
    """Makes ``state`` what torch's ``fully_shard.state(module)`` returns, and ``module`` one that is sharded."""
    namespace = vars(module)
    namespace.setdefault(STATE_KEY, {})[_CONTRACT] = state
    namespace.setdefault(REGISTRY_KEY, {})[torch_fully_shard.__name__] = RegistryItem()


def find_state(module: nn.Module) -> object:
    """What torch's ``fully_shard.state(module)`` returns."""
    return vars(module).get(STATE_KEY, {}).get(_CONTRACT)


_CONTRACT = cast(Any, torch_fully_shard).__wrapped__
"""The function by which torch's contract knows ``fully_shard``."""
