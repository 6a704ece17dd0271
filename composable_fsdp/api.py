"""``fully_shard`` and ``register_fsdp_forward_method``: from a user's module to a unit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from composable_fsdp.errors import ConfigurationError, ParameterError, UnsupportedError
from composable_fsdp.initialize import left_alone, materialise, synchronise
from composable_fsdp.interop import as_mixed_precision_policy, as_offload_policy
from composable_fsdp.layout.shard import resolve_dim
from composable_fsdp.mesh import DataParallelAxes, data_parallel_axes, default_mesh
from composable_fsdp.module import sharded_class
from composable_fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, Reshard
from composable_fsdp.runtime.group import ParameterGroup
from composable_fsdp.runtime.hooks import install_hooks, wrap_forward_method
from composable_fsdp.runtime.parameter import ParameterSource
from composable_fsdp.runtime.unit import Unit, find_owner, find_unit

__all__ = ["fully_shard", "register_fsdp_forward_method"]

M = TypeVar("M", bound=nn.Module)
PlacementFunction = Callable[[nn.Parameter], Shard | None]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_taken: Any = WeakIdKeyDictionary()
"""Original parameters that a group replaced, with a description: whoever still holds one shares it across groups."""


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    ignored_modules: Collection[nn.Module] | None = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], object] | None = None,
) -> M:
    """Shards the parameters of ``module`` over the data-parallel ranks, in place.

    Each parameter that no earlier call took becomes a ``DTensor`` cut on dim 0 (each rank holds ``ceil(n / ranks)``
    rows, the last ranks fewer or none). All of them are one *group*: gathered by one all-gather before the module's
    forward and backward, freed after each, their gradients averaged by one reduce-scatter. So apply it bottom-up, to
    the blocks of a model first and then to the whole. Every rank must make the same calls. Build the optimizer
    afterwards.

    Args:
        module: any module that is called. Its class becomes a subclass of its own class and of ``FSDPModule``.
        mesh: 1-d: shard over it. 2-d: replicate over the first dim, shard over the second; a second dim of size 1 is
            plain data parallelism. ``None``: all ranks of the default process group, on its accelerator if it has one.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in backward. ``False``
            keeps them until backward is over. An int that divides the shard ranks keeps a slice and gathers over that
            many neighbouring ranks in backward. ``None`` is ``True``, but ``False`` for the outermost module.
        shard_placement_fn: called with each parameter; returns ``Shard(d)``, also negative, or ``None`` for
            ``Shard(0)``.
        mp_policy: dtypes of computation, reduction and output; ours or torch's.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on CPU; ours or torch's.
        ignored_params: parameters to leave alone: not sharded, moved or reduced.
        ignored_modules: modules to leave alone with all modules below them: their parameters and buffers are not
            sharded, moved, synchronised or reduced. Give them to every call whose module contains them.
        sync_module_states: first overwrite the parameters that this call takes, and all buffers, with those of the
            first rank of the mesh, so that ranks with different seeds start equal.
        param_init_fn: called with each module that has parameters or buffers of its own on the meta device, which it
            must give memory and values, before they are shared out: ``module.to_empty(device=..., recurse=False)``,
            then ``module.reset_parameters()``. Comes before ``sync_module_states``.

    Returns:
        ``module`` itself.

    Raises:
        ConfigurationError: ``module`` or an argument makes no sense; the text says what to do.
        MeshError: no mesh was given and no process group is there, or the mesh is not 1-d or 2-d, or lacks this rank.
        ParameterError: a parameter cannot be sharded, or another group holds it, or it is on meta where
            ``sync_module_states`` or ``param_init_fn`` needs it not to be. Named in the text.
        UnsupportedError: parameters that are DTensors already, or a list of modules.
    """
    precision, offload = as_mixed_precision_policy(mp_policy), as_offload_policy(offload_policy)
    _check_module(module)
    mesh = mesh if mesh is not None else default_mesh()
    axes = data_parallel_axes(mesh)
    reshard = Reshard.parse(reshard_after_forward, axes.shard.size)
    left = left_alone(module, ignored_params, ignored_modules)
    if param_init_fn is not None:
        materialise(module, param_init_fn, left)
    if sync_module_states:
        synchronise(module, mesh, left)
    sources = _collect(module, axes, shard_placement_fn, left.parameters)
    name = type(module).__name__
    sharded = cast(type[M], sharded_class(type(module)))  # before anything changes: not every class can be derived from
    group = ParameterGroup(name, sources, axes, precision, offload)
    for source in sources:
        _taken[source.tensor] = f"{source.name!r} of {name}"
    _move_buffers(module, axes.device, left.buffers)
    install_hooks(Unit(module, group, reshard, precision))
    module.__class__ = sharded
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name(...)`` gather and free parameters as ``module(...)`` does. No effect if not sharded.

    Raises:
        ConfigurationError: the module has no such method.
    """
    unit = find_unit(module)
    if unit is not None:
        wrap_forward_method(unit, method_name)


