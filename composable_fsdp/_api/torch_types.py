"""Conversions from objects of torch's FSDP classes to ours, and where torch keeps the state of a module.

Clients check ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and silently drop features otherwise, so
our class inherits from it. It inherits no behaviour: a test fails on any attribute that resolves to torch's code.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor.placement_types import Shard

from composable_fsdp._api.strategy import ShardingStrategy
from composable_fsdp._core.full_mesh import ShardPlacementResult
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, UnsupportedError
from composable_fsdp.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

TorchFSDPModule = torch_fsdp.FSDPModule
TorchUnshardHandle = torch_fsdp.UnshardHandle
TorchGradientReductionHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)
"""Torch has it from 2.15 on."""
_CONTRACT = cast(Any, torch_fsdp.fully_shard).__wrapped__
"""The function under which torch's contract registers ``fully_shard``."""
TORCH_FUNCTIONS = (torch_fsdp.fully_shard, torch_fsdp.register_fsdp_forward_method, torch_fsdp.share_comm_ctx)

_PLACEMENT_RESULTS = (ShardPlacementResult, getattr(_fsdp_common, "ShardPlacementResult", ShardPlacementResult))
"""Torch 2.11 has none."""

T = TypeVar("T")


def as_mixed_precision_policy(policy: object) -> MixedPrecisionPolicy:
    return _as_ours(policy, MixedPrecisionPolicy, "mp_policy", "a MixedPrecisionPolicy")


def as_offload_policies(policy: object) -> OffloadPolicy | dict[str, OffloadPolicy]:
    """Return one policy, or those of a mapping by name. ``None`` offloads nothing."""
    return {n: _as_offload(p) for n, p in policy.items()} if isinstance(policy, Mapping) else _as_offload(policy)


def _as_offload(policy: object) -> OffloadPolicy:
    if policy is None:
        return OffloadPolicy()
    is_cpu = issubclass(policy if isinstance(policy, type) else type(policy), torch_fsdp.CPUOffloadPolicy)
    return _as_ours(policy, CPUOffloadPolicy if is_cpu else OffloadPolicy, "offload_policy", "an OffloadPolicy or None")


def as_mesh_dims(dims: object) -> DataParallelMeshDims | None:
    return None if dims is None else _as_ours(dims, DataParallelMeshDims, "dp_mesh_dims", "a DataParallelMeshDims")


def _as_ours(given: object, kind: type[T], argument: str, expected: str) -> T:
    """Return a ``kind`` for an object of it or of torch's class with that name, or for either class (its defaults)."""
    torch_kind = getattr(torch_fsdp, kind.__name__, kind)  # torch 2.11 has no DataParallelMeshDims
    if isinstance(given, type) and issubclass(given, (kind, torch_kind)) and kind is not DataParallelMeshDims:
        given = given()
    if isinstance(given, kind):
        return given
    if not isinstance(given, torch_kind):
        raise ArgumentTypeError(f"{argument} must be {expected}, not {type(given).__name__}.")
    names = [field.name for field in fields(cast(Any, kind))]
    for field in fields(cast(Any, given)):
        value, default = getattr(given, field.name), field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if field.name not in names and value != default:
            raise UnsupportedError(
                f"{argument} has {field.name}={value!r}, which is not supported for {type(given).__name__} in this "
                "version. Leave it out."
            )
    return kind(**{name: getattr(given, name) for name in names if hasattr(given, name)})


def as_strategy(strategy: object) -> ShardingStrategy:
    """Return our ``ShardingStrategy`` for an object of ours or torch's, or a name in upper or lower case.

    The name of torch's hybrid ZeRO-2 strategy begins with an underscore, which is ignored.
    """
    if isinstance(strategy, ShardingStrategy):
        return strategy
    name = strategy.name if isinstance(strategy, torch_fsdp.ShardingStrategy) else strategy
    names = [each.name for each in ShardingStrategy]
    if not isinstance(name, str) or name.upper().lstrip("_") not in names:
        raise ConfigurationError(f"strategy must be one of {', '.join(names)}, not {strategy!r}.")
    return ShardingStrategy[name.upper().lstrip("_")]


