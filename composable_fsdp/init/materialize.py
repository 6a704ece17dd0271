"""Parameter values before training: memory for meta tensors, initialization, synchronization across ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.process_groups import broadcast_
from composable_fsdp._consistency.verify_ranks import verify_same
from composable_fsdp._core.mesh import data_parallel_axes
from composable_fsdp._core.params import ShardedParameter, find_replaced
from composable_fsdp._core.registration import ParamPlace, registered_parameters
from composable_fsdp._core.seams import OBSERVERS
from composable_fsdp._core.state import FSDPState, Ignored, find_state, state_of_parameter, states_below
from composable_fsdp.errors import ConfigurationError, ParameterError
from composable_fsdp.init.random_shards import ShardedRandom, seeded
from composable_fsdp.plugins.full_params import (
    empty_full_parameter,
    full_parameter,
    lend,
    prepare_to_lend,
    sharded_places,
    write_shard,
)
from composable_fsdp.policies import checks_keywords

M = TypeVar("M", bound=nn.Module)
InitFunction = Callable[[nn.Module], object]


@checks_keywords
def to_empty(module: M, *, device: torch.device | str | int) -> M:
    """Allocate memory on ``device`` for parameters and buffers that are on the meta device, and move the others there.

    Unlike ``nn.Module.to_empty``, it keeps the values of tensors that are not on meta. These include buffers that a
    constructor filled, such as rotary frequencies, which no checkpoint restores if they are not persistent. Shared
    parameters and buffers stay shared. The values of former meta tensors are undefined until something writes them.

    Args:
        module: before or after ``fully_shard``.
        device: the target. Sharded parameters must be on the device of their mesh, offloaded ones on CPU.

    Returns:
        ``module`` itself.

    Warns:
        UserWarning: non-persistent buffers were on meta. No checkpoint fills them, so the module's own initialization
            must. The text names them.
    """
    unfilled = [
        _joined(path, name)
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_meta and name in owner._non_persistent_buffers_set
    ]
    _allocate_meta(module, lambda _: device)
    if unfilled:
        warnings.warn(
            f"to_empty: buffers that are not persistent were on the meta device: {unfilled}. They have no values yet, "
            "and no checkpoint restores them: have the module's own initialisation fill them, or build them on a real "
            "device.",
            stacklevel=3,  # above checks_keywords
        )
    return module


def _allocate_meta(module: nn.Module, device_of: Callable[[torch.Tensor], torch.device | str | int]) -> None:
    """Allocate meta parameters and buffers on the device that ``device_of`` returns for each; move the others there.

    Shared tensors stay shared.
    """
    shared = [entry for entry in registered_parameters(module) if len(entry.places) > 1]
    buffers: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            buffers.setdefault(id(buffer), []).append((owner, name))

    def move(tensor: torch.Tensor) -> torch.Tensor:
        device = device_of(tensor)
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    cast(Any, module)._apply(move)
    for entry in shared:  # the conversion made one object for each place of a shared parameter
        now = entry.current()
        if isinstance(now, nn.Parameter) and any(getattr(owner, name) is not now for owner, name in entry.places):
            entry.put(now)
    for (first, name), *others in buffers.values():
        for owner, attribute in others:
            owner._buffers[attribute] = first._buffers[name]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def allocate_at_rest(model: nn.Module, states: Sequence[FSDPState]) -> set[str]:
    """Allocate meta parameters and buffers of ``model`` where they rest between steps, and return their names."""
    names = {name for name, tensor in _named_tensors(model) if tensor.is_meta}
    if names:
        groups = [state.group for state in states]
        rest_devices = {id(p.sharded): group.rest_device_of(p) for group in groups for p in group.parameters}
        here = states[0].group.axes.device if states else torch.get_default_device()
        _allocate_meta(model, lambda t: rest_devices.get(id(t), here) if t.is_meta else t.device)
    return names


# -- initialize


def reset_parameters(module: nn.Module) -> None:
    """Call ``reset_parameters()`` of a module with tensors of its own, or ``_reset_parameters()``, as attention has."""
    reset = _reset_method(module)
    if callable(reset) and any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
        reset()


def _reset_method(module: nn.Module) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def initialize(model: M, fn: InitFunction = reset_parameters, *, seed: int) -> M:
    """Give parameters and buffers of ``model`` the values that the unsharded model has with the same seed.

    The values are bitwise equal to those of ``torch.manual_seed(seed)`` and ``model.apply(fn)`` under
    ``torch.no_grad()`` on the unsharded model, on the device of the mesh, for any mesh, number of ranks and tensor
    parallelism. With the default ``fn`` they also equal those of the constructors, if the modules initialize themselves
    at the end of their constructors, as those of ``torch.nn`` do, and are built in the order of registration.

    Each rank computes every full parameter and keeps its shard. It needs memory for its shards and for the parameters
    of one module, without the modules below it. Parameters on the meta device get memory, without communication. A
    parameter that has values already, which includes a shared parameter at its second module, is gathered first, so
    that ``fn`` may read it or write a part of it. All ranks must call it together, before the first forward or between
    steps. If anything was on meta, build the optimizer afterwards.

    Args:
        model: a sharded module, or one that contains sharded modules. Works on an unsharded one too, without ranks.
        fn: called with every module, children before parents, as by ``nn.Module.apply``; must be the same on every
            rank. The parameters of the module itself are full, plain tensors; those of other modules are sharded. On
            sharded ones, elementwise operations and those listed in :func:`sharded_rng` also give the values of the
            unsharded model. The ``_init_weights`` of a transformers model can be passed.
        seed: seed of the default generators of CPU and of the mesh's device, the same on every rank. Their states are
            restored at the end. The generators of Python and NumPy are not seeded.

    Returns:
        ``model`` itself.

    Raises:
        ConfigurationError: no ``fn`` was given and modules with parameters have no ``reset_parameters``. Raised before
            anything changes.
        LifecycleError: called during a forward or backward, or inside ``unsharded_params``.
        ParameterError: ``fn`` gave no values to parameters or buffers that were on meta, or changed the shape of a
            parameter. The text names them.
    """
    lacking = [
        f"{path or 'the model'} ({type(module).__name__.removeprefix('FSDP')})"
        for path, module in model.named_modules()
        if fn is reset_parameters and any(p is not None for p in module._parameters.values())
        if not callable(_reset_method(module))
    ]
    if lacking:
        raise ConfigurationError(
            "initialize calls reset_parameters() of every module that has parameters, but these have no such method: "
            f"{', '.join(lacking)}. Pass a function of a module that writes their values: "
            "initialize(model, fn, seed=...)."
        )
    states = states_below(model)
    prepare_to_lend(states, "initialize")
    names = allocate_at_rest(model, states)
    blank = {name: tensor for name, tensor in _named_tensors(model) if name in names}
    own: dict[int, dict[ParamPlace, ShardedParameter]] = {}
    for place, parameter in sharded_places(model, states).items():
        for module, _ in place.places:
            own.setdefault(id(module), {})[place] = parameter
    written = set[object]()
    random = ShardedRandom(states, lambda tensor: written.add(_memory_of(tensor)))
    with torch.inference_mode(False), torch.no_grad(), seeded(states, seed), random:
        model.apply(lambda module: _initialize_module(fn, module, own.get(id(module), {}), blank, written))
    current = dict(_named_tensors(model))
    uninitialized = [n for n, t in blank.items() if current.get(n) is t and _memory_of(t) not in written]
    if uninitialized:
        raise ParameterError(
            f"initialize: these parameters and buffers of {type(model).__name__.removeprefix('FSDP')} were on the meta "
            f"device, and fn gave them no values: {uninitialized}. Pass an fn that does, or build them on a real "
            "device."
        )
    return model


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _memory_of(tensor: torch.Tensor) -> object:
    """Return the memory of a plain tensor. Of a DTensor, shape and dtype, so that ranks with empty shards agree."""
    is_sharded = isinstance(tensor, DTensor)
    return (tensor.shape, tensor.dtype) if is_sharded else cast(Any, tensor.untyped_storage())._cdata


def _initialize_module(
    fn: InitFunction,
    module: nn.Module,
    parameters: Mapping[ParamPlace, ShardedParameter],
    blank: dict[str, torch.Tensor],
    written: set[object],
) -> None:
    """Call ``fn`` with ``module``, whose ``parameters`` are full meanwhile, and copy what it wrote into their shards.

    Args:
        fn: the function.
        module: the module.
        parameters: its sharded parameters.
        blank: parameters and buffers that have memory, but no values yet. Those that get values are removed.
        written: the memory of all tensors that operations have written to.
    """
    full_params = {
        place: empty_full_parameter(p) if place.name in blank else full_parameter(p) for place, p in parameters.items()
    }
    given = [_memory_of(full_param) for full_param in full_params.values()]
    written.difference_update(given)  # another tensor may have had the memory before
    states = [state for p in parameters.values() if (state := state_of_parameter(p)) is not None]
    with lend(states, full_params) as results:
        fn(module)
    for (place, parameter), value, memory in zip(parameters.items(), results, given, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape != place.parameter.shape:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ParameterError(
                f"initialize: fn left parameter {place.name!r} of shape {tuple(place.parameter.shape)} as {found}. "
                "It must keep shapes: write to parameters in place."
            )
        if _memory_of(value) != memory or memory in written:
            write_shard(parameter, value, value.requires_grad)
            blank.pop(place.name, None)
            for observer in OBSERVERS:
                observer.given_values(parameter, value)


# -- param_init_fn


def materialize_meta(
    module: nn.Module, init: InitFunction, ignored: Ignored, registered: Iterable[ParamPlace] | None = None
) -> None:
    """Call ``init`` on each module that has parameters or buffers of its own on meta. Shared parameters stay shared.

    Skips ignored modules and those in existing groups.

    Args:
        module: the module that ``fully_shard`` was called on.
        init: the user's ``param_init_fn``.
        ignored: the ignored modules and tensors.
        registered: the parameters of the model around ``module``, from before any of it was materialized, to find
            those that are shared with other parts of the model. ``None``: the parameters of ``module``.

    Raises:
        ConfigurationError: ``init`` is not callable.
        ParameterError: some tensors are still on meta. The text names them.
    """
    if not callable(init):
        raise ConfigurationError(f"param_init_fn must be a function of a module, not {type(init).__name__}.")
    entries = registered_parameters(module) if registered is None else registered
    shared = {id(e.parameter): e for e in entries if len(e.places) > 1}
    candidates = list(_own_modules(module, ignored))
    for _, owner in candidates:
        before = {name: shared[id(p)] for name, p in owner._parameters.items() if id(p) in shared}
        if not any(_own_on_meta(owner, ignored)):
            continue
        init(owner)
        for name, entry in before.items():
            now = owner._parameters.get(name)
            if now is not None and now is not entry.parameter:
                entry.put(now)
    uninitialized = [_joined(path, name) for path, owner in candidates for name in _own_on_meta(owner, ignored)]
    if uninitialized:
        raise ParameterError(
            f"after param_init_fn, these parameters and buffers of {type(module).__name__} are still on meta: "
            f"{uninitialized}. It is called with each module that has some of its own, and must give them memory and "
            "values: module.to_empty(device=..., recurse=False), then for example module.reset_parameters()."
        )


def _own_modules(module: nn.Module, ignored: Ignored) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module for ``module`` and those below that are neither ignored nor in another group."""
    taken = {id(below) for m in module.modules() if find_state(m) is not None for below in m.modules()}
    for path, owner in module.named_modules():
        if id(owner) not in taken and id(owner) not in ignored.modules:
            yield path, owner


