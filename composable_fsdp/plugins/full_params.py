"""Temporary access to full parameters: ``unsharded_params``.

Meanwhile the parameter groups are *lent*, and no module of their roots may run.

Invariants: inside, a sharded parameter is registered nowhere on a rank that shows full ones. Outside, the same object
is registered everywhere that it was before. The collectives of a rank depend on modules, meshes and arguments alone:
neither on its shards, nor on what the body did or raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp._consistency.process_groups import broadcast_
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.hooks import is_being_called
from composable_fsdp._core.params import ShardedParameter, as_parameter
from composable_fsdp._core.registration import ParamPlace, registered_parameters
from composable_fsdp._core.seams import Observer
from composable_fsdp._core.state import FSDPState, alive, find_state, states_below
from composable_fsdp._extents import assemble_full, extent_of
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError


@contextmanager
def unsharded_params(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Replace the sharded parameters of ``module`` by full plain tensors, in their original dtype, inside the context.

    They are registered under their names, so ``named_parameters`` and ``state_dict`` show them, and ``load_state_dict``
    writes to them; tied ones stay one object. Afterwards the same sharded parameters are back, so optimizers stay
    valid. All ranks must enter and leave the context together. It gathers everything at once: have memory for that, or
    pass ``recurse=False`` and go module by module. It is modelled on ``summon_full_params`` of torch's FSDP1.

    If the body raises, the sharded parameters have their old values, whatever ``writeback`` says; with ``rank0_only``,
    if it raises on the first rank.

    Args:
        module: a sharded module, or one that contains some. Without any, nothing happens.
        writeback: keep what the body wrote, including replaced parameters and ``requires_grad``. Each rank keeps its
            shard of its own values, so all ranks must write the same; with ``rank0_only``, the first rank's values are
            kept.
        rank0_only: only the first rank of the mesh shows full parameters; the others show their sharded ones.
        offload_to_cpu: show them in CPU memory; the accelerator holds one at a time.
        with_grads: their ``.grad`` is full as well, and kept with ``writeback``. Gradients that have not been reduced
            (``set_requires_gradient_sync(False)``) are not shown.
        recurse: include the sharded modules below ``module``; otherwise only the group of ``module``.

    Raises:
        LifecycleError: during a forward or backward, or inside another ``unsharded_params`` for the same modules; and
            inside, from a forward of one of the modules.
        ParameterError: parameters are on the meta device; or, on leaving, a parameter has another shape than before.
        ConfigurationError: ``rank0_only`` with ``writeback``, if no mesh has all ranks that hold parameters.
    """
    states = states_below(module) if recurse else [state for state in [find_state(module)] if state is not None]
    prepare_to_lend(states, "unsharded_params")
    params = sharded_places(module, states)
    on_meta = [place.name for place in params if place.parameter.is_meta]
    if on_meta:
        raise ParameterError(
            f"unsharded_params: parameters are still on the meta device and have no values: {on_meta}. First call "
            "composable_fsdp.initialize(module, seed=...), or to_empty(module, device=...) and load a state dict."
        )
    mesh = _largest_mesh(params, must_have_all_ranks=writeback) if rank0_only and params else None
    shows = mesh is None or _is_first_rank(mesh)
    have_gradients = _agree_on_gradients(params) if with_grads else {}
    full_params: dict[ParamPlace, nn.Parameter | None] = {}
    for place, param in params.items():
        full_param = full_parameter(param, has_gradient=have_gradients.get(place, False), offload_to_cpu=offload_to_cpu)
        full_params[place] = full_param if shows else None
        del full_param  # before the next one is gathered
    raised = True
    try:
        with lend(states, full_params) as shown:
            yield
        raised = False
    finally:
        if writeback and (mesh is not None or not raised):
            _write_back(params, shown, mesh, with_grads, raised)


_Params = Mapping[ParamPlace, ShardedParameter]
"""The parameters of one request, in the order of their modules."""


def _agree_on_gradients(params: _Params) -> dict[ParamPlace, bool]:
    """Return, for each parameter, whether any rank of its mesh has a gradient: all ranks must gather the same ones."""
    found = {place: place.parameter.grad is not None for place in params}
    for mesh in dict.fromkeys(param.sharding.mesh for param in params.values()):
        here = [place for place, param in params.items() if param.sharding.mesh == mesh]
        flags = torch.tensor([found[place] for place in here], dtype=torch.uint8, device=mesh.device_type)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.all_reduce(flags, dist.ReduceOp.MAX, mesh.get_group(axis))
        found.update(zip(here, map(bool, flags.tolist()), strict=True))
    return found


# -- the first rank


