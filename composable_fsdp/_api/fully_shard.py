"""``fully_shard`` and ``register_fsdp_forward_method``: from a user's module to a unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._api.apply_policy import shard_by_policy
from composable_fsdp._api.direct_call_errors import explain_uncaught
from composable_fsdp._api.fsdp_module import sharded_class
from composable_fsdp._api.materialize import left_alone, materialise, synchronise
from composable_fsdp._api.param_discovery import CommunicationFunction, ParamDiscovery, PlacementFunction
from composable_fsdp._runtime.compile import mark_managed
from composable_fsdp._runtime.groups.param_group import ParameterGroup
from composable_fsdp._runtime.groups.state import FSDPState, find_state, state_of
from composable_fsdp._runtime.groups.unmanaged_params import plain_places
from composable_fsdp._runtime.hooks import install_hooks, wrap_forward_method
from composable_fsdp._runtime.lazy_init import watch_optimizers
from composable_fsdp._runtime.params.sharded_param import note_taken
from composable_fsdp._sharding.mesh import (
    DataParallelAxes,
    data_parallel_axes,
    default_mesh,
    named_data_parallel_axes,
    warn_without_cpu_backend,
)
from composable_fsdp._sharding.param_sharding import FullMesh
from composable_fsdp._sharding.strategy import ShardingStrategy, resolve_strategy
from composable_fsdp._torch_compat.fsdp_state import client_state, enter_client_states
from composable_fsdp._torch_compat.torch_types import (
    as_mesh_dims,
    as_mixed_precision_policy,
    as_offload_policy,
    as_strategy,
    as_wrap_policy,
    sharded_by_torch,
)
from composable_fsdp.codecs.communication_policy import CommunicationPolicy
from composable_fsdp.diagnostics._recording import enable_from_environment
from composable_fsdp.diagnostics.describe import describe_groups
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, ConflictError
from composable_fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Reshard,
    ReshardKind,
)
from composable_fsdp.wrap.tied_weights import tied_holders
from composable_fsdp.wrap.wrap_policy import PolicyLike

__all__ = ["fully_shard", "register_fsdp_forward_method"]

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: Modules,
    *,
    policy: PolicyLike | None = None,
    strategy: ShardingStrategy | str | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    ignored_modules: Collection[nn.Module] | None = None,
    device: torch.device | str | int | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shared_from: Sequence[nn.Module] = (),
    comm_policy: CommunicationPolicy | CommunicationFunction | None = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], object] | None = None,
) -> Modules:
    """Shards the parameters of ``module`` over the data-parallel ranks, in place.

    Each parameter that no earlier call took becomes a ``DTensor`` cut on dim 0 (each rank holds ``ceil(n / ranks)``
    rows, the last ranks fewer or none). All of them are one *group*: gathered by one all-gather before the module's
    forward and backward, freed after each, their gradients averaged by one reduce-scatter. So apply it bottom-up, to
    the blocks of a model first and then to the whole. Every rank must make the same calls. Build the optimizer
    afterwards.

    Args:
        module: any module that is called. Its class becomes a subclass of its own class and of ``FSDPModule``. A list
            of modules makes one group, in memory from when the first of them begins to when the last has ended its
            forward; in any one forward some of them may not run.
        policy: which modules in ``module`` become groups of their own, before the rest becomes that of ``module``: a
            set of module classes; a function of a module and its name that returns a bool, or keywords for that group;
            or one of :mod:`composable_fsdp.wrap`, such as ``transformer_blocks()``. Torch's policies are accepted. The
            other arguments count for all groups. Parameters that several groups use belong to the first of them.
        strategy: a :class:`ShardingStrategy`, or its name, in place of ``reshard_after_forward``, and of ``mesh`` if
            that is ``None``: hybrid ones then shard within hosts, as ``LOCAL_WORLD_SIZE`` says. Torch's are accepted.
        mesh: 1-d: shard over it. 2-d: replicate over the first dim, shard over the second; a second dim of size 1 is
            plain data parallelism. ``None``: all ranks of the default process group, on its accelerator if it has one.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in backward. ``False``
            keeps them until backward is over. An int that divides the shard ranks keeps a slice and gathers over that
            many neighbouring ranks in backward. ``None`` is ``True``, but ``False`` for the outermost module, and on
            accelerators for the last groups of forward, with which backward begins: one, unless
            ``set_prefetch_limit`` says otherwise.
        shard_placement_fn: called with each parameter; returns ``Shard(d)``, also negative, or ``None`` for
            ``Shard(0)``, or a ``ShardPlacementResult`` with a mesh of its own, such as that of experts.
        mp_policy: dtypes of computation, reduction and output; ours or torch's.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on CPU; ours or torch's.
            ``None`` offloads nothing.
        ignored_params: parameters to leave alone: not sharded, moved or reduced.
        ignored_modules: modules to leave alone with all modules below them: their parameters and buffers are not
            sharded, moved, synchronised or reduced. Give them to every call whose module contains them.
        device: where this rank computes, and to where parameters and buffers are moved from any device they are on: one
            of the mesh's type, or its index. ``None``: the current one, to which only what is on CPU is moved.
        dp_mesh_dims: ``mesh`` is one of all axes, these are the data-parallel ones, and every parameter is a DTensor on
            ``mesh``, replicated over them.
        shared_from: sharded modules that own parameters which ``module`` uses too, such as a tied embedding. They stay
            in their group, which is brought into memory along with this one. Modules around ``module`` need not say so.
        comm_policy: codecs with which parameters travel, for all of the group, or as a function of each parameter.
        sync_module_states: first overwrite the parameters that this call takes, and all buffers, with those of the
            first rank of the mesh, so that ranks with different seeds start equal.
        param_init_fn: called with each module that has parameters or buffers of its own on the meta device, which it
            must give memory and values, before they are shared out: ``module.to_empty(device=..., recurse=False)``,
            then ``module.reset_parameters()``. Comes before ``sync_module_states``. Where the values depend on a seed
            only, ``initialize(model, seed=...)`` after ``fully_shard`` needs no such function.

    Returns:
        ``module`` itself.

    Raises:
        ConfigurationError: ``module`` or an argument makes no sense; the text says what to do.
        MeshError: no mesh was given and no process group is there, or the mesh is not 1-d or 2-d, or lacks this rank,
            or cannot be joined with the mesh on which a parameter is a DTensor already, or cannot serve ``strategy``,
            or ``device`` is of another type.
        ParameterError: a parameter cannot be sharded, or another group holds it, or it is on a device from which
            nothing is moved unasked, or on meta where ``sync_module_states`` or ``param_init_fn`` needs it not to be.
            Named in the text.
    """
    enable_from_environment()
    if policy is not None:
        options = {
            "strategy": strategy,
            "mesh": mesh,
            "reshard_after_forward": reshard_after_forward,
            "shard_placement_fn": shard_placement_fn,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "ignored_params": ignored_params,
            "ignored_modules": ignored_modules,
            "dp_mesh_dims": dp_mesh_dims,
            "shared_from": shared_from,
            "comm_policy": comm_policy,
            "sync_module_states": sync_module_states,
            "device": device,
            "param_init_fn": param_init_fn,
        }
        shard_by_policy(_as_model(module), as_wrap_policy(policy), fully_shard, options)
        return module
    if strategy is not None:
        resolved = resolve_strategy(as_strategy(strategy), mesh, as_mesh_dims(dp_mesh_dims), reshard_after_forward)
        mesh, reshard_after_forward = resolved.mesh, resolved.reshard_after_forward
    precision, offload = as_mixed_precision_policy(mp_policy), as_offload_policy(offload_policy)
    modules = _as_modules(module)
    for each in modules:
        _check_module(each)
    axes, full_mesh = _axes(mesh, as_mesh_dims(dp_mesh_dims), device)
    if isinstance(offload, CPUOffloadPolicy):
        warn_without_cpu_backend(axes)
    reshard = Reshard.parse(reshard_after_forward, axes.shard.size)
    left = left_alone(modules, ignored_params, ignored_modules)
    for each in modules:
        if param_init_fn is not None:
            materialise(each, param_init_fn, left)
    lenders = list(dict.fromkeys((*map(state_of, shared_from), *tied_holders(modules))))
    collector = ParamDiscovery(axes, full_mesh, shard_placement_fn, left.parameters, device is not None, lenders)
    if comm_policy is not None:
        collector.communication_of = _as_function(comm_policy)
    sources = collector.collect(modules)
    if sync_module_states:
        elsewhere = {id(s.tensor): s.sharding.axes.mesh for s in sources if s.sharding.axes is not axes}
        for each in modules:
            synchronise(each, axes.mesh, left, elsewhere)
    if reshard.kind is ReshardKind.SMALLER:  # made now, where all ranks are at the same place, and not in a forward
        for each_axes in dict.fromkeys((axes, *(source.sharding.axes for source in sources))):
            each_axes.smaller_shard_axis(reshard.mesh_size)
    name = ", ".join(type(each).__name__ for each in modules)
    classes = [sharded_class(type(each)) for each in modules]  # before anything changes: some cannot be derived from
    group = ParameterGroup(name, sources, axes, precision, offload)
    for source, parameter in zip(sources, group.parameters, strict=True):
        note_taken(source, parameter, name)
    state = FSDPState(_outermost(modules), group, reshard, precision, lenders)
    enter_client_states(state, modules, install_hooks(state))
    watch_optimizers()
    explain_uncaught()
    for each, its_class in zip(modules, classes, strict=True):
        _move_buffers(each, axes.device, left.buffers)
        mark_managed(each.modules())
        state.attach(each)
        each.__class__ = its_class
    state.plain_places = plain_places(modules)
    return module


_attributes: Any = fully_shard
_attributes.state = client_state  # as with torch's
_attributes.groups = describe_groups


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name(...)`` gather and free parameters as ``module(...)`` does. No effect if not sharded.

    Raises:
        ConfigurationError: the module has no such method.
    """
    state = find_state(module)
    if state is not None:
        wrap_forward_method(state, module, method_name)


