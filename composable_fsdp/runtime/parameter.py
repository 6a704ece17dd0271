"""Which tensor is registered on which modules: the sharded one at rest, the unsharded one while modules compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable_fsdp.errors import ParameterError
from composable_fsdp.memory.storage import contiguous_strides

__all__ = ["ParameterSource", "ShardedParameter"]


@dataclass(frozen=True)
class ParameterSource:
    """A parameter as ``fully_shard`` found it: where it is registered, and on which dim it is to be cut."""

    name: str
    tensor: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    dim: int


class ShardedParameter:
    """One parameter of a group.

    ``sharded`` is the ``nn.Parameter`` that users, optimizers and checkpoints see; its local tensor is a view of the
    group's shard store. ``unsharded`` is what modules compute with; it is on autograd's graph, ``sharded`` never is.
    Invariant: exactly one of the two is registered on all owners.
    """

    def __init__(
        self, source: ParameterSource, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> None:
        tensor = source.tensor
        self.name = source.name
        self.dim = source.dim
        self.shape = tuple(tensor.shape)
        self._attributes = dict(vars(tensor))
        self._places = [(module._parameters, name) for module, name in source.owners]
        self._slots = [(module._parameters, name) for module, name in source.owners if not _intercepts(module)]
        self._intercepting = [(module, name) for module, name in source.owners if _intercepts(module)]
        stride = contiguous_strides(self.shape)
        distributed = DTensor.from_local(
            local, mesh, tuple(placements), run_check=False, shape=torch.Size(self.shape), stride=stride
        )
        self.sharded = nn.Parameter(distributed, requires_grad=tensor.requires_grad)
        self.unsharded: nn.Parameter = self.sharded
        self._trainable = self.sharded.requires_grad
        self.local = local
        self.accumulated: torch.Tensor | None = None
        self.set_local(local)
        self._carry_attributes(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """dtype in which the parameter rests."""
        return self.local.dtype

    def set_local(self, local: torch.Tensor) -> None:
        """Makes ``local``, a view of the shard store, the sharded parameter's memory."""
        self.local = local
        cast(Any, self.sharded)._local_tensor = local

    @property
    def is_current(self) -> bool:
        """Whether the sharded parameter, its memory and ``requires_grad`` are what the group was built from."""
        sharded = self.sharded
        return cast(Any, sharded)._local_tensor is self.local and not self.was_flipped and self._registered() is sharded

    @property
    def was_flipped(self) -> bool:
        """Whether somebody froze or thawed the parameter, in either form, since the group last took note."""
        return not (self.sharded.requires_grad == self.unsharded.requires_grad == self._trainable)

    def adopt_replacement(self) -> None:
        """Takes over what somebody else registered or put in place of the local tensor (``to_empty``, ``assign``).

        Raises:
            ParameterError: what is registered now is not a DTensor sharded as this parameter is.
        """
        registered: Any = self._registered()
        if registered is self.unsharded:
            return
        if registered is self.sharded:
            self._carry_attributes(registered)  # a conversion (``to``, ``to_empty``) swaps them away with the tensor
            return
        old, new = cast(Any, self.sharded), registered
        if not isinstance(new, DTensor) or not isinstance(new, nn.Parameter):
            raise ParameterError(
                f"parameter {self.name!r} was replaced after sharding by a {type(registered).__name__}, which is not a "
                "sharded parameter. Change it in place (p.copy_(...) under torch.no_grad()), or replace it before "
                "fully_shard."
            )
        if new.shape != old.shape or new.device_mesh != old.device_mesh or new.placements != old.placements:
            raise ParameterError(
                f"parameter {self.name!r} was replaced after sharding by a DTensor of shape {tuple(new.shape)} with "
                f"{new.placements} on {new.device_mesh}; expected shape {self.shape} with {old.placements} on "
                f"{old.device_mesh}."
            )
        self.sharded = new
        self._carry_attributes(new)

    def build_unsharded(self, data: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Makes the parameter that modules compute with out of ``data``, a view of the unsharded buffer."""
        self._trainable = self.sharded.requires_grad
        self.unsharded = nn.Parameter(data, requires_grad=self._trainable)
        self._carry_attributes(self.unsharded)
        if self.unsharded.requires_grad:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)

    def follow_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Freezes or thaws the unsharded parameter after the sharded one."""
        self._trainable = self.sharded.requires_grad
        self.unsharded.requires_grad_(self._trainable)
        if self._trainable and not cast(Any, self.unsharded)._post_accumulate_grad_hooks:
            self.unsharded.register_post_accumulate_grad_hook(on_gradient)

    def register_sharded(self) -> None:
        """Puts the sharded parameter on all owners. Who froze or thawed what was there until now meant this one."""
        if self.unsharded.requires_grad != self._trainable:
            self.sharded.requires_grad_(self.unsharded.requires_grad)
        self._register(self.sharded)

    def register_unsharded(self) -> None:
        """Puts the unsharded parameter on all owners."""
        self._register(self.unsharded)

    def take_gradient(self) -> torch.Tensor | None:
        """The full gradient that this rank has, accumulated microbatches included; it is no longer here afterwards."""
        gradient, self.unsharded.grad = self.unsharded.grad, None
        accumulated, self.accumulated = self.accumulated, None
        if accumulated is None:
            return gradient
        return accumulated if gradient is None else accumulated.add_(gradient)

    def hold_gradient(self, dtype: torch.dtype) -> None:
        """Keeps this microbatch's gradient for a later reduction, summed in ``dtype``."""
        gradient = self.unsharded.grad
        if gradient is None or (gradient.dtype == dtype and self.accumulated is None):
            return  # autograd itself sums the next microbatch into it
        total = self.take_gradient()
        self.accumulated = None if total is None else total.to(dtype)

    def accept_gradient(self, local: torch.Tensor) -> None:
        """Sets or adds this rank's shard of the reduced gradient, then calls the hooks that users registered for it."""
        sharded = cast(Any, self.sharded)
        if sharded.grad is None:
            sharded.grad = DTensor(local, sharded._spec, requires_grad=False)
        else:
            sharded.grad._local_tensor.add_(local)
        for hook in tuple((sharded._post_accumulate_grad_hooks or {}).values()):
            hook(sharded)

    def drop_gradient(self) -> None:
        """Forgets gradients that have not been reduced."""
        self.unsharded.grad = self.accumulated = None

    def _registered(self) -> nn.Parameter | None:
        """What is in the sharded parameter's place now, at whichever owner; ``None`` if somebody deleted it."""
        sharded = self.sharded
        for parameters, name in self._places:
            registered = parameters.get(name)
            if registered is not sharded:
                return registered
        return sharded

    def _register(self, parameter: nn.Parameter) -> None:
        for parameters, name in self._slots:
            parameters[name] = parameter
        for module, name in self._intercepting:
            setattr(module, name, parameter)

    def _carry_attributes(self, parameter: nn.Parameter) -> None:
        for name, value in self._attributes.items():
            if name not in vars(parameter):
                setattr(parameter, name, value)


def _intercepts(module: nn.Module) -> bool:
    """Whether the module's class wants to see parameters being set, as ``nn.LSTM`` does; others skip that cost."""
    return type(module).__setattr__ is not nn.Module.__setattr__
