"""Values before training: materialising what is on the meta device, initialising, and starting all ranks alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable_fsdp._api.random_shards import ShardedRandom, seeded
from composable_fsdp._comm.broadcast import broadcast_
from composable_fsdp._comm.verify_ranks import check_alike
from composable_fsdp._consistency.order_check import OrderCheck, order_check_from
from composable_fsdp._consistency.starting_values import start_of
from composable_fsdp._runtime.groups.state import FSDPState, find_state, holding_state
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.lend_params import LentParams, check_idle
from composable_fsdp._runtime.params.param_places import ParamPlace, registered_buffers, registered_parameters
from composable_fsdp._runtime.params.sharded_param import ShardedParameter, local_part
from composable_fsdp._runtime.shard_extent import states_below
from composable_fsdp._runtime.unsharded_values import blank_parameter, keep, whole_parameter
from composable_fsdp._sharding.mesh import data_parallel_axes
from composable_fsdp.errors import ConfigurationError, ParameterError

__all__ = [
    "Left",
    "give_memory",
    "initialize",
    "left_alone",
    "materialise",
    "reset_parameters",
    "synchronise",
    "to_empty",
]

M = TypeVar("M", bound=nn.Module)
InitFunction = Callable[[nn.Module], object]


def to_empty(module: M, *, device: torch.device | str | int, recurse: bool = True) -> M:
    """Gives memory on ``device`` to parameters and buffers that are on the meta device; moves the others there.

    Unlike ``nn.Module.to_empty``, it keeps the values of what is real already: buffers that a module's constructor
    filled, such as rotary frequencies, which no checkpoint restores if they are not persistent. Shared parameters and
    buffers stay shared. The values of what was on meta are undefined until something writes them.

    Args:
        module: before or after ``fully_shard``.
        device: where to. Sharded parameters must rest on the device of their mesh, offloaded ones on CPU.
        recurse: also modules below ``module``.

    Returns:
        ``module`` itself.

    Warns:
        UserWarning: non-persistent buffers were on meta. No checkpoint fills them, so the module's own initialisation
            has to. Named in the text.
    """
    unfilled = _lost_buffers(module, recurse)
    give_memory(module, lambda _: device, recurse=recurse)
    if unfilled:
        warnings.warn(
            f"to_empty: buffers that are not persistent were on the meta device: {unfilled}. They have no values yet, "
            "and no checkpoint restores them: have the module's own initialisation fill them, or build them on a real "
            "device.",
            stacklevel=2,
        )
    return module


def give_memory(
    module: nn.Module, device_of: Callable[[torch.Tensor], torch.device | str | int], *, recurse: bool = True
) -> None:
    """Memory for parameters and buffers on meta, each on its device, to which the others are moved. What is shared
    stays shared.
    """
    shared = [entry for entry in registered_parameters(module) if len(entry.places) > 1]
    buffers = registered_buffers(module)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        device = device_of(tensor)
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    cast(Any, module)._apply(place, recurse=recurse)
    for entry in shared:
        _share_again(entry)
    for (first, name), *others in buffers:
        for owner, attribute in others:
            owner._buffers[attribute] = first._buffers[name]


def _lost_buffers(module: nn.Module, recurse: bool) -> list[str]:
    owners = module.named_modules() if recurse else [("", module)]
    return [
        f"{path}.{name}" if path else name
        for path, owner in owners
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_meta and name in owner._non_persistent_buffers_set
    ]


def _share_again(entry: ParamPlace) -> None:
    """One object at all places again, where a conversion made one for each."""
    now = entry.current()
    if isinstance(now, nn.Parameter) and any(getattr(module, name) is not now for module, name in entry.places):
        entry.put(now)


# -- initialize


def reset_parameters(module: nn.Module) -> None:
    """Calls ``module.reset_parameters()``, or ``_reset_parameters()`` of classes that have only that, such as
    ``nn.MultiheadAttention``. Does nothing for a module without parameters and buffers of its own.

    Raises:
        ConfigurationError: the module has parameters of its own, and no such method.
    """
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        if _has_own(module):
            reset()
    elif any(parameter is not None for parameter in module._parameters.values()):
        raise ConfigurationError(_no_method([f"{type(module).__name__.removeprefix('FSDP')}"]))


def initialize(model: M, fn: InitFunction = reset_parameters, *, seed: int) -> M:
    """Gives the parameters and buffers of ``model`` the values that the unsharded model has with this seed.

    The values are bit for bit those of ``torch.manual_seed(seed)`` followed by ``model.apply(fn)`` on the unsharded
    model on the device of the mesh, under ``torch.no_grad()``, whatever the mesh, the number of ranks and the tensor
    parallelism. With the default they are those of the constructors too, for models of modules that initialise
    themselves where their constructors end, as those of ``torch.nn`` do, and are built in the order in which they are
    registered.

    Each rank computes every whole parameter and keeps its part. So a rank needs memory for its shards and the
    parameters of one module, without those of modules in it. Parameters on the meta device get memory, and nothing is
    communicated. A parameter that has values, also one of two modules that share it, is gathered first, so that ``fn``
    may read it or write a part of it. All ranks must call it together, before the first forward or between steps. An
    optimizer is built afterwards if anything was on meta.

    Args:
        model: sharded, or with sharded modules in it. On an unsharded one it does the same, without any ranks.
        fn: called as by ``nn.Module.apply``: with every module, children before their parents. The parameters of that
            module itself are whole and plain, those of others sharded. On these, operations that :func:`sharded_rng`
            lists and elementwise ones give the values of the unsharded model too. A ``_init_weights`` of transformers
            is such a function. The same on every rank.
        seed: of the default generators of CPU and of the mesh's device, whose states are restored at the end. The same
            on every rank. The generators of Python and NumPy are not seeded.

    Returns:
        ``model`` itself.

    Raises:
        ConfigurationError: no ``fn`` was given and modules have parameters, but no ``reset_parameters``. Nothing has
            changed then.
        LifecycleError: during a forward or backward, or inside ``unsharded_params``.
        ParameterError: ``fn`` left parameters or buffers that were on meta without values, or changed the shape of a
            parameter. Named in the text.
    """
    if fn is reset_parameters:
        _check_methods(model)
    states = states_below(model)
    check_idle(states, "initialize")
    for state in states:
        if state.iteration is not None:
            iteration_of(state).drain()
        state.group.reshard()
        state.group.refresh()
    blank = _materialised(model, states)
    written = _Written()
    with torch.inference_mode(False), torch.no_grad(), seeded(states, seed), ShardedRandom(states, seed, written.note):
        initialiser = _Initialiser(model, states, blank, written)
        for module in _as_applied(model):
            initialiser.run(fn, module)
        missed = initialiser.missed()
    if missed:
        raise ParameterError(
            f"initialize: these parameters and buffers of {type(model).__name__.removeprefix('FSDP')} were on the meta "
            f"device, and fn gave them no values: {missed}. Pass an fn that does, or build them on a real device."
        )
    return model


def _no_method(names: Sequence[str]) -> str:
    return (
        f"initialize calls reset_parameters() of every module that has parameters, but these have no such method: "
        f"{', '.join(names)}. Pass a function of a module that writes their values: "
        "initialize(model, fn, seed=...)."
    )


def _check_methods(model: nn.Module) -> None:
    """Raises before anything changes."""
    lacking = [
        f"{path or 'the model'} ({type(module).__name__.removeprefix('FSDP')})"
        for path, module in model.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
        and not callable(getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None))
    ]
    if lacking:
        raise ConfigurationError(_no_method(lacking))


def _has_own(module: nn.Module) -> bool:
    return any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))


def _as_applied(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the order in which ``nn.Module.apply`` calls a function with them."""
    for child in module.children():
        yield from _as_applied(child)
    yield module


