"""``fully_shard`` and ``register_fsdp_forward_method``: make the FSDP state of a user's module."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._api import torch_types
from composable_fsdp._api.fsdp_module import FSDPModule, find_attribute, of_torch_alone
from composable_fsdp._api.param_discovery import ParamDiscovery, PlacementFunction
from composable_fsdp._api.strategy import ShardingStrategy, StrategyName, resolve_strategy
from composable_fsdp._core.full_mesh import FullMesh, default_mesh, named_data_parallel_axes, warn_without_cpu_backend
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.hooks import hooked_forward, install_hooks, optimizer_hooks
from composable_fsdp._core.mesh import DataParallelAxes, data_parallel_axes
from composable_fsdp._core.params import note_replaced
from composable_fsdp._core.seams import CLASS_MEMBERS, OBSERVERS, outside_callers_context
from composable_fsdp._core.state import FSDPState, Options, find_ignored, find_state, state_of
from composable_fsdp._other_names import FSDP1_ARGUMENTS
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, ConflictError
from composable_fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Reshard,
    ReshardKind,
)

if TYPE_CHECKING:
    from composable_fsdp.codecs.communication_policy import CommunicationPolicy
    from composable_fsdp.wrap.wrap_policy import PolicyLike

__all__ = ["fully_shard", "register_fsdp_forward_method"]

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(
    module: Modules,
    *,
    policy: PolicyLike | None = None,
    strategy: ShardingStrategy | StrategyName | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] | None = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    ignored_modules: Collection[nn.Module] | None = None,
    device: torch.device | str | int | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shared_from: Sequence[nn.Module] = (),
    comm_policy: CommunicationPolicy | None = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    **unknown: NoReturn,
) -> Modules:
    """Shard the parameters of ``module`` over the data-parallel ranks, in place.

    Each parameter that no earlier call took becomes a ``DTensor`` sharded on dim 0: each rank holds ``ceil(n / ranks)``
    rows, the last ranks fewer or none. The parameters of one call form one *group*. One all-gather unshards the group
    before the module's forward and backward, it is freed after each, and one reduce-scatter averages its gradients.
    Apply it bottom-up, to the blocks of a model first and then to the model itself. Every rank must make the same
    calls. Build the optimizer afterwards.

    Args:
        module: any module that has a ``forward``. Its class becomes a subclass of its own class and of ``FSDPModule``.
            A list of modules makes one group, which is unsharded from the start of the first module's forward to the
            end of the last one's. In any one forward some of the modules may not run.
        policy: selects the modules in ``module`` that become groups of their own; the remaining parameters become the
            group of ``module``. A set of module classes; a function of a module and its name that returns a bool, or a
            dict of keywords for that group; or a policy of :mod:`composable_fsdp.wrap`, such as
            ``transformer_blocks()``. Torch's policies are accepted. The other arguments apply to all groups. A
            parameter that several groups use belongs to the first of them.
        strategy: a :class:`ShardingStrategy`, or its name, in place of ``reshard_after_forward``, and of ``mesh`` if
            that is ``None``. Hybrid strategies then shard within hosts of ``LOCAL_WORLD_SIZE`` ranks. Torch's enum is
            accepted.
        mesh: 1-d: shard over it. 2-d: replicate over the first dim, shard over the second; a second dim of size 1 is
            plain data parallelism. ``None``: all ranks of the default process group, on its accelerator if it has one.
            If there is no process group, it is started from the environment, such as that of torchrun.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in backward. ``False``
            keeps them until the end of backward. An int that divides the number of shard ranks keeps a slice, which
            backward gathers over that many neighbouring ranks. ``None`` is ``True`` except for the outermost module
            and, on accelerators, for the last groups of forward, with which backward begins: two groups, or one more
            than ``set_schedule(prefetch_limit=...)`` says; none if that is 0.
        shard_placement_fn: called with each parameter. Returns ``Shard(d)``, where ``d`` may be negative; ``None`` for
            ``Shard(0)``; or a ``ShardPlacementResult`` with another mesh, such as that of experts.
        mp_policy: dtypes of computation, reduction and output. Our class or torch's. One all-gather takes all
            parameters, whatever dtypes ``param_dtype_override_fn`` gives them.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on CPU. Our class or torch's.
            A mapping has the policies of parameters by name; others are not offloaded. :func:`cpu_offload_by_budget`
            makes one. ``None`` offloads nothing.
        ignored_params: parameters that are not sharded, moved or reduced.
        ignored_modules: modules whose parameters and buffers, including those of modules below, are not sharded,
            moved, synchronized or reduced. Pass them to every call whose module contains them.
        device: the device of this rank, of the mesh's type, or its index. Parameters and buffers are moved there from
            any device. ``None``: the current device; parameters elsewhere than there or on CPU are refused.
        dp_mesh_dims: the data-parallel dims of ``mesh``, if ``mesh`` has all dims of the model. Every parameter must
            then be a DTensor on ``mesh``, replicated over these dims.
        shared_from: sharded modules that own parameters which ``module`` uses too, such as a tied embedding. These
            parameters stay in their group, which is unsharded together with this one. Modules that contain ``module``
            need not repeat it.
        comm_policy: codecs for the group's parameters and gradients.
        sync_module_states: first overwrite the parameters of this call, and all buffers, with those of the first rank
            of the mesh, so that ranks with different seeds start equal.
        param_init_fn: called before sharding with each module that has parameters or buffers of its own on the meta
            device. It must give them memory and values: ``module.to_empty(device=..., recurse=False)``, then
            ``module.reset_parameters()``. Runs before ``sync_module_states``. If the values depend on a seed only,
            ``initialize(model, seed=...)`` after ``fully_shard`` makes this function unnecessary.

        unknown: there are no other arguments. The error for one of FSDP1's names what replaces it.

    Returns:
        ``module`` itself.

    Raises:
        ConfigurationError: ``module`` or an argument is invalid, or arguments contradict each other.
        MeshError: no mesh was given and there is no process group; or the mesh is not 1-d or 2-d, does not contain
            this rank, cannot be joined with the mesh of a parameter that is a DTensor already, or does not fit
            ``strategy``; or ``device`` has another type than the mesh.
        ParameterError: a parameter cannot be sharded, belongs to another group, is on another accelerator, or is on
            the meta device although ``sync_module_states`` or ``param_init_fn`` needs its values. The text names it.
    """
    if unknown:
        raise _unknown_argument(next(iter(unknown)))
    # With a policy: call this again for each group.
    if policy is not None:
        from composable_fsdp._api.apply_policy import shard_by_policy

        options = dict(locals())  # the arguments
        del options["unknown"], options["shard_by_policy"]
        shard_by_policy(_as_model(options.pop("module")), options.pop("policy"), fully_shard, options)
        return module
    # Turn torch's objects and names into ours.
    if strategy is not None:
        chosen, dims = torch_types.as_strategy(strategy), torch_types.as_mesh_dims(dp_mesh_dims)
        mesh, reshard_after_forward = resolve_strategy(chosen, mesh, dims, reshard_after_forward)
    precision = torch_types.as_mixed_precision_policy(mp_policy)
    offload = torch_types.as_offload_policies(offload_policy)
    modules = _as_modules(module)
    # Refuse modules that cannot be sharded.
    for each in modules:
        _check_module(each)
    # Find the ranks, and what to leave alone.
    axes, full_mesh = _axes(mesh, torch_types.as_mesh_dims(dp_mesh_dims), device)
    reshard = Reshard.parse(reshard_after_forward, axes.shard.size)
    ignored = find_ignored(modules, ignored_params, ignored_modules)
    # Give parameters on meta their values.
    if param_init_fn is not None:
        from composable_fsdp.init.materialize import materialize_meta

        for each in modules:
            materialize_meta(each, param_init_fn, ignored)
    with outside_callers_context():
        # Find the parameters that no call took.
        if comm_policy is not None:
            from composable_fsdp.codecs.communication_policy import CommunicationPolicy

            if not isinstance(comm_policy, CommunicationPolicy):
                raise ArgumentTypeError(f"comm_policy must be a CommunicationPolicy, not {comm_policy!r}.")
            comm_policy = None if comm_policy == CommunicationPolicy() else comm_policy
        below = [nested for each in modules for nested in each.modules()]
        discovery = ParamDiscovery(
            axes=axes,
            full_mesh=full_mesh,
            placement_of=shard_placement_fn,
            ignored=ignored.parameters,
            device_given=device is not None,
            owner_states=list(dict.fromkeys(map(state_of, shared_from))),
            communication=comm_policy,
            offload=offload,
            precision=precision,
        )
        sources = discovery.collect(modules)
        if any(isinstance(source.offload, CPUOffloadPolicy) for source in sources):
            warn_without_cpu_backend(axes)
        # Make the values of all ranks equal.
        if sync_module_states:
            from composable_fsdp.init.materialize import broadcast_module_states

            other_meshes = {id(s.tensor): s.sharding.axes.mesh for s in sources if s.sharding.axes is not axes}
            for each in modules:
                broadcast_module_states(each, axes.mesh, ignored, other_meshes)
        cut = None
        if reshard.kind is ReshardKind.SMALLER:
            from composable_fsdp.plugins.smaller_mesh import cut_over

            cut = cut_over((axes, *(source.sharding.axes for source in sources)), reshard.mesh_size)
        name = ", ".join(type(each).__name__ for each in modules)
        classes = [_sharded_class(type(each)) for each in modules]
        # Put sharded parameters in their places, once all checks have passed.
        discovery.register_shared()
        group = ParamGroup(name, sources, axes)
        group.cut = cut
        for source, parameter in zip(sources, group.parameters, strict=True):
            note_replaced(source, parameter, name)
        # Hook the modules, and change their classes.
        state = FSDPState(_outermost(modules), group, Options(reshard, precision), discovery.owner_states)
        handles = install_hooks(state)
        optimizer_hooks.keep_for(state)
        _move_buffers(below, axes.device, ignored.buffers)
        for each, its_class in zip(modules, classes, strict=True):
            state.attach(each)
            each.__class__ = its_class
        # Tell the plugins.
        for observer in OBSERVERS:
            observer.after_sharding(state, {each: handles.get(each) for each in modules})
            for source, parameter in zip(sources, group.parameters, strict=True):
                observer.given_values(parameter, source.tensor)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name(...)`` unshard and reshard parameters as ``module(...)`` does.

    Has no effect if the module is not sharded.

    Raises:
        ConfigurationError: the module has no such method.
    """
    state = find_state(module)
    if state is not None:
        from composable_fsdp.plugins.module_calls import wrap_forward_method  # few programs need it

        wrap_forward_method(state, module, method_name)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def has_sharded() -> bool:
    """Return whether ``fully_shard`` has sharded any module in this process."""
    return bool(_classes)


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``FSDPModule`` and ``original`` for sharded modules of that class, one per class."""
    if original not in _classes:
        body: dict[str, Any] = {"__module__": original.__module__, "__doc__": original.__doc__}
        for members_of in CLASS_MEMBERS:
            body.update(members_of(original))
        if original.forward is not nn.Module.forward:
            body["forward"] = hooked_forward(original.forward)
        if original.__getattr__ is nn.Module.__getattr__:
            body["__getattr__"] = find_attribute
        body |= {name: property() for name in of_torch_alone()}  # some may have come after the import
        made = types.new_class(
            f"FSDP{original.__name__}", (FSDPModule, original), exec_body=lambda namespace: namespace.update(body)
        )
        _classes.setdefault(original, made)  # another thread may have been first
    return _classes[original]


def _unknown_argument(name: str) -> ArgumentTypeError:
    if name not in FSDP1_ARGUMENTS:
        return ArgumentTypeError.of_keyword("fully_shard", name, inspect.signature(fully_shard).parameters)
    return ArgumentTypeError(
        f"fully_shard() got an unexpected keyword argument {name!r}: it is FSDP1's. {FSDP1_ARGUMENTS[name]}."
    )


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
    """Return the modules that no other module in the list contains; only they get hooks."""
    if len(modules) == 1:
        return list(modules)
    inner = {id(below) for each in modules for below in each.modules() if below is not each}
    return [each for each in modules if id(each) not in inner]


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"fully_shard takes an nn.Module or a list of them, not {type(module).__name__}.")
    name = type(module).__name__.removeprefix("FSDP")
    foreign = torch_types.sharded_by_torch(module)
    if foreign is not None:
        raise ConfigurationError(
            f"torch's own fully_shard has sharded {foreign!r} of the {name} given to ours. Shard all of a model by one "
            "of them; composable_fsdp.interop.patch_torch(), called before, makes callers of torch's use ours."
        )
    if find_state(module) is not None:
        raise ConflictError(
            f"fully_shard has been applied to this {name} already. Apply it once to each module, bottom-up."
        )
    # Other modules without forward are allowed: register_fsdp_forward_method can register their methods.
    if isinstance(module, _CONTAINERS) and getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ConfigurationError(
            f"{name} has no forward, so there is no call before which its parameters could be gathered. "
            "Call fully_shard on each module in it, or on the module that contains it."
        )


def _axes(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, device: torch.device | str | int | None
) -> tuple[DataParallelAxes, FullMesh | None]:
    """Return the data-parallel axes, and with ``dims`` also the mesh that contains them."""
    if mesh is None and dims is not None:
        raise ConfigurationError("dp_mesh_dims names dims of a mesh: pass that mesh as mesh=.")
    mesh = default_mesh() if mesh is None else mesh
    axes = data_parallel_axes(mesh) if dims is None else named_data_parallel_axes(mesh, dims)
    axes = axes if device is None else axes.on(device)
    return axes, None if dims is None else FullMesh(mesh, dims, axes)


def _move_buffers(modules: Sequence[nn.Module], device: torch.device, ignored: set[int]) -> None:
    for buffer in (buffer for module in modules for buffer in module._buffers.values() if buffer is not None):
        if id(buffer) not in ignored and not buffer.is_meta and buffer.device != device:
            buffer.data = buffer.to(device)
