"""The gradient side of one bucket: from full gradients to this rank's reduced shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import prod
from operator import attrgetter, is_

import torch

from composable_fsdp._comm.communicator import Transfer
from composable_fsdp._layout.grad_scaling import Reduction, divide
from composable_fsdp._layout.pack import pack_gradient, take_shard
from composable_fsdp._layout.plan import SMALL_BYTES, BucketPlan
from composable_fsdp._memory.streams import blocks_the_host
from composable_fsdp._memory.unsharded_buffer import contiguous_strides
from composable_fsdp._runtime.collectives.encoded_reduce import EncodedAllReduce, EncodedParcel, Parcel, aligned_piece
from composable_fsdp._runtime.collectives.grad_extension import GradientExtension, HookedParcel
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._sharding.process_groups import ProcessGroups
from composable_fsdp.codecs._encoder import Encoder, GradientCodec

__all__ = ["GradientScatter", "ReducedBucket", "Scatter"]

_dtype_of = attrgetter("dtype")


@dataclass(slots=True)
class Scatter:
    """One bucket's part of a group's gradient reduction.

    ``transfers`` are reduced on the way; ``whole`` are messages that are reduced in place, of which
    :meth:`GradientScatter.take_own` takes this rank's part; what is added up where it arrives is the ``parcel``. In any
    case the sum over the shard axis is in ``output`` then. ``present`` are the parameters that have a gradient here.
    """

    transfers: list[Transfer]
    output: torch.Tensor
    present: frozenset[int]
    whole: list[torch.Tensor] = field(default_factory=list)
    parcel: Parcel | None = None
    added: Scatter | None = None
    """An earlier one that is part of this, alive as long as this is in flight."""


@dataclass(frozen=True, slots=True)
class ReducedBucket:
    """Parameters and this rank's shards of their reduced gradients."""

    parameters: list[ShardedParameter]
    gradients: list[torch.Tensor]


