"""Torch's own FSDP classes, and conversions from their objects to ours.

Clients check ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and silently drop features otherwise, so
our class inherits from it. It inherits no behaviour: a test fails on any attribute that resolves to torch's code.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register_fsdp_forward_method
from torch.distributed.fsdp import share_comm_ctx as torch_share_comm_ctx
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo as TorchDDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as TorchFSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo as TorchHSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState
from torch.distributed.fsdp.wrap import CustomPolicy as TorchCustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.distributed.tensor.placement_types import Shard

from composable_fsdp._sharding.mesh import DataParallelAxes
from composable_fsdp._sharding.param_sharding import ShardPlacementResult
from composable_fsdp._sharding.strategy import ShardingStrategy
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from composable_fsdp.wrap._plan import Group, Scope
from composable_fsdp.wrap.wrap_policy import Policy, as_policy, by_class

__all__ = [
    "ParameterPlacement",
    "TorchFSDPMeshInfo",
    "TorchFSDPModule",
    "TorchFSDPState",
    "TorchUnshardHandle",
    "TrainingState",
    "as_mesh_dims",
    "as_mixed_precision_policy",
    "as_offload_policy",
    "as_placement",
    "as_strategy",
    "as_wrap_policy",
    "find_state",
    "mesh_info_of",
    "modules_sharded_by_torch",
    "register_state",
    "set_torch_state",
    "sharded_by_torch",
    "torch_fully_shard",
    "torch_register_fsdp_forward_method",
    "torch_share_comm_ctx",
]

# torch 2.11 has neither of them.
TorchDataParallelMeshDims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", DataParallelMeshDims)
TorchShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", ShardPlacementResult)


def as_mixed_precision_policy(policy: object) -> MixedPrecisionPolicy:
    """Return our ``MixedPrecisionPolicy`` for an object of ours or torch's, or for either class (its defaults)."""
    policy = _instance_of(policy, MixedPrecisionPolicy, TorchMixedPrecisionPolicy)
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
            getattr(policy, "grad_dtype", None),  # of an open pull request of torch
        )
    raise ArgumentTypeError(f"mp_policy must be a MixedPrecisionPolicy, not {type(policy).__name__}.")


def as_offload_policy(policy: object) -> OffloadPolicy:
    """Return our ``OffloadPolicy`` for an object of ours or torch's, or for a class. ``None`` offloads nothing."""
    policy = _instance_of(policy, OffloadPolicy, TorchOffloadPolicy)
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    if isinstance(policy, TorchCPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)
    if isinstance(policy, TorchOffloadPolicy):
        return OffloadPolicy()
    raise ArgumentTypeError(f"offload_policy must be an OffloadPolicy or None, not {type(policy).__name__}.")


def _instance_of(policy: object, *classes: type) -> object:
    """Return ``policy``, or a default instance if it is one of ``classes`` or a subclass."""
    return policy() if isinstance(policy, type) and issubclass(policy, classes) else policy


def as_strategy(strategy: object) -> ShardingStrategy:
    """Return our ``ShardingStrategy`` for an object of ours or torch's, or a name in upper or lower case.

    The name of torch's hybrid ZeRO-2 strategy begins with an underscore, which is ignored.
    """
    if isinstance(strategy, ShardingStrategy):
        return strategy
    name = strategy.name if isinstance(strategy, TorchShardingStrategy) else strategy
    names = [each.name for each in ShardingStrategy]
    if not isinstance(name, str) or name.upper().lstrip("_") not in names:
        raise ConfigurationError(f"strategy must be one of {', '.join(names)}, not {strategy!r}.")
    return ShardingStrategy[name.upper().lstrip("_")]


def as_mesh_dims(dims: object) -> DataParallelMeshDims | None:
    """Return our ``DataParallelMeshDims`` for an object of ours or torch's."""
    if dims is None or isinstance(dims, DataParallelMeshDims):
        return dims
    if isinstance(dims, TorchDataParallelMeshDims):
        return DataParallelMeshDims(dims.shard, dims.replicate)
    raise ArgumentTypeError(f"dp_mesh_dims must be a DataParallelMeshDims, not {type(dims).__name__}.")