@dataclass(frozen=True)
class ParameterPlacement:
    """The result of ``shard_placement_fn`` for one parameter. Without ``mesh`` it is sharded over that of the call."""

    shard: Shard
    mesh: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    divide: float | None = None


def as_placement(result: object, name: str) -> ParameterPlacement:
    """Return what ``shard_placement_fn`` means by ``result`` for parameter ``name``."""
    own: tuple[Any, ...] = ()
    if isinstance(result, _PLACEMENT_RESULTS):
        own = (*_own_mesh(result.mesh_info, name), getattr(result, "divide", None))  # torch's has no divisor
        result = result.placement
    result = Shard(0) if result is None else result
    if type(result) is not Shard:  # other layouts than that of Shard may derive from it
        raise ConfigurationError(
            f"shard_placement_fn returned {result!r} for parameter {name!r}; it must return Shard(dim), a "
            "ShardPlacementResult, or None."
        )
    return ParameterPlacement(result, *own)


def _own_mesh(info: Any, name: str) -> tuple[DeviceMesh, DataParallelMeshDims | None]:
    """Return the mesh that ``info`` is or has, and its data-parallel dims if it has others."""
    if isinstance(info, DeviceMesh):
        return info, None
    if getattr(info, "is_spmd_mesh", False):  # torch 2.11 has no such meshes
        return info.spmd_mesh, as_mesh_dims(info.dp_mesh_dims)
    if not isinstance(info, _fsdp_common.FSDPMeshInfo):
        raise ConfigurationError(
            f"shard_placement_fn returned a ShardPlacementResult for parameter {name!r} whose mesh_info is a "
            f"{type(info).__name__}; it must be a 1-d or 2-d DeviceMesh, or torch's FSDPMeshInfo."
        )
    dims = (info.shard_mesh_dim,) if info.mesh.ndim == 1 else (info.replicate_mesh_dim, info.shard_mesh_dim)
    if dims != tuple(range(info.mesh.ndim)):
        raise ConfigurationError(
            f"shard_placement_fn returned a mesh_info for parameter {name!r} with shard_mesh_dim="
            f"{info.shard_mesh_dim} and replicate_mesh_dim={info.replicate_mesh_dim} of a {info.mesh.ndim}-d mesh; its "
            "dims must be (shard,) or (replicate, shard), in this order."
        )
    return info.mesh, None


# -- modules sharded by torch, and where torch keeps their state


def modules_sharded_by_torch() -> list[nn.Module]:
    """Return all modules in this process that torch's ``fully_shard`` sharded."""
    gc.collect()  # torch's sharded models are in reference cycles
    return [module for module in list(_module_state_mapping) if _is_sharded_by_torch(module)]


def sharded_by_torch(module: nn.Module) -> str | None:
    """Return the name (for ``module`` itself, the class) of the first module that torch's ``fully_shard`` sharded."""
    named = module.named_modules()
    return next((name or type(each).__name__ for name, each in named if _is_sharded_by_torch(each)), None)


def _is_sharded_by_torch(module: nn.Module) -> bool:
    return issubclass(type(find_state(module)), FSDPState)  # ours pass isinstance, but not issubclass


def set_torch_state(module: nn.Module, state: object) -> None:
    """Make torch's ``fully_shard.state(module)`` return ``state``, and register ``module`` as sharded."""
    namespace = vars(module)
    namespace.setdefault(STATE_KEY, {})[_CONTRACT] = state
    namespace.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    register_state(module, state)


def register_state(module: nn.Module, state: object) -> None:
    """Make torch's ``_get_module_fsdp_state(module)`` return ``state``, for as long as the module keeps it."""
    _module_state_mapping[module] = cast(Any, weakref.ref(state))


def find_state(module: nn.Module) -> object:
    """Return the result of torch's ``fully_shard.state(module)``."""
    return vars(module).get(STATE_KEY, {}).get(_CONTRACT)
