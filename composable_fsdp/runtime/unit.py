"""What one ``fully_shard`` call made: modules, their group, and the choices that can still be changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn

from composable_fsdp.errors import LifecycleError
from composable_fsdp.policy import MixedPrecisionPolicy, Reshard
from composable_fsdp.runtime.group import ParameterGroup

__all__ = ["Unit", "find_owner", "find_unit", "unit_of"]

_UNIT_ATTRIBUTE = "_composable_fsdp_unit"


class Unit:
    """One sharded module and its group.

    The public fields are choices; they are read when they are needed, so that a change counts from the next iteration.

    Args:
        module: the module whose forward and backward bring the group in and out of memory.
        group: the parameters that the call took.
        reshard: what happens after forward.
        precision: dtypes of inputs, parameters, reduction and outputs.
    """

    def __init__(
        self, module: nn.Module, group: ParameterGroup, reshard: Reshard, precision: MixedPrecisionPolicy
    ) -> None:
        self.module = module
        self.group = group
        self.precision = precision
        self.reshard = reshard
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.gradient_sync = True
        self.forward_prefetch: Sequence[Unit] | None = None
        self.backward_prefetch: Sequence[Unit] | None = None
        self.has_nested_units = any(find_unit(m) is not None for m in module.modules())
        self.calls_under_way: list[Any] = []
        """Forward calls that have begun and not ended, innermost last; the hooks know what they are."""
        self.open_calls = 0
        """Forward calls whose inputs' gradients this backward has not yet reached."""
        self.entered_backward = -1
        """The last backward that reached the unit through an output that its hooks saw."""
        self.kept_version: int | None = None
        """The group's version when it was last left unsharded between passes."""
        self.iteration: object | None = None
        """The ``Iteration`` it takes part in, once its root has been assembled; ``assemble`` knows the type."""
        vars(module)[_UNIT_ATTRIBUTE] = self
        _units.add(self)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.group.parameters)} parameters)"

    @property
    def name(self) -> str:
        return self.group.name

    def registered_parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter object that this unit may have registered on its modules."""
        for parameter in self.group.parameters:
            yield parameter.sharded
            yield parameter.unsharded

    @property
    def frees_with_last_gradient(self) -> bool:
        """Whether nothing in the module's backward can still need the parameters once all have their gradients."""
        plan = self.group.plan
        return not self.has_nested_units and plan.num_trainable == len(plan.specs)


_units: WeakSet[Unit] = WeakSet()


def find_owner(parameter: nn.Parameter) -> Unit | None:
    """The unit that has sharded ``parameter``, wherever it is. Walks all units: for messages, not for steps."""
    return next((unit for unit in _units if any(p is parameter for p in unit.registered_parameters())), None)


def find_unit(module: nn.Module) -> Unit | None:
    """The unit that a ``fully_shard`` call on ``module`` made, if there was one."""
    unit = vars(module).get(_UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None


def unit_of(module: nn.Module) -> Unit:
    """The unit of ``module``, which must have one."""
    unit = find_unit(module)
    if unit is None:
        raise LifecycleError(f"{type(module).__name__} has not been sharded: call fully_shard on it first.")
    return unit
