"""The tensors of one bucket: the shards at rest, the full parameters while in use, the messages in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_fsdp.codec.cast import Cast
from composable_fsdp.codec.protocol import Codec
from composable_fsdp.comm.protocol import Transfer
from composable_fsdp.layout.bucket import GatherLayout
from composable_fsdp.layout.pack import pack_gradient, take_shard, unpack_parameter
from composable_fsdp.layout.plan import BucketPlan, plan_smaller
from composable_fsdp.layout.reduction import Reduction
from composable_fsdp.memory.storage import AliasedBuffer, OwnedBuffer, UnshardedBuffer, contiguous_strides
from composable_fsdp.memory.store import ShardStore
from composable_fsdp.runtime.channel import Channel
from composable_fsdp.runtime.parameter import ShardedParameter

__all__ = ["Bucket", "Gather", "ReducedBucket", "Scatter"]


@dataclass(slots=True)
class Gather:
    """One bucket's part of a group's all-gather: what to send, and the packed message that must still be unpacked."""

    layout: GatherLayout
    transfers: list[Transfer]
    packed: torch.Tensor | None = None


@dataclass(slots=True)
class Scatter:
    """One bucket's part of a group's gradient reduction. ``present`` are the parameters that have a gradient here."""

    transfers: list[Transfer]
    output: torch.Tensor
    present: set[int]
    added: Scatter | None = None
    """An earlier one that is part of this, alive as long as this is in flight."""


@dataclass(frozen=True, slots=True)
class ReducedBucket:
    """Parameters and this rank's shards of their reduced gradients."""

    parameters: list[ShardedParameter]
    gradients: list[torch.Tensor]


