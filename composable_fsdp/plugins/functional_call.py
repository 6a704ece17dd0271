"""``torch.func.functional_call``: modules compute with the values that it was given, and sharded ones are gathered.

It registers the values before a forward, and afterwards the parameters that were registered before. So a group that was
unsharded then stays unsharded, and every other one is sharded after its run, whatever its settings say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor, Partial, Replicate

from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.params import ShardedParameter, in_functional_call
from composable_fsdp._core.seams import ObservedRoot, Observer, runs_outside
from composable_fsdp._core.state import ForwardCall, FSDPState
from composable_fsdp.errors import ParameterError


class FunctionalCalls(Observer):
    """Lets the modules of roots compute with given values."""

    def begin_forward(self, root: ObservedRoot, outermost: FSDPState) -> None:
        for state in root.states.values():
            state.keeps_unsharded = None
            if state.group.unshard_started and state.group.registration.find_others() and in_functional_call():
                state.keeps_unsharded = True  # it will register the unsharded parameters again

    def enter_with_others(self, root: ObservedRoot, call: ForwardCall) -> None:
        if not in_functional_call():
            return
        if call.state.run is not None:  # else it is recomputed
            call.state.keeps_unsharded = call.state.keeps_unsharded or False
        call.at_end = partial(_restore, _gather_given(call.state.group))


@runs_outside
def _gather_given(group: ParamGroup) -> list[tuple[dict[str, Any], str, Any]]:
    """Register the full values of given ones that are sharded. Return these with their places.

    All ranks must call this together.
    """
    given: list[tuple[dict[str, Any], str, Any]] = []
    fulls: dict[int, Any] = {}  # tied weights have one value
    for parameter in group.parameters:
        for module, name in parameter.owners:
            value = module._parameters.get(name)
            if value is None or value is parameter.unsharded:
                continue
            if id(value) not in fulls:
                with temporarily_clear_interpreter_stack():  # DTensor's functions refuse to run in transforms
                    fulls[id(value)] = _full(parameter, value, group.device)
            if fulls[id(value)] is not value:
                given.append((module._parameters, name, value))
                module._parameters[name] = fulls[id(value)]
    return given


def _full(parameter: ShardedParameter, value: Any, device: torch.device) -> Any:
    """Return what to compute with for ``value``: its full value on ``device``, as ``parameter`` is cast, if sharded.

    The gradient of a sharded value is the mean over the data-parallel ranks. All ranks must call this together.

    Raises:
        ParameterError: ``value`` is a DTensor on another mesh, or wrapped by a transform of ``torch.func``.
    """
    functorch: Any = torch._C._functorch
    known: Any = value
    while functorch.is_functorch_wrapped_tensor(known):
        known = functorch.get_unwrapped(known)
    inner, mesh = parameter.sharding.inner, parameter.sharding.axes.mesh
    if not isinstance(known, DTensor) or (inner is not None and known.device_mesh == inner.mesh):
        return value
    is_alike = known.device_mesh == parameter.sharding.mesh and (inner is None or not inner.data_axes)
    if known is not value or not is_alike:
        raise ParameterError(
            f"functional_call was given a sharded value for parameter {parameter.name!r}, a DTensor on "
            f"{known.device_mesh}, of which no full one can be computed here: it must be on the mesh of the "
            "parameter, and no argument of a transform of torch.func. Give value.full_tensor(), which all ranks "
            "must call."
        )
    own = () if inner is None else inner.placements
    moved = cast(DTensor, value.to(device=device, dtype=parameter.compute_dtype))
    gathered = moved.redistribute(placements=[*[Replicate()] * mesh.ndim, *own])
    full = gathered.to_local(grad_placements=[*[Partial()] * mesh.ndim, *own])
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full if inner is None else DTensor.from_local(full, inner.mesh, own, run_check=False)


def _restore(given: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
    for registered, name, value in given:
        registered[name] = value
