"""Values before training: materialising what is on the meta device, and starting all ranks from the same values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable_fsdp.broadcast import broadcast_
from composable_fsdp.comm.agreement import OrderCheck, order_check_from
from composable_fsdp.comm.alike import check_alike
from composable_fsdp.errors import ConfigurationError, ParameterError
from composable_fsdp.mesh import data_parallel_axes
from composable_fsdp.registered import Registered, registered_buffers, registered_parameters
from composable_fsdp.runtime.unit import find_unit, owners

__all__ = ["Left", "give_memory", "left_alone", "materialise", "synchronise", "to_empty"]

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


def _share_again(entry: Registered) -> None:
    """One object at all places again, where a conversion made one for each."""
    now = entry.current()
    if isinstance(now, nn.Parameter) and any(getattr(module, name) is not now for module, name in entry.places):
        entry.put(now)


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
    module: nn.Module, init: InitFunction, left: Left, registered: Iterable[Registered] | None = None
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
    taken = {id(below) for m in module.modules() if find_unit(m) is not None for below in m.modules()}
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
    grouped = left.parameters | owners().keys()  # also those lent by groups that are not below ``module``
    parameters = {n: p for n, p in module.named_parameters() if id(p) not in grouped and not is_lazy(p)}
    buffers = {n: b for n, b in module.named_buffers() if id(b) not in left.buffers}
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ParameterError(
            f"sync_module_states=True, but these of {type(module).__name__} are on the meta device and have no values "
            f"to send: {on_meta}. Pass param_init_fn to give them some, or leave sync_module_states out and initialise "
            "after fully_shard (to_empty, then reset_parameters() or a state dict)."
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