def _materialised(model: nn.Module, states: Sequence[FSDPState]) -> set[str]:
    """Gives memory to what is on meta, and returns its names."""
    names = {name for name, tensor in _named_tensors(model) if tensor.is_meta}
    if names:
        homes = {id(p.sharded): state.group.tensors.rest_device for state in states for p in state.group.parameters}
        here = states[0].group.axes.device if states else torch.get_default_device()
        give_memory(model, lambda tensor: homes.get(id(tensor), here) if tensor.is_meta else tensor.device)
    return names


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class _Written:
    """Which of the tensors that it watches operations have written to."""

    def __init__(self) -> None:
        self._plain: dict[int, bool] = {}
        self._sharded: set[tuple[torch.Size, torch.dtype]] = set()

    def watchdog(self, tensor: torch.Tensor) -> None:
        """Begins to note writes to the memory of ``tensor``, which must stay alive."""
        if not isinstance(tensor, DTensor):
            self._plain[_storage(tensor)] = False

    def unwatch(self, storage: int) -> None:
        """Ends what ``watchdog`` began, before the memory is freed and may come again as that of another tensor."""
        self._plain.pop(storage, None)

    def note(self, tensor: torch.Tensor) -> None:
        """An operation writes to ``tensor``."""
        if isinstance(tensor, DTensor):
            self._sharded.add((tensor.shape, tensor.dtype))
        elif self._plain and _storage(tensor) in self._plain:
            self._plain[_storage(tensor)] = True

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether an operation wrote to ``tensor``; of sharded ones, to any of its shape and dtype, so that ranks with
        empty shards answer as the others do.
        """
        if isinstance(tensor, DTensor):
            return (tensor.shape, tensor.dtype) in self._sharded
        return self._plain.get(_storage(tensor), False)


def _storage(tensor: torch.Tensor) -> int:
    return int(cast(Any, tensor.untyped_storage())._cdata)


class _Initialiser:
    """Calls a function with modules, each with its own sharded parameters whole.

    Args:
        model: whose modules they are.
        states: of the model.
        blank: names of parameters and buffers that have memory, but no values yet.
        written: what the dispatch mode around the calls has seen.
    """

    def __init__(self, model: nn.Module, states: Sequence[FSDPState], blank: set[str], written: _Written) -> None:
        self._model, self._written = model, written
        self._parameters = {id(p.sharded): (state, p) for state in states for p in state.group.parameters}
        self._own: dict[int, list[ParamPlace]] = {}
        for entry in registered_parameters(model):
            if id(entry.parameter) in self._parameters:
                for module, _ in entry.places:
                    self._own.setdefault(id(module), []).append(entry)
        self._blank = {name: tensor for name, tensor in _named_tensors(model) if name in blank}
        for tensor in self._blank.values():
            written.watchdog(tensor)

    def run(self, fn: InitFunction, module: nn.Module) -> None:
        """Calls ``fn`` with ``module`` and keeps what it wrote to the module's parameters."""
        entries = list({id(entry): entry for entry in self._own.get(id(module), ())}.values())
        if not entries:
            fn(module)
            return
        states, parameters = zip(*(self._parameters[id(entry.parameter)] for entry in entries), strict=True)
        wholes = [self._whole(entry, p) for entry, p in zip(entries, parameters, strict=True)]
        storages = [_storage(whole) for whole in wholes]
        for whole in wholes:
            self._written.watchdog(whole)
        loan = LentParams(states, entries, wholes)
        try:
            fn(module)
        finally:
            shown = loan.end()
        for entry, parameter, value, storage in zip(entries, parameters, shown, storages, strict=True):
            if not isinstance(value, torch.Tensor) or value.shape != entry.parameter.shape:
                found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ParameterError(
                    f"initialize: fn left parameter {entry.name!r} of shape {tuple(entry.parameter.shape)} as {found}. "
                    "It must keep shapes: write to parameters in place."
                )
            if _storage(value) != storage or self._written.has(value):
                self._keep(entry, parameter, value)
            self._written.unwatch(storage)

    def missed(self) -> list[str]:
        """Names of what had no values and was not written to."""
        current = dict(_named_tensors(self._model))
        return [
            name
            for name, tensor in self._blank.items()
            if current.get(name) is tensor and not self._written.has(tensor)
        ]

    def _whole(self, entry: ParamPlace, parameter: ShardedParameter) -> nn.Parameter:
        if entry.name in self._blank:
            return blank_parameter(entry.parameter)
        whole = whole_parameter(
            entry.parameter, parameter.sharding, has_gradient=False, shows=True, offload_to_cpu=False
        )
        assert whole is not None
        return whole

    def _keep(self, entry: ParamPlace, parameter: ShardedParameter, value: torch.Tensor) -> None:
        keep(entry.parameter, parameter.sharding, value, value.requires_grad)
        self._blank.pop(entry.name, None)
        parameter.start = start_of(value, local_part(entry.parameter))


