"""State dicts of sharded modules, which hold sharded parameters and load full ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.params import alias_of, local_part, without_torch_function
from composable_fsdp._core.registration import shard_full_tensor
from composable_fsdp._core.seams import HookHandles, Observer, runs_outside
from composable_fsdp._core.state import FSDPState


class StateDicts(Observer):
    """Registers the hooks of state dicts on the modules of each FSDP state."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        hooks = _StateDictHooks(state)
        for module in state.modules:
            module.register_state_dict_pre_hook(hooks.before_state_dict)
            module.register_state_dict_post_hook(_make_copyable)
            module.register_load_state_dict_pre_hook(hooks.before_load_state_dict)
            module.register_load_state_dict_post_hook(hooks.after_load_state_dict)


class _StateDictHooks:
    """The hooks of the modules of one FSDP state."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    @runs_outside
    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._state.reshard()
        self._state.group.check_data()

    @runs_outside
    def before_load_state_dict(self, module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object) -> None:
        """Replace full plain tensors in the state dict by this rank's shards."""
        self._state.reshard()
        self._state.group.check_grad_dtypes()
        parameters = {id(p.sharded): p for p in self._state.group.parameters}
        for name, registered in module.named_parameters(remove_duplicate=False):
            parameter, value = parameters.get(id(registered)), state_dict.get(prefix + name)
            if parameter is not None and _is_full_tensor(value, parameter.sharding.shape):
                state_dict[prefix + name] = shard_full_tensor(parameter, value)

    @runs_outside
    def after_load_state_dict(self, *_: object) -> None:
        self._state.drain_before_changes()
        if not self._state.group.is_lent:
            self._state.group.refresh()


@runs_outside
def _make_copyable(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    """Make the values of a state dict work with ``copy.deepcopy``, which e.g. weight averaging calls.

    Parameters, which ``keep_vars=True`` gives, stay.
    """
    with without_torch_function():
        for name in reversed(state):
            if not name.startswith(prefix):  # the values of other modules, which are earlier
                return
            value = state[name]
            if isinstance(value, DTensor) and value.storage_offset() and not isinstance(value, nn.Parameter):
                state[name] = alias_of(value, local_part(value))


def _is_full_tensor(value: object, shape: tuple[int, ...]) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` is a plain tensor of this shape, and not on the meta device."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
        return False
    return tuple(value.shape) == shape and not value.is_meta