def _as_function(policy: CommunicationPolicy | CommunicationFunction) -> CommunicationFunction:
    if isinstance(policy, CommunicationPolicy):
        return lambda _: policy
    if not callable(policy):
        raise ArgumentTypeError(
            f"comm_policy must be a CommunicationPolicy, or a function of a parameter that returns one, not {policy!r}."
        )
    return policy


def _as_model(module: object) -> nn.Module:
    if isinstance(module, (list, tuple)):
        raise ArgumentTypeError("policy= says which modules in a model are groups: pass that model, and no list.")
    _check_module(module)
    return cast(nn.Module, module)


def _as_modules(module: object) -> list[nn.Module]:
    if not isinstance(module, (list, tuple)):
        return [cast(nn.Module, module)]
    if not module:
        raise ConfigurationError("fully_shard was given an empty list of modules.")
    if len({id(each) for each in module}) < len(module):
        raise ConflictError("fully_shard was given a list with the same module twice.")
    return list(module)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that no other of them contains: a call of an inner one is part of a call of the outer one."""
    inner = {id(below) for each in modules for below in each.modules() if below is not each}
    return [each for each in modules if id(each) not in inner]


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"fully_shard takes an nn.Module or a list of them, not {type(module).__name__}.")
    name = type(module).__name__.removeprefix("FSDP")
    foreign = sharded_by_torch(module)
    if foreign is not None:
        raise ConfigurationError(
            f"torch's own fully_shard has sharded {foreign!r} of the {name} given to ours. Shard all of a model by one "
            "of them; composable_fsdp.interop.patch_torch(), called before, makes callers of torch's use ours."
        )
    if find_state(module) is not None:
        raise ConflictError(
            f"fully_shard has been applied to this {name} already. Apply it once to each module, bottom-up."
        )
    # Other modules may do without: their methods can be registered with register_fsdp_forward_method.
    if isinstance(module, _CONTAINERS) and getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ConfigurationError(
            f"{name} has no forward, so there is no call before which its parameters could be gathered. "
            "Call fully_shard on each module in it, or on the module that contains it."
        )


def _axes(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, device: torch.device | str | int | None
) -> tuple[DataParallelAxes, FullMesh | None]:
    """The data-parallel axes, and where they are named dims of it, the mesh with all axes."""
    if dims is None:
        axes = data_parallel_axes(mesh if mesh is not None else default_mesh())
        return (axes if device is None else axes.on(device)), None
    if mesh is None:
        raise ConfigurationError("dp_mesh_dims names dims of a mesh: pass that mesh as mesh=.")
    axes = named_data_parallel_axes(mesh, dims)
    axes = axes if device is None else axes.on(device)
    return axes, FullMesh(mesh, dims, axes)


def _move_buffers(module: nn.Module, device: torch.device, ignored: set[int]) -> None:
    for buffer in module.buffers():
        if id(buffer) not in ignored and not buffer.is_meta and buffer.device != device:
            buffer.data = buffer.to(device)