@dataclass(frozen=True)
class ParameterPlacement:
    """The result of ``shard_placement_fn`` for one parameter.

    Args:
        shard: the dim that is sharded.
        mesh: the mesh of the parameter, or ``None`` for that of the call.
        dims: the data-parallel dims of ``mesh``, if it has others.
        divide: the divisor of sums of gradients.
    """

    shard: Shard
    mesh: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    divide: float | None = None


def as_placement(result: object, name: str) -> ParameterPlacement:
    """Return what ``shard_placement_fn`` means by ``result`` for parameter ``name``."""
    mesh: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    divide: float | None = None
    if isinstance(result, (ShardPlacementResult, TorchShardPlacementResult)):
        info: object = result.mesh_info
        divide = getattr(result, "divide", None)  # torch's has none
        if getattr(info, "is_spmd_mesh", False):  # torch 2.11 has no such meshes
            dims, info = as_mesh_dims(cast(Any, info).dp_mesh_dims), cast(Any, info).spmd_mesh
        elif isinstance(info, TorchFSDPMeshInfo):
            info = _mesh_of(info, name)
        mesh, result = cast(DeviceMesh, info), result.placement
        if not isinstance(mesh, DeviceMesh):
            raise ConfigurationError(
                f"shard_placement_fn returned a ShardPlacementResult for parameter {name!r} whose mesh_info is a "
                f"{type(mesh).__name__}; it must be a 1-d or 2-d DeviceMesh, or torch's FSDPMeshInfo."
            )
    if result is None:
        return ParameterPlacement(Shard(0), mesh, dims, divide)
    if type(result) is not Shard:  # other layouts than that of Shard may derive from it
        raise ConfigurationError(
            f"shard_placement_fn returned {result!r} for parameter {name!r}; it must return Shard(dim), a "
            "ShardPlacementResult, or None."
        )
    return ParameterPlacement(result, mesh, dims, divide)


def _mesh_of(info: TorchFSDPMeshInfo, name: str) -> DeviceMesh:
    """Return the mesh of torch's ``info``. Raises unless its dims are (shard,) or (replicate, shard)."""
    dims = (info.shard_mesh_dim,) if info.mesh.ndim == 1 else (info.replicate_mesh_dim, info.shard_mesh_dim)
    if dims != tuple(range(info.mesh.ndim)):
        raise ConfigurationError(
            f"shard_placement_fn returned a mesh_info for parameter {name!r} with shard_mesh_dim="
            f"{info.shard_mesh_dim} and replicate_mesh_dim={info.replicate_mesh_dim} of a {info.mesh.ndim}-d mesh; its "
            "dims must be (shard,) or (replicate, shard), in this order."
        )
    return info.mesh