def _largest_mesh(params: _Params, *, must_have_all_ranks: bool) -> DeviceMesh:
    """Return the mesh whose first rank shows the full parameters.

    Raises:
        ConfigurationError: a rank that holds a shard of a parameter is not in it, and ``must_have_all_ranks``.
    """
    meshes = list(dict.fromkeys(param.sharding.mesh for param in params.values()))
    largest = max(meshes, key=lambda mesh: mesh.size())
    reached = set(largest.mesh.flatten().tolist())
    for mesh in meshes if must_have_all_ranks else ():
        if not reached.issuperset(mesh.mesh.flatten().tolist()):
            raise ConfigurationError(
                "unsharded_params(rank0_only=True, writeback=True) sends the first rank's values to all others, "
                f"but no mesh has all ranks that hold parameters: {largest} lacks some of {mesh}. Pass "
                "rank0_only=False and write the same on every rank, or enter it for each part separately."
            )
    return largest


def _is_first_rank(mesh: DeviceMesh) -> bool:
    return not any(mesh.get_coordinate() or ())


def _send_from_first_rank(
    value: torch.Tensor, param: ShardedParameter, has_gradient: bool, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the full value and gradient of the first rank, where they are those of ``value``."""
    device, shape, dtype = mesh.device_type, param.sharded.shape, param.sharded.dtype
    if _is_first_rank(mesh):
        sent = (value, cast(torch.Tensor, value.grad)) if has_gradient else (value,)
        messages = [tensor.detach().to(device, dtype) for tensor in sent]
    else:
        messages = [torch.empty(shape, dtype=dtype, device=device) for _ in range(1 + has_gradient)]
    broadcast_(messages, mesh)
    return messages[0], messages[1] if has_gradient else None


# -- writeback

_DISCARD, _KEEP, _REFUSE = range(3)


def _write_back(
    params: _Params, shown: Sequence[object], mesh: DeviceMesh | None, with_grads: bool, raised: bool
) -> None:
    """Write this rank's shards of the values in ``shown`` to the sharded parameters.

    With ``mesh``, the first rank's values are written on all ranks, or none are: the outcome of the body there decides.
    A rank on which the body raised takes part as well, so that no rank waits for another.
    """
    wrong = {
        place.name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for place, value in zip(params, shown, strict=True)
        if not isinstance(value, torch.Tensor) or value.shape != place.parameter.shape
    }
    verdict = _DISCARD if raised else _REFUSE if wrong else _KEEP
    codes = [_code(value) for value in shown]
    if mesh is not None:
        outcome = torch.tensor([verdict, *codes], dtype=torch.int64, device=mesh.device_type)
        broadcast_([outcome], mesh)
        verdict, *codes = outcome.tolist()
    if verdict == _REFUSE:
        raise ParameterError(
            "on leaving unsharded_params, these parameters are not of the shape that they had: "
            f"{wrong or 'see the first rank'}. None was written back. Change parameters in place, or replace them by "
            "others of the same shape."
        )
    if verdict == _DISCARD:
        return
    for param, shown_value, code in zip(params.values(), shown, codes, strict=True):
        value = cast(torch.Tensor, shown_value)
        gradient = value.grad
        if mesh is not None:
            value, gradient = _send_from_first_rank(value, param, bool(code & 2) and with_grads, mesh)
        write_shard(param, value, bool(code & 1))
        if with_grads:
            write_gradient_shard(param, gradient)


def _code(value: object) -> int:
    """Return whether ``value`` requires a gradient (bit 0) and has one (bit 1)."""
    return value.requires_grad + 2 * (value.grad is not None) if isinstance(value, torch.Tensor) else 0


# -- full parameters in place of the sharded ones


class FullParameters(Observer):
    """Refuses the first forward of a root while a group in it is lent. Roots that exist refuse by themselves."""

    def before_assembly(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        for state in states.values():
            if state.group.is_lent:
                _refuse(state.group)


def _refuse(group: ParamGroup) -> NoReturn:
    raise LifecycleError(
        f"group {group.name!r} is LENT, and cannot be unsharded. A forward, unshard() or "
        "another operation of a sharded module came inside unsharded_params, where parameters of its root are full, or "
        "inside a function that initialize called. Leave it first."
    )


def prepare_to_lend(states: Sequence[FSDPState], caller: str) -> None:
    """Check that nothing uses parameters of ``states``, and reshard them. ``caller`` is the public function.

    Raises:
        LifecycleError: a forward or backward is running, or full parameters of the same root are registered already.
    """
    used = "a backward" if torch._C._current_graph_task_id() != -1 else ""
    for state in states:
        root = state.root
        if state.group.is_lent or (root is not None and root.refuse is not None):
            raise LifecycleError(
                f"{caller} was called for {state.name!r} inside unsharded_params or initialize for modules of the same "
                "root. Leave that first, or use one for all: with recurse=True it reaches every module below its own."
            )
        if is_being_called(state) or (root is not None and any(map(is_being_called, root.states.values()))):
            used = used or f"a forward that {state.name!r} is part of"
    if used:
        raise LifecycleError(
            f"{caller} was called during {used}, which still uses the parameters. Call it before the forward or after "
            "backward() has returned."
        )
    for state in states:
        if state.root is not None:
            state.root.drain()
        state.reshard()
        state.group.refresh()


def sharded_places(module: nn.Module, states: Sequence[FSDPState]) -> dict[ParamPlace, ShardedParameter]:
    """Return the sharded parameters of ``states`` that are registered in ``module``, by their places there."""
    parameters = {id(p.sharded): p for state in states for p in state.group.parameters}
    places = registered_parameters(module)
    return {place: parameters[id(place.parameter)] for place in places if id(place.parameter) in parameters}


@contextmanager
def lend(states: Sequence[FSDPState], full_params: Mapping[ParamPlace, nn.Parameter | None]) -> Iterator[list[object]]:
    """Register full parameters in place of the sharded ones inside the context. A parameter with ``None`` stays.

    Yields a list, which at the end has what was registered for each parameter: the user may have set other tensors.
    """
    groups = list(dict.fromkeys(state.group for state in states))
    users = ((user, state.group) for state in states for user in alive(state.user_states))
    both = [*users, *((state, state.group) for state in reversed(states))]  # another root may use tied weights
    roots = {root: group for state, group in both if (root := state.root) is not None}
    for group in groups:
        group.is_lent = True
    for root, group in roots.items():
        root.refuse = partial(_refuse, group)
    shown: list[object] = []
    try:
        for place, full_param in full_params.items():
            if full_param is not None:
                place.put(full_param)
        yield shown
    finally:
        shown += [place.current() for place in full_params]
        for place in full_params:
            place.put(place.parameter)
        for group in groups:
            group.is_lent = False
        for root in roots:
            root.refuse = None


# -- values


def full_parameter(
    parameter: ShardedParameter, *, has_gradient: bool = False, offload_to_cpu: bool = False
) -> nn.Parameter:
    """Return the full parameter, with its gradient if any rank ``has_gradient``. All ranks must call this."""
    sharded, gradient = parameter.sharded, None
    with torch.inference_mode(False), torch.no_grad():
        value = assemble_full(sharded, parameter.sharding, offload_to_cpu)
        if has_gradient:
            own = torch.zeros_like(sharded) if sharded.grad is None else sharded.grad
            gradient = assemble_full(own, parameter.sharding, offload_to_cpu)
        full_param = _as_full_parameter(value, parameter)
        full_param.grad = gradient
    return full_param


def empty_full_parameter(parameter: ShardedParameter) -> nn.Parameter:
    """Return an uninitialized full parameter on the device of the mesh, without communication."""
    sharded, device = parameter.sharded, parameter.sharding.mesh.device_type
    with torch.inference_mode(False):
        return _as_full_parameter(torch.empty(sharded.shape, dtype=sharded.dtype, device=device), parameter)


def _as_full_parameter(value: torch.Tensor, parameter: ShardedParameter) -> nn.Parameter:
    """Return ``value`` as a parameter with the class and the attributes of the sharded one."""
    full_param = as_parameter(value, parameter.kind, parameter.sharded.requires_grad)
    for name, attribute in vars(parameter.sharded).items():
        setattr(full_param, name, attribute)
    return full_param


@torch.no_grad()
def write_shard(parameter: ShardedParameter, value: torch.Tensor, requires_grad: bool) -> None:
    """Write this rank's shard of the full ``value`` to the sharded parameter."""
    sharded = parameter.sharded
    local = cast(DTensor, sharded).to_local()
    shard = extent_of(sharded, parameter.sharding).take(value.detach()).to(local.device)
    if not torch.equal(local, shard):  # unchanged values do not bump the version
        local.copy_(shard)
    if sharded.requires_grad != requires_grad:
        sharded.requires_grad_(requires_grad)


@torch.no_grad()
def write_gradient_shard(parameter: ShardedParameter, gradient: torch.Tensor | None) -> None:
    """Set this rank's shard of the full ``gradient``, in the memory of the old gradient if possible."""
    sharded = cast(DTensor, parameter.sharded)
    if gradient is None:
        sharded.grad = None
        return
    shard, old = extent_of(sharded, parameter.sharding).take(gradient), cast(DTensor | None, sharded.grad)
    if old is not None and old.placements == sharded.placements:
        old.to_local().copy_(shard)
    else:
        sharded.grad = parameter.sharding.wrap_shard(torch.empty_like(sharded.to_local()).copy_(shard))
