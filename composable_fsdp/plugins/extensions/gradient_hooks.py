"""Reduce-scatter extensions of tensor subclasses: ``fsdp_pre_reduce_scatter`` and ``fsdp_post_reduce_scatter``.

They mirror the all-gather hooks, and are found in the same way. The first makes payloads from a full gradient, one row
per rank. The second sums the rows that this rank receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast
from weakref import ref

import torch

from composable_fsdp._consistency.broadcast import gather_objects
from composable_fsdp._core.layout import ReduceLayout, TensorShards, aligned_bytes
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.reduce import BucketReduceScatter, ReduceKind, ReduceScatterBuffers
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.extensions.tensor_classes import GRADIENT_HOOKS, check_hooks

_FORMS = "fsdp_pre_reduce_scatter(self, mesh, pieces) or fsdp_pre_reduce_scatter(self, mesh, pieces, module, mp_policy)"


class GradientExtension:
    """The reduce-scatter hooks of one parameter, called on its shard."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self.name, self._parameter = parameter.name, parameter
        self._module, self._takes_all = ref(parameter.owners[0][0]), _num_arguments(parameter) == 4
        self._shard = parameter.sharding.axes.shard
        self.padded_size = TensorShards(parameter.shape, parameter.dim, self._shard.size).padded_shape
        """Shape of the largest shard, to which all shards are padded with zeros."""
        self.row_bytes = 0
        """Bytes sent to each rank, known after the first call."""
        self._specs: object = None
        """Shapes and dtypes on which all ranks have agreed."""

    def pre_reduce_scatter(self, pieces: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], object]:
        """Call the first hook; return payloads, each with one index of dim 0 per rank, and metadata."""
        parameter, num_ranks = self._parameter, self._shard.size
        hook, mesh = cast(Any, parameter.local).fsdp_pre_reduce_scatter, parameter.sharding.axes.shard_mesh
        rest = (self._module(), parameter.precision) if self._takes_all else ()
        result = hook(mesh, pieces, *rest)
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
            everyones = gather_objects(specs, self._shard)
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
        total = cast(Any, self._parameter.local).fsdp_post_reduce_scatter(tuple(outputs), metadata, dtype)
        if not isinstance(total, torch.Tensor) or tuple(total.shape) != self.padded_size:
            found = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
            raise ParameterError(
                f"fsdp_post_reduce_scatter of parameter {self.name!r} must return the sum of the pieces, a tensor of "
                f"shape {self.padded_size}, not {found}."
            )
        return total


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
        self._extensions, self._places, self._flags = extensions, places, flags
        self._sent: list[torch.Tensor] = []
        self._received: list[tuple[list[tuple[torch.Size, torch.dtype, int]], object]] = []
        """Per extension, the shape, dtype and bytes of a row of each payload, and metadata."""
        for extension, row in zip(extensions, rows, strict=True):
            pieces = row[:, : prod(extension.padded_size)].reshape(row.size(0), *extension.padded_size)
            payloads, metadata = extension.pre_reduce_scatter(pieces)
            self._sent += payloads
            self._received.append(([(each.shape, each.dtype, each[0].nbytes) for each in payloads], metadata))
        self._flags_from = sum(extension.row_bytes for extension in extensions)

    @property
    def row_bytes(self) -> int:
        return self._flags_from + self._flags.numel()

    def write(self, rows: torch.Tensor) -> None:
        start = 0
        for payload in self._sent:
            flat = payload.view(payload.size(0), prod(payload.shape[1:])).view(torch.uint8)
            rows[:, start : start + flat.size(1)] = flat
            start += aligned_bytes(flat.size(1))
        self._sent.clear()
        rows[:, self._flags_from :] = self._flags.ne(0)

    def read(self, rows: torch.Tensor) -> None:
        start = 0
        for extension, place, (specs, metadata) in zip(self._extensions, self._places, self._received, strict=True):
            outputs = []
            for shape, dtype, nbytes in specs:
                outputs.append(rows[:, start : start + nbytes].view(dtype).reshape(shape))
                start += aligned_bytes(nbytes)
            total = extension.post_reduce_scatter(outputs, metadata, self._flags.dtype)
            place[: total.numel()].view(total.shape).copy_(total)
            place[total.numel() :].zero_()
        self._flags.copy_(rows[:, self._flags_from :].any(dim=0))


class HookedReduce:
    """The messages of a bucket whose parameters have hooks."""

    all_reduce_bytes = None
    remembers = False

    def __init__(self, extensions: Sequence[GradientExtension], layout: ReduceLayout) -> None:
        self.extensions, self._layout = extensions, layout
        self._reduced = [extensions[i] for i in layout.indices]

    @property
    def row_bytes(self) -> int:
        """Known after the first reduction."""
        return sum(extension.row_bytes for extension in self._reduced) + self._layout.num_flags

    def message(
        self, bucket: BucketReduceScatter, gradients: list[torch.Tensor | None], scatter: ReduceScatterBuffers
    ) -> ExtensionMessage:
        widths = self._layout.packed_widths[: len(self._layout.packed)]
        rows = bucket.packed_rows(gradients).split(widths, dim=1)
        places = scatter.output[: self._layout.gradient_numel].split(widths)
        return ExtensionMessage(self._reduced, rows, places, bucket.flags_of(scatter))

    def all_reduce(self, bucket: BucketReduceScatter, scatter: ReduceScatterBuffers) -> None:
        return None


class GradientHooks:
    """The reduce kind of tensors with hooks."""

    def claim(
        self, parameters: Sequence[ShardedParameter], claimed: Mapping[ShardedParameter, ReduceKind]
    ) -> dict[ShardedParameter, ReduceKind]:
        return {p: self for p in parameters if _num_arguments(p)}

    def make(self, bucket: BucketReduceScatter, former: HookedReduce | None) -> HookedReduce:
        extensions = former.extensions if former else [GradientExtension(p) for p in bucket.parameters]
        return HookedReduce(extensions, bucket.plan.reduce)


def _num_arguments(parameter: ShardedParameter) -> int | None:
    return check_hooks(parameter.name, parameter.local, GRADIENT_HOOKS, (2, 4), "how its gradient is sent", _FORMS)
