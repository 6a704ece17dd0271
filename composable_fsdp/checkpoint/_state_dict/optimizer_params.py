"""The parameters of an optimizer by their names in a model, the settings of its groups, and the kinds of its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._runtime.params.sharded_param import find_replaced, local_part
from composable_fsdp._runtime.shard_extent import shardings_of, states_below
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch
from composable_fsdp.checkpoint._state_dict.names import parameter_names
from composable_fsdp.errors import CheckpointError

__all__ = [
    "OptimizerParam",
    "OptimizerParams",
    "has_shards_shape",
    "is_plain",
    "lacking",
    "restored",
]

_MEMBERS = ("params", "param_names")


@dataclass(frozen=True, eq=False)
class OptimizerParam:
    """A parameter of an optimizer, its first name in the model, and its sharding by ``fully_shard``, if any."""

    name: str
    parameter: torch.Tensor
    sharding: ParameterSharding | None


class OptimizerParams:
    """The parameters of an optimizer. The model must be prepared for access.

    Attributes:
        groups: the parameters of each group.
        members: all parameters by name, in the order in which the optimizer numbers them.

    Raises:
        CheckpointError: some are not parameters of ``model``, or no longer are. The text says which, and what to do.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        shardings, names = shardings_of(states_below(model)), parameter_names(model)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        unmanaged = [parameter for group in groups for parameter in group if id(parameter) not in names]
        taken = [found.description for parameter in unmanaged if (found := find_replaced(parameter)) is not None]
        if taken:
            raise CheckpointError(
                f"this {type(optimizer).__name__} was made before fully_shard, and holds what these parameters were "
                f"then: {taken}. Call rekey_optimizer(optimizer, model), or make the optimizer after fully_shard."
            )
        if unmanaged:
            shapes = [tuple(parameter.shape) for parameter in unmanaged]
            raise CheckpointError(
                f"this {type(optimizer).__name__} holds parameters that are not the model's, of shapes {shapes}. Pass "
                "the model whose parameters() it was made of."
            )
        self.groups = [[OptimizerParam(names[id(p)], p, shardings.get(id(p))) for p in group] for group in groups]
        self.members = {member.name: member for group in self.groups for member in group}

    def state_of(self, member: OptimizerParam) -> Mapping[str, Any]:
        """Return the optimizer's state of one parameter, empty if it has none so far."""
        found = self._optimizer.state.get(member.parameter, {})
        return found if isinstance(found, Mapping) else {}

    def match_groups(self, saved: Sequence[Mapping[str, Any]], mismatch: Mismatch) -> list[Mapping[str, Any] | None]:
        """Return the saved group of each of the optimizer's groups, found by its parameters, if there is one."""
        by_members = {frozenset(group["params"]): group for group in saved}
        wanted = [[member.name for member in group] for group in self.groups]
        found = [by_members.get(frozenset(names)) for names in wanted]
        left = [list(group["params"]) for members, group in by_members.items() if members not in map(frozenset, wanted)]
        for names in left:
            mismatch.unexpected[f"param_group of {_first(sorted(names))}"] = f"members: {len(names)}"
        others = iter(left)
        for index, (names, group) in enumerate(zip(wanted, found, strict=True)):
            if group is not None:
                mismatch.others += lacking(self._optimizer, index, group)
                continue
            there = next(others, None)
            text = f"no saved param_group has the parameters of group {index}: {_first(names)}"
            if there is not None:
                missing, unexpected = [n for n in names if n not in there], [n for n in there if n not in names]
                text += f" (missing [{_first(missing, 20)}], unexpected [{_first(unexpected, 20)}])"
            mismatch.others.append(text)
        return found

    def load(
        self,
        saved: Sequence[Mapping[str, Any] | None],
        state: Mapping[str, Mapping[str, Any]],
        others: Mapping[str, Any],
    ) -> None:
        """Call ``optimizer.load_state_dict`` with the ``saved`` settings of each group and ``state`` by names."""
        numbers = {name: number for number, name in enumerate(self.members)}
        groups = [
            restored(group, settings or {}, [numbers[member.name] for member in members])
            for group, settings, members in zip(self._optimizer.param_groups, saved, self.groups, strict=True)
        ]
        by_number = {numbers[name]: entry for name, entry in state.items()}
        self._optimizer.load_state_dict({**others, "state": by_number, "param_groups": groups})


def _first(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


# -- the settings of a group


def lacking(optimizer: Optimizer, index: int, saved: Mapping[str, Any]) -> list[str]:
    """Return an error text if ``saved`` lacks settings that the optimizer's group ``index`` needs, or an empty list.

    An optimizer needs the settings that it has defaults for. Schedulers have added the others.
    """
    absent = [key for key in optimizer.param_groups[index] if key in optimizer.defaults and key not in saved]
    return [f"param_group {index} has settings that the saved one lacks: {', '.join(absent)}"] if absent else []


def restored(group: Mapping[str, Any], saved: Mapping[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """Return ``group`` with the settings of ``saved``, as ``optimizer.load_state_dict`` takes it.

    Tensors are moved to the devices that they have in ``group``.
    """
    settings = {key: _moved(value, group.get(key)) for key, value in saved.items() if key not in _MEMBERS}
    return {**group, **settings, "params": list(numbers)}


def _moved(value: Any, own: object) -> Any:
    return value.to(own.device) if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) else value


# -- the state of optimizers that work on local tensors: plain tensors that are this rank's shards


def is_plain(value: object, member: OptimizerParam) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a plain tensor but its parameter a DTensor: a local shard, or a replicated value."""
    return isinstance(member.parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def has_shards_shape(value: object, member: OptimizerParam) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` may be a local shard. It is one if this holds on every rank that has it."""
    return is_plain(value, member) and value.ndim > 0 and value.shape == local_part(member.parameter).shape