class GradientScatter:
    """Sends the gradients of one bucket's parameters, and takes what comes.

    Args:
        plan: of the bucket.
        parameters: of the bucket, in its order.
        pgs: over which they travel.
        device: where modules compute.
        rest: where reduced gradients must end: with the shards.
        pin_memory: whether they are page-locked there.
        extensions: of the parameters, in their order, where they decide by themselves how their gradients travel.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        pgs: ProcessGroups,
        device: torch.device,
        rest: torch.device,
        *,
        pin_memory: bool,
        extensions: Sequence[GradientExtension] = (),
    ) -> None:
        self.parameters = parameters
        self.pgs = pgs
        self._shard = pgs.axes.shard
        self.device = device
        self._on_host = blocks_the_host(device)
        self._rest = rest
        self._pin_memory = pin_memory
        self._extensions = extensions
        self._partial: Scatter | None = None
        """The sum of earlier reductions over the shard axis alone, in the reduce dtype."""
        self.encoders: dict[str, Encoder] = {}
        """By the leg on which they work: ``"shard"``, and ``"pieces"`` and ``"sums"`` of the replicate axis."""
        self.plan = plan
        self._make_encoders()
        self._make_views()

    def follow(self, plan: BucketPlan) -> None:
        """Takes over a plan that differs only in which parameters are trainable."""
        moved = plan.reduce != self.plan.reduce
        self.plan = plan
        if moved:  # what was left over belongs to other places
            self._make_encoders()
        self._make_views()

    def _make_encoders(self) -> None:
        codecs, numel, num_replicas = self.plan.gradient_codecs, self.plan.reduce.gradient_numel, self.num_replicas
        piece = aligned_piece(numel, num_replicas)
        legs: dict[str, tuple[GradientCodec | None, int, int]] = {
            "shard": (codecs.shard, self._shard.size, numel),
            "pieces": (codecs.replicate, num_replicas, piece),
            "sums": (codecs.replicate, 1, piece),
        }
        self.encoders = {leg: Encoder(c, rows, each) for leg, (c, rows, each) in legs.items() if c is not None}

    @property
    def num_replicas(self) -> int:
        """Ranks of the replicate axis."""
        return self.pgs.replicate.size

    def _make_views(self) -> None:
        layout, rank = self.plan.reduce, self._shard.rank
        self._everyone = frozenset(range(len(layout.indices)))
        self._members = [self.parameters[i] for i in layout.indices]
        self._has_empty = any(shards.numel == 0 for shards in layout.shards)
        self._reduced_views = [
            _contiguous_view(shards.shard_shape(rank), offset)
            for shards, offset in zip(layout.shards, layout.output.offsets, strict=True)
        ]
        ends = [offset + prod(shape) for shape, _, offset in self._reduced_views]
        self._gradient_span = (min(layout.output.offsets, default=0), max(ends, default=0))
        """Of the output. Only gradients lie in it where it has as many elements as they have."""

    def prepare(self, reduction: Reduction, *, were_summed: bool = False) -> Scatter | None:
        """Takes the gradients that autograd left and says what must travel; ``None`` where nothing is trainable.

        Args:
            reduction: what will be done with them.
            were_summed: any rank may have sums of several microbatches, which must not travel in fewer bits.

        The message always holds every trainable parameter, zeros for those without a gradient, so that its size is the
        same on every rank whatever part each of them used. Flags in it tell all ranks what any of them used.
        """
        layout, plan = self.plan.reduce, self.plan
        if not layout.indices:
            return None
        sum_dtype = plan.sum_dtype
        gradients = [member.take_gradient(sum_dtype) for member in self._members]
        present = self._everyone
        if any(map(is_, gradients, repeat(None))):
            present = frozenset(k for k, gradient in enumerate(gradients) if gradient is not None)
        wire_dtype = sum_dtype if were_summed else plan.wire_dtype
        message = None if plan.exchanges else self._packed_message(gradients, present, reduction, wire_dtype)
        if plan.exchanges:
            output = torch.empty(layout.output.numel, dtype=sum_dtype, device=self.device)
            return Scatter([], output, present, parcel=self._parcel(gradients, output, present))
        output = self.pgs.scatter.allocate(layout.output.numel, sum_dtype, self.device)
        scatter = Scatter([], output, present)
        for k in layout.direct:
            start, length = layout.output.offsets[k], layout.shards[k].padded_numel
            full = self._wire_gradient(gradients[k], layout.shards[k].numel, reduction, wire_dtype)
            scatter.transfers.append(Transfer(output[start : start + length], full))
        if message is not None:
            scatter.transfers.append(Transfer(output[: layout.packed_numel], message))
        if layout.whole:
            scatter.whole.append(self._whole_message(gradients, present, reduction))
        return scatter

    def _packed_message(
        self,
        gradients: list[torch.Tensor | None],
        present: frozenset[int],
        reduction: Reduction,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """The packed gradients and flags, row after row; ``None`` if nothing is packed. Lets go of these gradients, so
        that they need not meet in memory with what comes.
        """
        layout, num_shards = self.plan.reduce, self._shard.size
        if not layout.packed_numel:
            return None
        message = self.pgs.scatter.allocate(num_shards * layout.packed_numel, dtype, self.device)
        self._fill(gradients, present, message.view(num_shards, layout.packed_numel))
        for k in layout.packed:
            gradients[k] = None
        return divide(message, reduction.pre_divide)

    def _whole_message(
        self, gradients: Sequence[torch.Tensor | None], present: frozenset[int], reduction: Reduction
    ) -> torch.Tensor:
        """The full gradients that travel whole, zeros for those that are not there, and the flags."""
        layout = self.plan.reduce
        message = self.pgs.scatter.allocate(layout.message.numel, self.plan.sum_dtype, self.device).zero_()
        places, sources = [], []
        for k, offset in zip(layout.whole, layout.message.offsets, strict=False):
            gradient = gradients[k]
            if gradient is not None:
                places.append(message[offset : offset + gradient.numel()].view(gradient.shape))
                sources.append(gradient)
        if places:
            torch._foreach_copy_(places, sources)
        self._flag(self._flags_in(message).unsqueeze(0), present)
        return divide(message, reduction.pre_divide)

    def _flags_in(self, message: torch.Tensor) -> torch.Tensor:
        """Behind the whole gradients."""
        num_flags = self.plan.reduce.num_flags
        start = self.plan.reduce.message.offsets[-1] if num_flags else 0
        return message[start : start + num_flags]

    def take_own(self, scatter: Scatter) -> None:
        """Takes this rank's part of what was summed up whole, and the flags, to their places in the output.

        The message stays: on a stream of its own, this is not done yet when it returns.
        """
        layout, output = self.plan.reduce, scatter.output
        for message in scatter.whole:
            for k, begin in zip(layout.whole, layout.message.offsets, strict=False):
                shards, start = layout.shards[k], layout.output.offsets[k]
                full = message[begin : begin + shards.numel].view(shards.shape)
                take_shard(shards, full, self._shard.rank, output[start : start + shards.padded_numel])
            output[layout.flags_offset : layout.flags_offset + layout.num_flags].copy_(self._flags_in(message))

    def _fill(self, gradients: Sequence[torch.Tensor | None], present: frozenset[int], rows: torch.Tensor) -> None:
        """Writes packed gradients and flags into ``rows``, one for each rank."""
        layout = self.plan.reduce
        packed = [gradient for k in layout.packed if (gradient := gradients[k]) is not None]
        dtype = packed[0].dtype if packed else rows.dtype
        # The one operation for all of them casts on the way on accelerators; on the host it needs memory for it.
        casts_well = dtype == rows.dtype or not self._on_host or rows.nbytes <= SMALL_BYTES
        if layout.in_chunks and present is self._everyone and casts_well and _are_alike(packed):
            pieces = self._with_gaps(packed, len(rows))
            if layout.flags_width:
                pieces.append(torch.ones(len(rows) * layout.flags_width, dtype=dtype, device=self.device))
            if self._on_host and dtype != rows.dtype:  # one cast of all costs a fifth of one for each
                rows.copy_(torch._chunk_cat(pieces, 0, len(rows)))
            else:
                torch._chunk_cat(pieces, 0, len(rows), out=rows)
            return
        if layout.has_padding:
            rows.zero_()
        self._pack(gradients, rows)
        self._flag(rows[:, layout.gradient_numel :], present)

    def _with_gaps(self, packed: list[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
        """What ``torch._chunk_cat`` lays out in ``num_rows`` rows as the layout says: it knows no empty tensors."""
        layout = self.plan.reduce
        if not (layout.has_padding or self._has_empty):
            return packed
        zeros = {gap: packed[0].new_zeros(num_rows * gap) for gap in {*layout.gaps} - {0}}
        pieces = []
        for gradient, gap in zip(packed, layout.gaps, strict=True):
            pieces += [gradient] if gradient.numel() else []
            pieces += [zeros[gap]] if gap else []
        return pieces

    def _parcel(self, gradients: list[torch.Tensor | None], output: torch.Tensor, present: frozenset[int]) -> Parcel:
        """What is added up where it arrives."""
        layout = self.plan.reduce
        flags = output[layout.flags_offset : layout.flags_offset + layout.num_flags]
        # What fills their width up too: an all-reduce over the replicate axis reads it.
        self._flag(output[layout.flags_offset : layout.packed_numel].unsqueeze(0), present)
        if not self.plan.gradient_extended:
            take = partial(self._message, gradients)
            return EncodedParcel(self.encoders["shard"], take, output[: layout.gradient_numel], flags)
        rows = self._message(gradients).split(layout.packed_widths[: len(layout.packed)], dim=1)
        places = output[: layout.gradient_numel].split(layout.packed_widths[: len(layout.packed)])
        return HookedParcel([self._extensions[i] for i in layout.indices], rows, places, flags)

    def _message(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        """``(num_shards, gradient_numel)``, each rank's part of ``gradients``, which are let go.

        So not for a lane, which might still read when the stream of backward writes to their memory again.
        """
        layout = self.plan.reduce
        make = torch.zeros if layout.has_padding else torch.empty
        message = make(self._shard.size, layout.gradient_numel, dtype=self.plan.sum_dtype, device=self.device)
        self._pack(gradients, message)
        gradients.clear()
        return message

    def _pack(self, gradients: Sequence[torch.Tensor | None], message: torch.Tensor) -> None:
        """Copies packed gradients into their columns of ``message``, one row per rank, casting on the way."""
        layout = self.plan.reduce
        columns, sources = [], []
        blocks = message[:, : layout.gradient_numel].split(layout.packed_widths[: len(layout.packed)], dim=1)
        for k, column in zip(layout.packed, blocks, strict=True):
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

    def _flag(self, flags: torch.Tensor, present: frozenset[int]) -> None:
        """Fills ``(any, num_flags or more)`` with ones, and zeros for the parameters without gradient, if there are
        flags in this message.
        """
        if flags.size(1):
            flags.fill_(1)
            for k in self._everyone - present:
                flags[:, k].zero_()

    def encode_all_reduce(self, scatter: Scatter) -> EncodedAllReduce | None:
        """The reduction over the replicate axis, where that is encoded."""
        if self.plan.gradient_codecs.replicate is None:
            return None
        layout = self.plan.reduce
        flags = scatter.output[layout.flags_offset : layout.flags_offset + layout.num_flags]
        values = scatter.output[: layout.gradient_numel]
        return EncodedAllReduce(self.encoders["pieces"], self.encoders["sums"], values, flags)

    @property
    def row_bytes(self) -> int:
        """Bytes for each rank where gradients are exchanged; what hooks send is known once they were called."""
        layout = self.plan.reduce
        if not self.plan.gradient_extended:
            return self.encoders["shard"].row_bytes + layout.num_flags
        return sum(self._extensions[i].row_bytes for i in layout.indices) + layout.num_flags

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

    def commit(self) -> None:
        """The step has ended: what codecs remember of it is final."""
        for encoder in self.encoders.values():
            encoder.commit()

    def roll_back(self) -> None:
        """The step has failed: codecs remember what they did before it."""
        for encoder in self.encoders.values():
            encoder.roll_back()

    def drop_partial(self) -> None:
        """Forgets what :meth:`keep_partial` kept."""
        self._partial = None

    def call_hook(self, scatter: Scatter, hook: Callable[[torch.Tensor], None]) -> None:
        """Calls ``hook`` with this rank's shards of the reduced gradients, flat and without what lies between them.

        Gradients that no rank here has are zeros. What the hook makes of them counts as a gradient unless it is zero:
        the hook may add those of ranks outside of the mesh.
        """
        pieces = [scatter.output[offset : offset + prod(shape)] for shape, _, offset in self._reduced_views]
        begin, end = self._gradient_span
        if end - begin == sum(map(torch.Tensor.numel, pieces)):
            hook(scatter.output[begin:end])
        else:
            flat = torch.cat(pieces)
            hook(flat)
            for piece, result in zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(result)
        absent = self._everyone - scatter.present
        scatter.present |= {k for k in absent if bool(pieces[k].any())}

    def finish(self, scatter: Scatter, reduction: Reduction) -> ReducedBucket:
        """Scales what arrived, casts it to the dtype of the gradients and brings it to where the shards rest."""
        present = self._present_anywhere(scatter)
        divide(scatter.output, reduction.post_divide)
        flat = scatter.output.to(self.plan.gradient_dtype)
        if flat.device != self._rest:
            host = torch.empty_like(flat, device=self._rest, pin_memory=self._pin_memory)
            flat = host.copy_(flat, non_blocking=True)
        members, begin = self._members, flat.storage_offset()  # an allocator may give a part of a storage
        views = [self._reduced_views[k] for k in present]
        shards = [flat.as_strided(shape, strides, begin + offset) for shape, strides, offset in views]
        return ReducedBucket([members[k] for k in present], shards)

    def _present_anywhere(self, scatter: Scatter) -> Sequence[int]:
        """Parameters that get a gradient: those that have one on any rank, or all where ranks may skip modules. Reads
        the flags, which the host must wait for, only if some have none here.
        """
        layout = self.plan.reduce
        if self.pgs.unequal_use or len(scatter.present) == len(self._everyone):
            return range(len(self._everyone))
        if not layout.num_flags:
            return sorted(scatter.present)
        flags = scatter.output[layout.flags_offset : layout.flags_offset + layout.num_flags]
        return sorted(scatter.present.union(flags.ne(0).nonzero().flatten().tolist()))

    def _wire_gradient(
        self, gradient: torch.Tensor | None, numel: int, reduction: Reduction, dtype: torch.dtype
    ) -> torch.Tensor:
        if gradient is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        flat = gradient.reshape(-1).to(dtype)
        return flat if reduction.pre_divide == 1.0 else flat / reduction.pre_divide


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one ``torch._chunk_cat`` takes them all."""
    return len(set(map(_dtype_of, tensors))) < 2 and all(map(torch.Tensor.is_contiguous, tensors))


def _contiguous_view(shape: tuple[int, ...], offset: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Arguments of ``as_strided`` for a tensor of ``shape`` that begins ``offset`` elements into another one."""
    return shape, contiguous_strides(shape), offset
