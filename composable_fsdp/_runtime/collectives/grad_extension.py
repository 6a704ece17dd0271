"""Reduce-scatter extensions of tensor subclasses: ``fsdp_pre_reduce_scatter`` and ``fsdp_post_reduce_scatter``.

They mirror the all-gather hooks, and are found in the same way. The first makes payloads from a full gradient, one row
per rank. The second sums the rows that this rank receives.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._comm.broadcast import gather_objects
from composable_fsdp._comm.communicator import Communicator
from composable_fsdp._layout.bucket_layout import aligned_bytes
from composable_fsdp._runtime.params.tensor_subclass import GRADIENT_HOOKS
from composable_fsdp.errors import ExtensionError, ParameterError
from composable_fsdp.policies import MixedPrecisionPolicy

__all__ = ["ExtensionMessage", "GradientExtension", "check_hooks", "find_gradient_extension"]

_FORMS = "fsdp_pre_reduce_scatter(self, mesh, pieces) or fsdp_pre_reduce_scatter(self, mesh, pieces, module, mp_policy)"


@dataclass
class GradientExtension:
    """The reduce-scatter hooks of one parameter.

    Args:
        name: the parameter's name, for messages.
        local: this rank's shard, on which the hooks are called.
        mesh: the shard axis, 1-d.
        shard: the communicator of the shard axis.
        padded_size: shape of the largest shard, to which all shards are padded with zeros.
        module: a weak reference to the first module on which the parameter is registered.
        policy: the group's mixed precision.
        takes_all: True if the first hook takes the module and the policy too.
    """

    name: str
    local: torch.Tensor
    mesh: DeviceMesh
    shard: Communicator
    padded_size: tuple[int, ...]
    module: ref[nn.Module]
    policy: MixedPrecisionPolicy
    takes_all: bool
    row_bytes: int = 0
    """Bytes sent to each rank, known after the first call."""
    _specs: object = None
    """Shapes and dtypes on which all ranks have agreed."""

    def pre_reduce_scatter(self, pieces: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], object]:
        """Call the first hook; return payloads, each with one index of dim 0 per rank, and metadata."""
        hook = cast(Any, self.local).fsdp_pre_reduce_scatter
        result = hook(self.mesh, pieces, self.module(), self.policy) if self.takes_all else hook(self.mesh, pieces)
        num_ranks = self.shard.size
        if (
            not isinstance(result, tuple)
            or len(result) != 2
            or not isinstance(result[0], (tuple, list))
            or not all(isinstance(t, torch.Tensor) and t.dim() and t.size(0) == num_ranks for t in result[0])
        ):
            raise ParameterError(
                f"fsdp_pre_reduce_scatter of parameter {self.name!r} must return (tuple of tensors, metadata), each "
                f"tensor with {num_ranks} on dim 0, one for each rank of the shard axis."
            )
        payloads = tuple(t.contiguous() for t in result[0])
        self._agree([(tuple(t.shape), t.dtype) for t in payloads])
        self.row_bytes = sum(aligned_bytes(payload[0].nbytes) for payload in payloads)
        return payloads, result[1]

    def _agree(self, specs: object) -> None:
        """Raise on all ranks, the first time, if their payloads differ in size, which a collective does not support."""
        if self._specs is None:
            everyones = gather_objects(specs, self.shard)
            if any(other != specs for other in everyones):
                raise ParameterError(
                    f"fsdp_pre_reduce_scatter of parameter {self.name!r} returned other shapes or dtypes on some ranks "
                    f"than on others: {everyones} (by shard rank)."
                )
            self._specs = specs
        if specs != self._specs:
            raise ParameterError(
                f"fsdp_pre_reduce_scatter of parameter {self.name!r} returned payloads of {specs}, after {self._specs} "
                "at the first reduction: shapes and dtypes must not change."
            )

    def post_reduce_scatter(self, outputs: Sequence[torch.Tensor], metadata: object, dtype: torch.dtype) -> Any:
        """Call the second hook; return the sum, of ``padded_size``."""
        total = cast(Any, self.local).fsdp_post_reduce_scatter(tuple(outputs), metadata, dtype)
        if not isinstance(total, torch.Tensor) or tuple(total.shape) != self.padded_size:
            found = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
            raise ParameterError(
                f"fsdp_post_reduce_scatter of parameter {self.name!r} must return the sum of the pieces, a tensor of "
                f"shape {self.padded_size}, not {found}."
            )
        return total


class Spec(NamedTuple):
    """Shape and dtype of one payload, and the bytes of its row for one rank."""

    shape: torch.Size
    dtype: torch.dtype
    row_bytes: int


class ExtensionMessage:
    """The message that the hooks of one bucket's parameters make.

    Args:
        extensions: the hooks of the parameters with a gradient to reduce.
        rows: per extension, ``(num_ranks, at least padded numel)``: the flat shard of each rank.
        places: per extension, flat memory for the sum.
        flags: ``(num_flags,)``, this rank's flags; becomes nonzero where any rank's flag is.
    """

    def __init__(
        self,
        extensions: Sequence[GradientExtension],
        rows: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        flags: torch.Tensor,
    ) -> None:
        self._extensions = extensions
        self._places = places
        self._flags = flags
        self._payloads: list[tuple[torch.Tensor, ...]] = []
        self._specs: list[list[Spec]] = []
        self._metadata: list[object] = []
        for extension, row in zip(extensions, rows, strict=True):
            pieces = row[:, : prod(extension.padded_size)].reshape(row.size(0), *extension.padded_size)
            payloads, metadata = extension.pre_reduce_scatter(pieces)
            self._payloads.append(payloads)
            self._specs.append([Spec(payload.shape, payload.dtype, payload[0].nbytes) for payload in payloads])
            self._metadata.append(metadata)
        self._flags_from = sum(extension.row_bytes for extension in extensions)
        self._dtype = flags.dtype

    @property
    def row_bytes(self) -> int:
        return self._flags_from + self._flags.numel()

    def write(self, rows: torch.Tensor) -> None:
        start = 0
        for payload in (payload for of_one in self._payloads for payload in of_one):
            flat = payload.view(payload.size(0), prod(payload.shape[1:])).view(torch.uint8)
            rows[:, start : start + flat.size(1)] = flat
            start += aligned_bytes(flat.size(1))
        self._payloads.clear()
        rows[:, self._flags_from :] = self._flags.ne(0)

    def read(self, rows: torch.Tensor) -> None:
        start = 0
        for extension, specs, metadata, place in zip(
            self._extensions, self._specs, self._metadata, self._places, strict=True
        ):
            outputs = []
            for spec in specs:
                outputs.append(rows[:, start : start + spec.row_bytes].view(spec.dtype).reshape(spec.shape))
                start += aligned_bytes(spec.row_bytes)
            total = extension.post_reduce_scatter(outputs, metadata, self._dtype)
            place[: total.numel()].view(total.shape).copy_(total)
            place[total.numel() :].zero_()
        self._flags.copy_(rows[:, self._flags_from :].any(dim=0))


def check_hooks(
    name: str, local: torch.Tensor, pair: tuple[str, str], arities: Collection[int], what: str, forms: str
) -> int | None:
    """Return how many arguments the first hook of ``pair`` takes, or ``None`` if ``local`` has no hooks.

    Raises:
        ExtensionError: ``local`` has only one of the two, or the number of the first's arguments is not in ``arities``.
    """
    found = [hook for hook in pair if hasattr(local, hook)]
    if not found:
        return None
    if len(found) == 1:
        missing = pair[1] if found[0] == pair[0] else pair[0]
        raise ExtensionError(
            f"the local tensor of parameter {name!r} ({type(local).__name__}) defines {found[0]} but not {missing}: "
            f"a tensor that decides {what} needs both."
        )
    arity = len(inspect.signature(getattr(local, pair[0])).parameters)
    if arity not in arities:
        raise ExtensionError(
            f"{pair[0]} of parameter {name!r} ({type(local).__name__}) takes {arity} arguments beside self; expected "
            f"{forms}."
        )
    return arity


def find_gradient_extension(
    name: str,
    local: torch.Tensor,
    mesh: DeviceMesh,
    shard: Communicator,
    padded_size: tuple[int, ...],
    module: nn.Module,
    policy: MixedPrecisionPolicy,
) -> GradientExtension | None:
    """Return the reduce-scatter hooks of ``local``, or ``None`` if it has none.

    Raises:
        ExtensionError: ``local`` has only one of the two, or a first one that takes neither two nor four arguments.
    """
    arity = check_hooks(name, local, GRADIENT_HOOKS, (2, 4), "how its gradient is sent", _FORMS)
    if arity is None:
        return None
    return GradientExtension(name, local, mesh, shard, padded_size, ref(module), policy, arity == 4)
