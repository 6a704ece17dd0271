"""Tensors that decide by themselves how they travel: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

The hooks are found on the local tensor of a sharded parameter: on its class, or hung on the very tensor. They are
looked up, and their form is checked, when a group is built, on every rank alike, and not at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.errors import ParameterError
from composable_fsdp.memory.storage import contiguous_strides
from composable_fsdp.policy import MixedPrecisionPolicy
from composable_fsdp.runtime.gradient_extension import GRADIENT_HOOKS, check_hooks

__all__ = ["Extension", "GatherExtension", "Payload", "PlainExtension", "find_extension", "hooks_of"]

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
WANTS_PADDING = "fsdp_pads_shards"
_FORMS = (
    "fsdp_pre_all_gather(self, mesh) or fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)"
)


@dataclass(frozen=True)
class Payload:
    """What a hook wants sent for one parameter: contiguous tensors, and what it wants to be told afterwards."""

    inputs: tuple[torch.Tensor, ...]
    metadata: Any


class GatherExtension(Protocol):
    """How one parameter becomes payloads, and what is gathered the full parameter."""

    @property
    def name(self) -> str: ...

    def pre_all_gather(self) -> Payload:
        """What this rank sends."""
        ...

    def post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The first time: the full tensor, and the tensors that it is made of."""
        ...

    def refill(self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Later: fills ``out``, which was made at first."""
        ...


@dataclass(frozen=True)
class PlainExtension:
    """A parameter whose tensor decides how its gradient travels, and is itself gathered like any other.

    Args:
        name: of the parameter, for messages.
        local: this rank's shard.
        dim: on which it is cut.
        dtype: in which it travels and modules compute.
    """

    name: str
    local: torch.Tensor
    dim: int
    dtype: torch.dtype

    def pre_all_gather(self) -> Payload:
        return Payload((self.local.detach().to(self.dtype).movedim(self.dim, 0).contiguous(),), None)

    def post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        full = outputs[0].movedim(0, self.dim).contiguous()
        return full, (full,)

    def refill(self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype, out: torch.Tensor) -> None:
        if out.data_ptr() != outputs[0].data_ptr():
            out.copy_(outputs[0].movedim(0, self.dim))


@dataclass(frozen=True)
class Extension:
    """The hooks of one parameter.

    Args:
        name: of the parameter, for messages.
        local: this rank's shard, on which they are called.
        mesh: the shard axis, 1-d.
        outer_size: shape of what the shard axis cuts.
        module: the first module on which the parameter is registered.
        policy: of the group.
        takes_all: whether the first hook takes five arguments, or the mesh alone.
        padded_size: shape of the largest shard, where the hook wants shards padded to it.
    """

    name: str
    local: torch.Tensor
    mesh: DeviceMesh
    outer_size: tuple[int, ...]
    module: nn.Module
    policy: MixedPrecisionPolicy
    takes_all: bool
    padded_size: tuple[int, ...] | None = None

    def pre_all_gather(self) -> Payload:
        """Calls the first hook."""
        shard: Any = self.local
        if self.padded_size is not None and tuple(shard.shape) != self.padded_size:
            shard = self.local.new_zeros(self.padded_size)
            shard[tuple(slice(0, length) for length in self.local.shape)].copy_(self.local)
        if self.takes_all:
            size, stride = torch.Size(self.outer_size), contiguous_strides(self.outer_size)
            result = shard.fsdp_pre_all_gather(self.mesh, size, stride, self.module, self.policy)
        else:
            result = shard.fsdp_pre_all_gather(self.mesh)
        if not isinstance(result, tuple) or len(result) != 2 or not _are_tensors(result[0]):
            raise ParameterError(
                f"fsdp_pre_all_gather of parameter {self.name!r} must return (tuple of tensors, metadata), not "
                f"{type(result).__name__}."
            )
        return Payload(tuple(t.contiguous() for t in result[0]), result[1])

    def refill(self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Calls the second hook to fill ``out``, which it made at first."""
        cast(Any, self.local).fsdp_post_all_gather(tuple(outputs), metadata, dtype, out=out)

    def post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Calls the second hook for the first time: the full tensor, and the tensors that it is made of."""
        result = cast(Any, self.local).fsdp_post_all_gather(tuple(outputs), metadata, dtype)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
            raise ParameterError(
                f"fsdp_post_all_gather of parameter {self.name!r} must return (tensor, tuple of the tensors that it is "
                f"made of) when out is None, not {type(result).__name__}."
            )
        full, inner = result
        if tuple(full.shape) != self.outer_size:
            raise ParameterError(
                f"fsdp_post_all_gather of parameter {self.name!r} returned a tensor of shape {tuple(full.shape)}; the "
                f"whole parameter has {self.outer_size}. Where rows do not divide evenly, cut what was padded."
            )
        return full, tuple(inner)


def _are_tensors(inputs: object) -> bool:
    return isinstance(inputs, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in inputs)


def hooks_of(tensor: torch.Tensor) -> frozenset[str]:
    """The hooks that ``tensor`` brings, for itself and for its gradient."""
    return frozenset(hook for hook in (PRE, POST, *GRADIENT_HOOKS) if hasattr(tensor, hook))


def find_extension(
    name: str,
    local: torch.Tensor,
    mesh: DeviceMesh,
    outer_size: tuple[int, ...],
    padded_size: tuple[int, ...],
    module: nn.Module,
    policy: MixedPrecisionPolicy,
) -> Extension | None:
    """The hooks that ``local`` brings, if any.

    Raises:
        ParameterError: it brings one of the two only, or one that takes neither one nor five arguments.
    """
    arity = check_hooks(name, local, (PRE, POST), (1, 5), "how it travels", _FORMS)
    if arity is None:
        return None
    padded = padded_size if getattr(local, WANTS_PADDING, False) else None
    return Extension(name, local, mesh, outer_size, module, policy, arity == 5, padded)