def _check_module(module: object) -> None:
    if isinstance(module, (list, tuple)):
        raise UnsupportedError(
            "a list of modules as one group is not supported in this version: call fully_shard on a module that "
            "contains them, or on each of them."
        )
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"fully_shard takes an nn.Module, not {type(module).__name__}.")
    name = type(module).__name__
    if find_unit(module) is not None:
        raise ConfigurationError(
            f"fully_shard has been applied to this {name} already. Apply it once to each module, bottom-up."
        )
    # Other modules may do without: their methods can be registered with register_fsdp_forward_method.
    if isinstance(module, _CONTAINERS) and getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ConfigurationError(
            f"{name} has no forward, so there is no call before which its parameters could be gathered. "
            "Call fully_shard on each module in it, or on the module that contains it."
        )


def _collect(
    module: nn.Module, axes: DataParallelAxes, placement_of: PlacementFunction | None, ignored: set[int]
) -> list[ParameterSource]:
    """The parameters that this call takes, each once, with all the places where it is registered."""
    nested = {
        id(p) for m in module.modules() if (unit := find_unit(m)) is not None for p in unit.registered_parameters()
    }
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in ignored or id(parameter) in nested:
                continue
            name = f"{path}.{attribute}" if path else attribute
            found.setdefault(id(parameter), (name, parameter, []))[2].append((owner, attribute))
    module_name = type(module).__name__
    return [
        ParameterSource(name, parameter, tuple(owners), _dim_to_shard(name, parameter, axes, placement_of, module_name))
        for name, parameter, owners in found.values()
    ]


def _dim_to_shard(
    name: str, parameter: nn.Parameter, axes: DataParallelAxes, placement_of: PlacementFunction | None, module_name: str
) -> int:
    """The dim on which ``parameter`` is cut, once it is clear that it can be."""
    owner = find_owner(parameter)
    if owner is not None:
        raise ConfigurationError(
            f"parameter {name!r} of {module_name} already belongs to the group of {owner.name!r}. fully_shard works "
            f"bottom-up: call it on {module_name} first, then on the {type(owner.module).__name__} that contains it."
        )
    if parameter in _taken:
        raise ParameterError(
            f"parameter {name!r} of {module_name} is the same tensor as {_taken[parameter]}, which has been sharded "
            "already. Parameters that are shared must be in one group: leave out fully_shard on the inner module, so "
            "that the module that contains both takes them."
        )
    if isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"parameter {name!r} of {module_name} is a DTensor already (tensor parallel?); sharding it further is not "
            "supported in this version. Pass it in ignored_params."
        )
    if is_lazy(parameter):
        raise ParameterError(
            f"parameter {name!r} of {module_name} has no shape yet, being part of a lazy module. Run a forward before "
            "fully_shard, so that the module learns its shapes."
        )
    if parameter.device.type not in ("cpu", "meta", axes.device.type):
        raise ParameterError(
            f"parameter {name!r} of {module_name} is on {parameter.device}, but the mesh is on {axes.device.type}. "
            "Move the module to the mesh's device or to CPU first."
        )
    placement = placement_of(parameter) if placement_of is not None else None
    if placement is None:
        placement = Shard(0)
    if not isinstance(placement, Shard):
        raise ConfigurationError(
            f"shard_placement_fn returned {placement!r} for parameter {name!r}; it must return Shard(dim) or None."
        )
    return resolve_dim(placement.dim, parameter.shape, name)


def _move_buffers(module: nn.Module, device: torch.device, ignored: set[int]) -> None:
    for buffer in module.buffers():
        if id(buffer) not in ignored and not buffer.is_meta and buffer.device != device:
            buffer.data = buffer.to(device)
