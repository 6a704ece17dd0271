"""Units and groups under the private names by which torch's own tools reach those of its FSDP2.

Pipelining ends the accumulation of microbatches itself, and the memory tracker puts functions of its own around ours.
Both find a module's state with torch's ``fully_shard.state(module)`` or ``module._get_fsdp_state()``. What they find
here is a view: it looks everything up in the unit, and keeps only the handles of the hooks that clients exchange. It
has what ``torch.distributed.pipelining``, ``FSDPMemTracker`` and torch's own ``register_fsdp_forward_method`` and
``share_comm_ctx`` use, and no more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from composable_fsdp.acceptance import enter_state, find_state
from composable_fsdp.memory.lanes import Lanes
from composable_fsdp.runtime.assemble import iteration_of
from composable_fsdp.runtime.call import Call
from composable_fsdp.runtime.hooks import HookHandles, hooks_for_clients
from composable_fsdp.runtime.parameter import ShardedParameter
from composable_fsdp.runtime.unit import Unit

__all__ = ["ClientState", "client_state", "enter_client_states"]


class ClientState:
    """What torch calls the ``FSDPState`` of ``module``.

    The group of several modules shows with the first of them, so that who goes through all modules meets it once.
    """

    def __init__(self, unit: Unit, module: nn.Module, handles: HookHandles | None) -> None:
        self._unit = unit
        self._module = module
        if handles is not None:  # a module within another of the list has no hooks of its own
            self._pre_forward_hook_handle = handles.pre_forward
            self._post_forward_handle = handles.post_forward

    @property
    def _state_ctx(self) -> ClientState:
        """What all states of a root have in common, which each of them can tell."""
        return self

    @property
    def all_states(self) -> list[ClientState]:
        """Those of all units of the root, in the order of its modules."""
        states = [client_state(unit.modules[0]) for unit in iteration_of(self._unit).units.values()]
        return [state for state in states if state is not None]

    @property
    def is_last_backward(self) -> bool:
        """As chosen with ``set_is_last_backward``."""
        return iteration_of(self._unit).is_last_backward

    @property
    def _fsdp_param_groups(self) -> list[ClientGroup]:
        has_group = self._unit.group.parameters and self._module is self._unit.modules[0]
        return [ClientGroup(self._unit)] if has_group else []

    @property
    def _fsdp_param_group(self) -> ClientGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _comm_ctx(self) -> Lanes:
        return iteration_of(self._unit).lanes

    @_comm_ctx.setter
    def _comm_ctx(self, lanes: Lanes) -> None:
        iteration_of(self._unit).lanes = lanes

    def _root_post_backward_final_callback(self) -> None:
        """Ends a backward: reduces what is left, and waits for it if it is the last one."""
        iteration_of(self._unit).end_backward()

    @property
    def _pre_forward(self) -> Callable[..., Any]:
        return hooks_for_clients(self._unit, self._module).pre_forward

    @property
    def _post_forward(self) -> Callable[..., Any]:
        return hooks_for_clients(self._unit, self._module).post_forward

    @property
    def _post_forward_hook_handle(self) -> RemovableHandle:
        return self._post_forward_handle

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: RemovableHandle) -> None:
        """What a client puts in the place of our hook has to learn of forwards that raise, as ours does."""
        self._post_forward_handle = handle
        if handle.id in self._module._forward_hooks:
            self._module._forward_hooks_always_called[handle.id] = True


class ClientGroup:
    """What torch calls the ``FSDPParamGroup`` of ``unit``.

    What is set as ``pre_backward`` or ``post_backward`` runs in place of these, and calls them with what it was given.
    """

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def comm_ctx(self) -> Lanes:
        return iteration_of(self._unit).lanes

    @comm_ctx.setter
    def comm_ctx(self, lanes: Lanes) -> None:
        iteration_of(self._unit).lanes = lanes

    @property
    def fsdp_params(self) -> list[ClientParameter]:
        return [ClientParameter(parameter) for parameter in self._unit.group.parameters]

    @property
    def _module_fqn(self) -> str:
        return self._unit.name

    @property
    def pre_backward(self) -> Callable[..., None]:
        return self._unit.client_pre_backward or self._pre_backward

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self._unit.client_pre_backward = function

    @property
    def post_backward(self) -> Callable[..., None]:
        return self._unit.client_post_backward or self._post_backward

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        self._unit.client_post_backward = function

    def _pre_backward(self, call: Call) -> None:
        iteration_of(self._unit).pre_backward(call)

    def _post_backward(self, deliver: Callable[[], None] | None = None) -> None:
        """Reduces what microbatches accumulated, and reshards, where that is chosen.

        Args:
            deliver: what the iteration is about to do with the gradients; then nothing but that is done.
        """
        if deliver is not None:
            deliver()
            return
        unit, iteration = self._unit, iteration_of(self._unit)
        gradients = unit.group.gradients
        gradients.notice()  # zero-bubble schedules add up those of weights themselves
        if gradients.were_summed and not gradients.are_held and iteration.was_reached(unit):
            warnings.warn(_lost_gradients(unit), stacklevel=2)
        iteration.settle_gradients(unit, at_end=True)
        if unit.reshard_after_backward:
            unit.group.reshard()


def _lost_gradients(unit: Unit) -> str:
    return (
        f"backward went through {unit.name!r}, but left no gradient on any of its parameters. Pipeline schedules that "
        "compute the gradients of weights apart from those of inputs, such as zero bubble, look for the parameters "
        "before backward brings them into memory: shard their stages with reshard_after_forward=False."
    )


class ClientParameter:
    """What torch calls an ``FSDPParam``."""

    __slots__ = ("_parameter",)

    def __init__(self, parameter: ShardedParameter) -> None:
        self._parameter = parameter

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._parameter.sharded

    @property
    def unsharded_param(self) -> nn.Parameter:
        return self._parameter.unsharded

    _unsharded_param = unsharded_param


def enter_client_states(unit: Unit, modules: Iterable[nn.Module], handles: Mapping[nn.Module, HookHandles]) -> None:
    """Lets clients find the state of ``modules``, and the contracts of torch know that they are sharded."""
    for module in modules:
        enter_state(module, ClientState(unit, module, handles.get(module)))


def client_state(module: nn.Module) -> ClientState | None:
    """What torch's ``fully_shard.state(module)`` finds; None if the module has not been sharded by us."""
    state = find_state(module)
    return state if isinstance(state, ClientState) else None
