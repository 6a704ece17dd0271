"""``copy.deepcopy`` of sharded modules, for weight averages and target networks.

FSDP states, groups and communicators are not copied. The copied modules get FSDP states of their own, on the same axes,
with copies of the sharded parameters. Hooks are copied with the modules: they are methods of objects that hold the FSDP
state, and ``memo`` maps it to the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.group import GATHER_KINDS, ParamGroup
from composable_fsdp._core.hooks import optimizer_hooks
from composable_fsdp._core.params import local_part
from composable_fsdp._core.seams import OBSERVERS
from composable_fsdp._core.state import ROOT_ATTRIBUTE, FSDPState, alive, states_below
from composable_fsdp.errors import ConfigurationError

__all__ = ["copy_sharded"]

Memo = dict[int, Any]

_COPYING = "composable_fsdp: a sharded module is being copied"


def copy_sharded(module: nn.Module, memo: Memo) -> nn.Module:
    """Return a deep copy of a sharded module.

    Raises:
        ConfigurationError: the module shares a group with modules outside of it.
    """
    markers = cast("dict[Any, Any]", memo)
    if _COPYING in markers:
        return _copy_module(module, memo)
    # The memo gets an empty clone of each state, and a copy of each parameter, which copied hooks and modules find.
    states = states_below(module)
    within = set(module.modules())
    for state in states:
        _check_contained(state, states, within, module)
        state.reshard()
        memo[id(state)] = object.__new__(FSDPState)
        for parameter in state.group.parameters:
            memo[id(parameter.sharded)] = _copy_parameter(parameter.name, parameter.sharded)
    # Copy the modules. Sharded modules inside come back here, and are copied plainly.
    markers[_COPYING] = True
    try:
        result = _copy_module(module, memo)
    finally:
        del markers[_COPYING]
    # Then the clones can be filled: their modules and parameters exist.
    for state in _owners_first(states):
        _fill(memo[id(state)], state, memo)
    return result


def _owners_first(states: Iterable[FSDPState]) -> dict[FSDPState, None]:
    """Return ``states``, each after the owners of parameters that it shares, which may share those of others."""
    ordered: dict[FSDPState, None] = {}
    for state in states:
        ordered |= _owners_first(state.owner_states)
        ordered[state] = None
    return ordered


def _check_contained(state: FSDPState, states: list[FSDPState], within: set[nn.Module], module: nn.Module) -> None:
    owners = {owner for parameter in state.group.parameters for owner, _ in parameter.owners}
    sharing = set(state.owner_states) | set(alive(state.user_states))
    if not owners | set(state.modules) <= within or not sharing <= set(states):
        raise ConfigurationError(
            f"{type(module).__name__.removeprefix('FSDP')} shares the group of {state.name!r} with modules outside of "
            "it, so it cannot be copied alone. Copy a sharded module that contains all of them."
        )


def _copy_module(module: nn.Module, memo: Memo) -> nn.Module:
    """Copy ``module`` as ``copy`` does by default, without ``__new__`` of the class, which makes unsharded modules."""
    clone: nn.Module = object.__new__(type(module))
    memo[id(module)] = clone
    get_state = getattr(module, "__getstate__", None)  # every object has it from Python 3.11 on
    state = dict(vars(module) if get_state is None else get_state())
    state.pop(ROOT_ATTRIBUTE, None)
    clone.__setstate__(copy.deepcopy(state, memo))
    return clone


@torch.no_grad()
def _copy_parameter(name: str, sharded: nn.Parameter) -> nn.Parameter:
    clone = nn.Parameter(_copy_distributed(sharded), requires_grad=sharded.requires_grad)
    for kind in GATHER_KINDS:
        kind.check_copy(name, local_part(sharded), local_part(clone))
    if sharded.grad_dtype != sharded.dtype:
        clone.grad_dtype = sharded.grad_dtype
    if sharded.grad is not None:
        clone.grad = _copy_distributed(sharded.grad)
    return clone


def _copy_distributed(tensor: Any) -> DTensor:
    return DTensor(tensor._local_tensor.clone(), tensor._spec, requires_grad=False)


def _fill(clone: FSDPState, state: FSDPState, memo: Memo) -> None:
    """Initialize ``clone``, which the copied modules already refer to, with copies of the contents of ``state``."""
    group = state.group
    # The group: parameters on the copied modules, and its settings.
    parameters = [
        p.copy_onto(memo[id(p.sharded)], [(memo[id(owner)], name) for owner, name in p.owners])
        for p in group.parameters
    ]
    copied = ParamGroup(group.name, (), group.axes, parameters=parameters)
    copied.copy_settings(group)
    owner_states = [memo[id(owner)] for owner in state.owner_states]
    # The options: prefetch lists name modules of the original, so the copy has its defaults.
    options = replace(state.options, forward_prefetch=None, backward_prefetch=None)
    FSDPState.__init__(clone, [memo[id(m)] for m in state.modules], copied, options, owner_states)
    optimizer_hooks.keep_for(clone)
    for observer in OBSERVERS:
        observer.after_copy(state, clone)