def _own_on_meta(owner: nn.Module, ignored: Ignored) -> Iterator[str]:
    for name, parameter in owner._parameters.items():
        if parameter is not None and parameter.is_meta and id(parameter) not in ignored.parameters:
            yield name
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta and id(buffer) not in ignored.buffers:
            yield name


# -- sync_module_states


def broadcast_module_states(
    module: nn.Module, mesh: DeviceMesh, ignored: Ignored, other_meshes: Mapping[int, DeviceMesh]
) -> None:
    """Overwrite parameters and buffers with those of the first rank of ``mesh``, on all its ranks.

    A tensor whose id is in ``other_meshes``, such as an expert's parameter, uses the mesh given there. Parameters that
    are ignored or in a group already are skipped. Every rank must have the same modules.

    Raises:
        ParameterError: some tensors are on meta and have no values to send. The text names them.
        DivergenceError: ranks differ in names, shapes or dtypes. Raised on all ranks, with the same text.
    """
    parameters = {
        n: p
        for n, p in module.named_parameters()
        if id(p) not in ignored.parameters and not is_lazy(p)
        if state_of_parameter(p) is None and find_replaced(p) is None
    }
    buffers = {n: b for n, b in module.named_buffers() if id(b) not in ignored.buffers}
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ParameterError(
            f"sync_module_states=True, but these of {type(module).__name__} are on the meta device and have no values "
            f"to send: {on_meta}. Pass param_init_fn to give them some, or leave sync_module_states out and call "
            "composable_fsdp.initialize(model, seed=...) after fully_shard, or to_empty and load a state dict."
        )
    with torch.inference_mode(False), torch.no_grad():
        for each in dict.fromkeys((mesh, *other_meshes.values())):
            here = {
                n: t.to_local() if isinstance(t, DTensor) else t
                for n, t in tensors.items()
                if other_meshes.get(id(t), mesh) == each
            }
            if order_check_from() is not OrderCheck.OFF:
                axes = data_parallel_axes(each)
                lines = [f"{n}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for n, t in here.items()]
                verify_same(lines, (axes.shard, axes.replicate), axes.device, "what sync_module_states sends")
            broadcast_(here.values(), each)