class Bucket:
    """The parameters of one group that share their axes and dtypes.

    Invariant: the local tensor of every parameter is a view of ``store``, its unsharded tensor one of ``buffer``.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        channel: Channel,
        store: ShardStore,
        device: torch.device,
    ) -> None:
        self.parameters = [parameters[i] for i in plan.indices]
        self.store = store
        self.channel = channel
        self._shard = channel.axes.shard
        self._device = device
        self._codec: Codec = Cast(plan.compute_dtype)
        self.buffer: UnshardedBuffer = (
            AliasedBuffer(store.flat)
            if plan.aliased
            else OwnedBuffer(plan.gather.places.numel, plan.compute_dtype, device)
        )
        self._row_places = [self._row_place(plan.gather, i) for i in plan.gather.packed] if not plan.aliased else []
        self._slice: tuple[torch.Tensor, GatherLayout] | None = None
        self._partial: Scatter | None = None
        """The sum of earlier reductions over the shard axis alone, in the reduce dtype."""
        self.follow(plan)

    def follow(self, plan: BucketPlan) -> None:
        """Takes over a plan that differs only in which parameters are trainable."""
        self.plan = plan
        layout, rank = plan.reduce, self._shard.rank
        self._reduced_views = [
            _contiguous_view(shards.shard_shape(rank), offset)
            for shards, offset in zip(layout.shards, layout.output.offsets, strict=True)
        ]

    @property
    def gradient_device(self) -> torch.device:
        """Where reduced gradients must end: with the shards."""
        return self.store.flat.device

    def parameter_data(self, k: int) -> torch.Tensor:
        """The view of the unsharded buffer for the ``k``-th parameter."""
        layout = self.plan.gather.store if self.plan.aliased else self.plan.gather.places
        return self.buffer.parameter_data(layout.offsets[k], self.parameters[k].shape)

    # -- shards to full parameters

    def prepare_gather(self) -> Gather:
        """Encodes the shards, or takes the slice kept on the smaller mesh, and says what must travel."""
        if self.plan.aliased:
            return Gather(self.plan.gather, [])
        if self._slice is not None:
            wire, layout = self._slice
        else:
            wire, layout = self._codec.encode(self.store.flat, self._device), self.plan.gather
        gather = Gather(layout, [])
        for i in layout.direct:
            length, offset = layout.shards[i].padded_numel, layout.store.offsets[i]
            place = self.buffer.region(layout.places.offsets[i], length * layout.num_shards)
            gather.transfers.append(Transfer(place, wire[offset : offset + length]))
        if layout.packed_numel:
            allocate = (self.channel.smaller or self.channel.gather).allocate
            gather.packed = allocate(layout.num_shards * layout.packed_numel, wire.dtype, self._device)
            gather.transfers.append(Transfer(gather.packed, wire[: layout.packed_numel]))
        return gather

    def finish_gather(self, gather: Gather) -> None:
        """Copies packed parameters to their places."""
        self._slice = None
        if gather.packed is None:
            return
        layout = gather.layout
        whole = layout.num_shards == self._shard.size
        rows = gather.packed.view(layout.num_shards, layout.packed_numel).split(layout.packed_widths, dim=1)
        places, sources = [], []
        for position, (i, row) in enumerate(zip(layout.packed, rows, strict=True)):
            shards = layout.shards[i]
            source = row if row.size(1) == shards.padded_numel else row[:, : shards.padded_numel]
            if shards.concatenates:
                places.append(self._row_places[position] if whole else self._row_place(layout, i))
                sources.append(source)
            else:
                unpack_parameter(shards, source, self._row_place(layout, i))
        if places:
            torch._foreach_copy_(places, sources)

    def _row_place(self, layout: GatherLayout, i: int) -> torch.Tensor:
        """Where the full parameter is unpacked to; as rows of pieces, where these lie one after the other there."""
        shards = layout.shards[i]
        place = self.buffer.region(layout.places.offsets[i], shards.full_numel)
        return place.view(layout.num_shards, shards.padded_numel) if shards.concatenates else place

    def keep_slice(self, num_shards: int, rank: int, direct_bytes: int) -> None:
        """Keeps the slice of ``rank`` on a smaller mesh of ``num_shards``, from which backward gathers again."""
        if self.plan.aliased:
            return
        layout = plan_smaller(self.plan, num_shards, direct_bytes)
        kept = torch.empty(layout.store.numel, dtype=self.plan.compute_dtype, device=self._device)
        for shards, start, parameter in zip(layout.shards, layout.store.offsets, self.parameters, strict=True):
            take_shard(shards, parameter.full, rank, kept[start : start + shards.padded_numel])
        self._slice = (kept, layout)

    def drop_slice(self) -> None:
        """Releases what :meth:`keep_slice` kept."""
        self._slice = None

    # -- full gradients to reduced shards

    def prepare_scatter(self, reduction: Reduction) -> Scatter | None:
        """Takes the gradients that autograd left and says what must travel; ``None`` where nothing is trainable.

        The message always holds every trainable parameter, zeros for those without a gradient, so that its size is the
        same on every rank whatever part each of them used. Flags in it tell all ranks what any of them used.
        """
        layout, plan = self.plan.reduce, self.plan
        if not layout.indices:
            return None
        gradients = [self.parameters[i].take_gradient() for i in layout.indices]
        present = {k for k, gradient in enumerate(gradients) if gradient is not None}
        output = torch.empty(layout.output.numel, dtype=plan.reduce_dtype, device=self._device)
        scatter = Scatter([], output, present)
        for k in layout.direct:
            start, length = layout.output.offsets[k], layout.shards[k].padded_numel
            full = self._wire_gradient(gradients[k], layout.shards[k].numel, reduction)
            scatter.transfers.append(Transfer(output[start : start + length], full))
        if layout.packed_numel:
            num_shards = self._shard.size
            message = self.channel.scatter.allocate(num_shards * layout.packed_numel, plan.reduce_dtype, self._device)
            if layout.has_padding:
                message.zero_()
            self._pack(gradients, message.view(num_shards, layout.packed_numel))
            if reduction.pre_divide != 1.0:
                message.div_(reduction.pre_divide)
            scatter.transfers.append(Transfer(output[: layout.packed_numel], message))
        return scatter

    def _pack(self, gradients: list[torch.Tensor | None], message: torch.Tensor) -> None:
        """Copies packed gradients into their columns of ``message``, one row per rank, casting on the way."""
        layout = self.plan.reduce
        columns, sources = [], []
        blocks = message.split(layout.packed_widths, dim=1)
        for k, column in zip(layout.packed, blocks, strict=False):  # the flags come last
            shards, gradient = layout.shards[k], gradients[k]
            if column.size(1) != shards.padded_numel:
                column = column[:, : shards.padded_numel]
            if gradient is not None and shards.concatenates and shards.layout.is_even and gradient.is_contiguous():
                columns.append(column)
                sources.append(gradient.view(column.shape))
            else:
                pack_gradient(shards, gradient, column)
        if columns:
            torch._foreach_copy_(columns, sources)
        if layout.num_flags:
            flags = blocks[-1][:, : layout.num_flags]
            absent = [k for k, gradient in enumerate(gradients) if gradient is None]
            flags.fill_(1)
            if absent:
                flags[:, absent] = 0

    def add_partial(self, scatter: Scatter) -> None:
        """Adds what earlier reductions left unfinished to one that has come over the shard axis."""
        partial, self._partial = self._partial, None
        if partial is not None:
            scatter.output.add_(partial.output)
            scatter.present |= partial.present
            scatter.added = partial

    def keep_partial(self, scatter: Scatter) -> None:
        """Keeps what came over the shard axis for a later reduction, as its sum so far."""
        self.add_partial(scatter)
        self._partial = Scatter([], scatter.output, scatter.present)

    def drop_partial(self) -> None:
        """Forgets what :meth:`keep_partial` kept."""
        self._partial = None

    def finish_scatter(self, scatter: Scatter, reduction: Reduction) -> ReducedBucket:
        """Scales what arrived, casts it to the dtype of the gradients and brings it to where the shards rest."""
        present = sorted(self._present_anywhere(scatter))
        if reduction.post_divide != 1.0:
            scatter.output.div_(reduction.post_divide)
        flat = scatter.output.to(self.plan.gradient_dtype)
        if flat.device != self.gradient_device:
            host = torch.empty_like(flat, device=self.gradient_device, pin_memory=self.store.flat.is_pinned())
            flat = host.copy_(flat, non_blocking=True)
        indices, views = self.plan.reduce.indices, self._reduced_views
        return ReducedBucket(
            [self.parameters[indices[k]] for k in present], [flat.as_strided(*views[k]) for k in present]
        )

    def _present_anywhere(self, scatter: Scatter) -> set[int]:
        """Parameters that have a gradient on any rank. Reads the flags, which the host must wait for, only if some have
        none here.
        """
        layout = self.plan.reduce
        if not layout.num_flags or len(scatter.present) == layout.num_flags:
            return scatter.present
        flags = scatter.output[layout.flags_offset : layout.flags_offset + layout.num_flags]
        return set(flags.ne(0).nonzero().flatten().tolist())

    def _wire_gradient(self, gradient: torch.Tensor | None, numel: int, reduction: Reduction) -> torch.Tensor:
        if gradient is None:
            return torch.zeros(numel, dtype=self.plan.reduce_dtype, device=self._device)
        flat = gradient.reshape(-1).to(self.plan.reduce_dtype)
        return flat if reduction.pre_divide == 1.0 else flat / reduction.pre_divide


def _contiguous_view(shape: tuple[int, ...], offset: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Arguments of ``as_strided`` for a tensor of ``shape`` that lies at ``offset``."""
    return shape, contiguous_strides(shape), offset
