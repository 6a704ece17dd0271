"""Full parameters for the user: made from the sharded ones, registered in their place, and written back to them.

Meanwhile the parameter groups are LENT, and no module of their roots may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.groups.state_machine import ParameterOperation, ParameterState
from composable_fsdp._runtime.hooks import is_being_called
from composable_fsdp._runtime.params.param_places import ParamPlace, registered_parameters
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._runtime.params.tensor_subclass import as_parameter
from composable_fsdp._runtime.shard_extent import assemble_full, extent_of
from composable_fsdp.errors import LifecycleError

__all__ = [
    "empty_full_parameter",
    "full_parameter",
    "lend",
    "prepare_to_lend",
    "sharded_places",
    "write_gradient_shard",
    "write_shard",
]


def prepare_to_lend(states: Sequence[FSDPState], caller: str = "unsharded_params") -> None:
    """Check that nothing uses parameters of ``states``, and reshard them.

    Args:
        states: the states whose full parameters are to be registered.
        caller: the public function, for errors.

    Raises:
        LifecycleError: a forward or backward is running, or full parameters of the same root are registered already.
    """
    if torch._C._current_graph_task_id() != -1:
        raise LifecycleError(
            f"{caller} was entered during a backward, which still uses the parameters. Enter it before the forward or "
            "after backward() has returned."
        )
    for state in states:
        iteration = state.iteration
        if state.group.parameter_state is ParameterState.LENT or (iteration is not None and iteration.lent is not None):
            raise LifecycleError(
                f"{caller} was entered for {state.name!r} inside another one for modules of the same root. "
                "Leave that one first, or use one for all: with recurse=True it reaches every module below its own."
            )
        if iteration is not None and any(map(is_being_called, iteration.states.values())):
            raise LifecycleError(
                f"{caller} was entered during a forward that {state.name!r} is part of, which still uses the "
                "parameters. Enter it before the forward or after backward() has returned."
            )
    for state in states:
        iteration = state.iteration
        if iteration is not None:
            iteration.drain()
        state.group.reshard()
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
    iterations = {found: state.group for state in reversed(states) if (found := state.iteration) is not None}
    for group in groups:
        group.advance(ParameterOperation.LEND)
    for iteration, group in iterations.items():
        iteration.lent = group
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
            group.advance(ParameterOperation.RETURN)
        for iteration in iterations:
            iteration.lent = None


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