def mesh_info_of(axes: DataParallelAxes) -> TorchFSDPMeshInfo | TorchDDPMeshInfo:
    """Return ``axes`` as a mesh info of torch's FSDP."""
    if axes.mesh.ndim > 1:
        return TorchHSDPMeshInfo(axes.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    if axes.shard.size == axes.mesh.size():
        return TorchFSDPMeshInfo(axes.mesh, shard_mesh_dim=0)
    return TorchDDPMeshInfo(axes.mesh, replicate_mesh_dim=0)


# -- modules sharded by torch, and where torch keeps their state


def modules_sharded_by_torch() -> list[nn.Module]:
    """Return all modules in this process that torch's ``fully_shard`` sharded. Slow if there may be any."""
    classes = {made for made in TorchFSDPModule.__subclasses__() if issubclass(made, nn.Module)}
    if not classes:
        return []
    gc.collect()  # torch's sharded models are in reference cycles
    return [each for each in gc.get_objects() if type(each) in classes and _is_sharded_by_torch(each)]


def sharded_by_torch(module: nn.Module) -> str | None:
    """Return the name (for ``module`` itself, the class) of the first module that torch's ``fully_shard`` sharded."""
    named = module.named_modules()
    return next((name or type(each).__name__ for name, each in named if _is_sharded_by_torch(each)), None)


def _is_sharded_by_torch(module: nn.Module) -> bool:
    return issubclass(type(find_state(module)), TorchFSDPState)  # ours pass isinstance, but not issubclass


def set_torch_state(module: nn.Module, state: object) -> None:
    """Make torch's ``fully_shard.state(module)`` return ``state``, and register ``module`` as sharded."""
    namespace = vars(module)
    namespace.setdefault(STATE_KEY, {})[_CONTRACT] = state
    namespace.setdefault(REGISTRY_KEY, {})[torch_fully_shard.__name__] = RegistryItem()
    register_state(module, state)


def register_state(module: nn.Module, state: object) -> None:
    """Make torch's ``_get_module_fsdp_state(module)`` return ``state``, for as long as the module keeps it."""
    _module_state_mapping[module] = cast(Any, weakref.ref(state))


def find_state(module: nn.Module) -> object:
    """Return the result of torch's ``fully_shard.state(module)``."""
    return vars(module).get(STATE_KEY, {}).get(_CONTRACT)


_CONTRACT = cast(Any, torch_fully_shard).__wrapped__
"""The function under which torch's contract registers ``fully_shard``."""


# -- policies of torch.distributed.fsdp.wrap


def as_wrap_policy(policy: object) -> Policy:
    """Return our policy for one of ours or torch's.

    Torch's are ``ModuleWrapPolicy``, ``CustomPolicy``, and functions such as ``size_based_auto_wrap_policy`` or
    partials of them.
    """
    if isinstance(policy, TorchModuleWrapPolicy):
        return by_class(*policy._module_classes)
    if isinstance(policy, TorchCustomPolicy):
        return as_policy(_as_predicate(policy._lambda_fn))
    if callable(policy) and _takes_remainder(policy):
        return _AutoWrap(policy)
    return as_policy(policy)


def _as_predicate(choose: Callable[[nn.Module], Any]) -> Callable[[nn.Module, str], Any]:
    """Return ``choose`` with torch's keyword ``sharding_strategy`` renamed. In torch an empty dict chooses nothing."""

    def predicate(module: nn.Module, _: str) -> Any:
        answer = choose(module)
        if not isinstance(answer, Mapping):
            return answer
        return {"strategy" if key == "sharding_strategy" else key: value for key, value in answer.items()} or False

    return predicate


def _takes_remainder(policy: Callable[..., Any]) -> bool:
    try:
        return "nonwrapped_numel" in inspect.signature(policy).parameters
    except ValueError:  # some builtins have none
        return False


@dataclass(frozen=True)
class _AutoWrap:
    """Policy from a function ``(module, recurse, nonwrapped_numel) -> bool``.

    With ``recurse=True`` the function returns whether to visit the children of a module with so many parameters. It is
    called again with ``recurse=False`` and the number of parameters that no chosen module below has, and returns
    whether to choose the module.
    """

    function: Callable[..., Any]

    def plan(self, scope: Scope) -> list[Group]:
        return [scope.group([module]) for module in self._chosen(scope.model, scope, set())]

    def _chosen(self, module: nn.Module, scope: Scope, taken: set[nn.Parameter]) -> Iterator[nn.Module]:
        own = scope.parameters(module)
        if self.function(module=module, recurse=True, nonwrapped_numel=_numel(own, taken)):
            for child in module.children():
                yield from self._chosen(child, scope, taken)
        chosen = self.function(module=module, recurse=False, nonwrapped_numel=_numel(own, taken))
        if chosen and module in scope.modules and any(p not in taken for p in own):
            taken.update(own)
            yield module


def _numel(parameters: list[nn.Parameter], taken: set[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p not in taken)