# -- what fully_shard leaves alone


class Left:
    """Parameters and buffers that a ``fully_shard`` call does not touch.

    Args:
        parameters: to ignore.
        modules: to ignore with all that is in and below them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> None:
        self._alive = [*parameters, *modules]  # so that no other object comes to have the same id
        self.modules = {id(m) for ignored in modules for m in ignored.modules()}
        self.parameters = {id(p) for p in parameters} | {id(p) for m in modules for p in m.parameters()}
        self.buffers = {id(b) for m in modules for b in m.buffers()}


def left_alone(
    called: Sequence[nn.Module], parameters: Iterable[nn.Parameter] | None, modules: Collection[nn.Module] | None
) -> Left:
    """What ``ignored_params`` and ``ignored_modules`` of a ``fully_shard`` call on the modules ``called`` mean.

    Raises:
        ConfigurationError: ``modules`` is not a collection of modules, or contains one of ``called`` or one above it.
    """
    modules = modules if modules is not None else ()
    if isinstance(modules, nn.Module):
        raise ConfigurationError(f"ignored_modules must be a set or list of modules, not one {type(modules).__name__}.")
    given: Collection[object] = modules
    others = sorted({type(m).__name__ for m in given if not isinstance(m, nn.Module)})
    if others:
        raise ConfigurationError(f"ignored_modules must contain modules only, not {', '.join(others)}.")
    left = Left(tuple(parameters or ()), tuple(modules))
    for module in called:
        if id(module) in left.modules:
            raise ConfigurationError(
                f"ignored_modules contains the {type(module).__name__} that fully_shard was called on, or one above "
                "it. Leave out the call, or name the modules below it that are to be ignored."
            )
    return left


# -- param_init_fn


def materialise(
    module: nn.Module, init: InitFunction, left: Left, registered: Iterable[ParamPlace] | None = None
) -> None:
    """Calls ``init`` on each module that has parameters or buffers of its own on meta; shared ones stay shared.

    Modules in groups that exist already, and ignored ones, are passed over. ``registered``, of a model around
    ``module`` as it was before any of it was materialised, says what is shared with modules elsewhere in it.

    Raises:
        ConfigurationError: ``init`` cannot be called.
        ParameterError: something is on meta still. Named in the text.
    """
    if not callable(init):
        raise ConfigurationError(f"param_init_fn must be a function of a module, not {type(init).__name__}.")
    entries = registered_parameters(module) if registered is None else registered
    shared = {id(e.parameter): e for e in entries if len(e.places) > 1}
    candidates = list(_own_modules(module, left))
    for _, owner in candidates:
        before = {name: shared[id(p)] for name, p in owner._parameters.items() if id(p) in shared}
        if not any(_own_on_meta(owner, left)):
            continue
        init(owner)
        for name, entry in before.items():
            now = owner._parameters.get(name)
            if now is not None and now is not entry.parameter:
                entry.put(now)
    missed = [f"{path}.{name}" if path else name for path, owner in candidates for name in _own_on_meta(owner, left)]
    if missed:
        raise ParameterError(
            f"after param_init_fn, these parameters and buffers of {type(module).__name__} are still on meta: "
            f"{missed}. It is called with each module that has some of its own, and must give them memory and values: "
            "module.to_empty(device=..., recurse=False), then for example module.reset_parameters()."
        )


def _own_modules(module: nn.Module, left: Left) -> Iterator[tuple[str, nn.Module]]:
    """Modules from ``module`` down that are in no other group and not ignored, by name."""
    taken = {id(below) for m in module.modules() if find_state(m) is not None for below in m.modules()}
    for path, owner in module.named_modules():
        if id(owner) not in taken and id(owner) not in left.modules:
            yield path, owner


def _own_on_meta(owner: nn.Module, left: Left) -> Iterator[str]:
    for name, parameter in owner._parameters.items():
        if parameter is not None and parameter.is_meta and id(parameter) not in left.parameters:
            yield name
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta and id(buffer) not in left.buffers:
            yield name


# -- sync_module_states


def synchronise(module: nn.Module, mesh: DeviceMesh, left: Left, elsewhere: Mapping[int, DeviceMesh]) -> None:
    """Overwrites parameters and buffers with those of the first rank of the data-parallel ``mesh``, on all its ranks.

    Those whose id is in ``elsewhere`` with that of the mesh given there, such as experts.

    Parameters that are in a group already, or ignored, are passed over. Every rank must have the same modules.

    Raises:
        ParameterError: some are on meta, so that there is nothing to send. Named in the text.
        DivergenceError: ranks have other names, shapes or dtypes. On all ranks, with the same text.
    """
    parameters = {
        n: p
        for n, p in module.named_parameters()
        if id(p) not in left.parameters and holding_state(p) is None and not is_lazy(p)
    }
    buffers = {n: b for n, b in module.named_buffers() if id(b) not in left.buffers}
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ParameterError(
            f"sync_module_states=True, but these of {type(module).__name__} are on the meta device and have no values "
            f"to send: {on_meta}. Pass param_init_fn to give them some, or leave sync_module_states out and call "
            "composable_fsdp.initialize(model, seed=...) after fully_shard, or to_empty and load a state dict."
        )
    with torch.inference_mode(False), torch.no_grad():
        for each in dict.fromkeys((mesh, *elsewhere.values())):
            here = {
                n: t.to_local() if isinstance(t, DTensor) else t
                for n, t in tensors.items()
                if elsewhere.get(id(t), mesh) == each
            }
            if order_check_from() is not OrderCheck.OFF:
                axes = data_parallel_axes(each)
                lines = [f"{n}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for n, t in here.items()]
                check_alike(lines, (axes.shard, axes.replicate), axes.device, "what sync_module_states sends")
            broadcast_(here.values(), each)
