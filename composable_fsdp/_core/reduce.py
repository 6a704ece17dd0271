"""The reduce-scatter of a bucket, and the reduction of the buckets of a group over all its axes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import repeat
from math import prod
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol, cast

import torch

from composable_fsdp._core.comm import Collective, Communicator, Transfer, WorkList
from composable_fsdp._core.group_plan import SMALL_BYTES, BucketPlan
from composable_fsdp._core.layout import Reduction, aligned_bytes, divide, pack_gradient, split_at
from composable_fsdp._core.memory import CommStream, CommStreams, Work, group_by_key
from composable_fsdp._core.mesh import ProcessGroups
from composable_fsdp._core.params import ShardedParameter, take_gradients

_dtype_of = attrgetter("dtype")


# Note: partial sums
#
# On a hybrid mesh (2 replicas of 4 shards) a gradient is summed twice: reduce-scatter over the 4 ranks that shard, then
# all-reduce of the shard over the 2 replicas. With gradient synchronization off for the replicate axis, the first sum
# is kept (``keep_partial_sum``), in the reduce dtype, and the next reduction adds it (``add_partial_sum``) between its
# two stages. So n microbatches cost n reduce-scatters and one all-reduce. A partial sum is no gradient yet: not in
# ``p.grad``. A communicator that averages has divided it by the size of the shard axis already, and fp16 is divided
# before each sum. The next reduction may divide otherwise, if the user has changed a setting: ``divisor`` tells.


@dataclass(slots=True)
class ReduceScatterBuffers:
    """The buffers of one bucket in a gradient reduction.

    ``transfers`` are reduce-scattered. ``message`` is summed by its receivers. The sum over the shard axis ends in
    ``output``. ``present`` are the parameters with a gradient on this rank. The sharded gradients get
    ``gradient_dtype``.
    """

    transfers: list[Transfer]
    output: torch.Tensor
    present: frozenset[int]
    gradient_dtype: torch.dtype
    message: Message | None = None
    added: ReduceScatterBuffers | None = None
    """An earlier reduction that is added to this one; kept alive as long as this is in flight."""
    shards: list[torch.Tensor] | None = None
    """The views of ``output`` that :meth:`BucketReducer.partial_sum_shards` returns, once made."""
    after_hook: torch.Tensor | None = None
    """For each parameter, on the device: if its gradient is not zero after the user's hook."""
    divisor: float = 1.0
    """The number by which the sum in ``output`` is divided."""


@dataclass(frozen=True, slots=True)
class ReducedBucket:
    """Parameters and this rank's shards of their reduced gradients.

    Without ``flags`` all get theirs. With them, those that are ``present``, and those whose flag is true: the host may
    read the flags once it has waited for the reduction.
    """

    parameters: list[ShardedParameter]
    gradients: list[torch.Tensor]
    present: frozenset[int]
    flags: torch.Tensor | None

    @property
    def may_come_later(self) -> bool:
        """True if flags must be read, which blocks the host, and no hook of the user on
        the accumulated gradients waits."""
        return self.flags is not None and not any(p.sharded._post_accumulate_grad_hooks for p in self.parameters)

    def select(self) -> ReducedBucket:
        """Return the parameters that get a gradient. Reads the flags."""
        flags = () if self.flags is None else self.flags.tolist()
        chosen = sorted(self.present.union(k for k, flag in enumerate(flags) if flag))
        parameters, gradients = [self.parameters[k] for k in chosen], [self.gradients[k] for k in chosen]
        return ReducedBucket(parameters, gradients, frozenset(range(len(chosen))), None)


class BucketReducer:
    """Reduces the gradients of one bucket.

    Args:
        device: where modules compute.
        rest: the device of the reduced gradients, which is that of the shards.
        pin_memory: True if reduced gradients are page-locked there.

    Attributes:
        own: the messages that the bucket's reduce kind makes; ``None``: the communicator reduces.
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
    ) -> None:
        self.parameters = parameters
        self.pgs = pgs
        self._shard = pgs.axes.shard
        self.device = device
        self.rest = rest
        self.pin_memory = pin_memory
        self.partial_sum: ReduceScatterBuffers | None = None
        """The sum of earlier reductions over the shard axis alone, in the reduce dtype."""
        self.own: OwnReduce | None = None
        self.update_plan(plan)

    def continue_from(self, former: BucketReducer) -> None:
        """Keep the state that the kind of ``former`` has, if it is of the same parameters."""
        if (self.plan.indices, self.plan.reduce_kind) == (former.plan.indices, former.plan.reduce_kind):
            self._make_own(former.own)

    def _make_own(self, former: OwnReduce | None) -> None:
        # A kind stays with a bucket: parameters of another kind are in another bucket.
        if self.plan.reduce_kind is not None:
            self.own = cast(ReduceKind, self.plan.reduce_kind).make(self, former)

    def update_plan(self, plan: BucketPlan) -> None:
        """Adopt the first plan, or one that differs only in which parameters are trainable."""
        self.plan = plan
        self._make_own(self.own)
        # The gradients of the bucket, and the shapes of their shards.
        layout, rank = plan.reduce, self._shard.rank
        self._all_indices = frozenset(range(len(layout.indices)))
        self._members = [self.parameters[i] for i in layout.indices]
        self._are_rows = [shards.concatenates and shards.layout.is_even for shards in layout.shards]
        """True for gradients that are the concatenation of all ranks' shards, without padding."""
        self._shapes = [shards.shard_shape(rank) for shards in layout.shards]
        """The shapes of this rank's shards of the gradients."""
        self._not_vectors = [(k, shape) for k, shape in enumerate(self._shapes) if len(shape) != 1]
        # Where shards are in the output, so that one split gives all of them.
        ends = [offset + prod(shape) for offset, shape in zip(layout.output.offsets, self._shapes, strict=True)]
        self._gradient_span = (min(layout.output.offsets, default=0), max(ends, default=0))
        """Bounds of the gradients in the output. It has no gaps if its length is the gradients' total size."""
        begins = [*layout.output.offsets, layout.flags_offset]
        ends.append(layout.flags_offset + layout.flags_width)
        self._widths, (*self._pieces, flags) = split_at(begins, ends, layout.output.numel)
        """The widths that split the output into gradients, flags and gaps, and which of the pieces each gradient is."""
        self._widths_on_host = [0 if piece == flags else width for piece, width in enumerate(self._widths)]
        """The same for the copy of an offloaded output, which has no flags."""

    def prepare(self, reduction: Reduction, *, were_summed: bool) -> ReduceScatterBuffers | None:
        """Take the gradients that autograd accumulated and build the messages; ``None`` if nothing is trainable.

        The message always holds every trainable parameter, zeros for those without a gradient, so its size is the same
        on every rank, whatever part of the model a rank used. Flags in it show all ranks which parameters any rank
        used.

        Args:
            reduction: the divisions and the operation.
            were_summed: any rank may have accumulated several microbatches, which must not be rounded to fewer bits.
        """
        layout, plan = self.plan.reduce, self.plan
        if not layout.indices:
            return None
        sum_dtype = plan.sum_dtype
        # Take the gradients from autograd.
        gradients = take_gradients(self._members, sum_dtype)
        present = self._all_indices
        if any(map(is_, gradients, repeat(None))):
            present = frozenset(k for k, gradient in enumerate(gradients) if gradient is not None)
        # Dtypes: of the result, and on the wire.
        gradient_dtype = plan.gradient_dtype
        if gradient_dtype is None:  # that of autograd's gradients, the widest if they have several
            dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
            gradient_dtype = reduce(torch.promote_types, dtypes or [sum_dtype])
        wire_dtype = sum_dtype if were_summed else plan.wire_dtype
        # A codec makes its own message.
        if self.own is not None:
            output = torch.empty(layout.output.numel, dtype=sum_dtype, device=self.device)
            # Fill the alignment gap too: an all-reduce over the replicate axis reads it.
            self._flag(output[layout.flags_offset : layout.packed_numel].unsqueeze(0), present)
            buffers = ReduceScatterBuffers([], output, present, gradient_dtype)
            buffers.message = self.own.message(self, gradients, buffers)
            return buffers
        # Small gradients in one packed message, large ones from where they are.
        message = self._packed_message(gradients, present, reduction, wire_dtype)
        output = self.pgs.scatter.allocate(layout.output.numel, sum_dtype, self.device)
        divisor = reduction.divisor_after(self._shard.size)
        buffers = ReduceScatterBuffers([], output, present, gradient_dtype, divisor=divisor)
        for k in layout.zero_copy:
            start, shards, gradient = layout.output.offsets[k], layout.shards[k], gradients[k]
            if gradient is None:
                gradient = torch.zeros(shards.numel, dtype=wire_dtype, device=self.device)
            full = gradient.reshape(-1).to(wire_dtype)
            if reduction.pre_divide != 1.0:
                full = full / reduction.pre_divide
            buffers.transfers.append(Transfer(output[start : start + shards.padded_numel], full))
        if message is not None:
            buffers.transfers.append(Transfer(output[: layout.packed_numel], message))
        return buffers

    def _packed_message(
        self, gradients: list[torch.Tensor | None], present: frozenset[int], reduction: Reduction, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the packed gradients and flags, one row per rank, or ``None`` if nothing is packed.

        Releases these gradients, so that they do not add to the memory of the output.
        """
        layout, num_shards = self.plan.reduce, self._shard.size
        if not layout.packed_numel:
            return None
        message = self.pgs.scatter.allocate(num_shards * layout.packed_numel, dtype, self.device)
        self._fill(gradients, present, message.view(num_shards, layout.packed_numel))
        if len(layout.packed) == len(gradients):
            gradients.clear()
        for k in layout.packed if gradients else ():
            gradients[k] = None
        return divide(message, reduction.pre_divide)

    def _fill(self, gradients: Sequence[torch.Tensor | None], present: frozenset[int], rows: torch.Tensor) -> None:
        """Copy packed gradients and flags into ``rows``, one per rank."""
        layout = self.plan.reduce
        is_complete = present is self._all_indices
        packed: list[Any] = list(map(gradients.__getitem__, layout.packed)) if is_complete else []
        dtype = packed[0].dtype if packed else rows.dtype
        # Where the fused operation is composed of others, a cast of all and the padding of one are further copies.
        copied = layout.most_uneven if dtype == rows.dtype else rows.numel()
        fuses_copies = self.pgs.device.has_streams
        is_fast = fuses_copies or copied * rows.itemsize <= SMALL_BYTES
        if layout.in_chunks and is_complete and is_fast and _are_alike(packed):
            num_shards = self._shard.size
            if layout.gaps:  # To fill the whole message with zeros first would write most of it twice.
                zeros = {
                    gap: packed[0].new_zeros(num_shards * gap) for gap in dict.fromkeys(dict(layout.gaps).values())
                }
                for number, gap in layout.gaps:
                    packed.insert(number, zeros[gap])
            if layout.flags_width:
                packed.append(torch.ones(num_shards * layout.flags_width, dtype=dtype, device=self.device))
            if dtype == rows.dtype or fuses_copies:
                torch._chunk_cat(packed, 0, num_shards, out=rows)
            else:  # one cast of all takes a fifth of the time of one for each
                rows.copy_(torch._chunk_cat(packed, 0, num_shards))
            return
        if layout.gaps or layout.most_uneven:
            rows.zero_()
        self._pack(gradients, rows)
        self._flag(rows[:, layout.gradient_numel :], present)

    def flags_of(self, buffers: ReduceScatterBuffers) -> torch.Tensor:
        """Return the flags in the output of ``buffers``, as a view."""
        layout = self.plan.reduce
        return buffers.output[layout.flags_offset : layout.flags_offset + layout.num_flags]

    def packed_rows(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        """Return ``(num_shards, gradient_numel)``, each rank's shards of ``gradients``, and release these.

        Not to be called on a communication stream, which might still read when backward's stream reuses their memory.
        """
        layout = self.plan.reduce
        make = torch.zeros if layout.gaps or layout.most_uneven else torch.empty
        message = make(self._shard.size, layout.gradient_numel, dtype=self.plan.sum_dtype, device=self.device)
        self._pack(gradients, message)
        gradients.clear()
        return message

    def _pack(self, gradients: Sequence[torch.Tensor | None], message: torch.Tensor) -> None:
        """Copy packed gradients into their columns of ``message``, one row per rank, and cast them."""
        layout = self.plan.reduce
        columns, sources = [], []
        # One column of the message for each gradient.
        widths = layout.packed_widths[: len(layout.packed)]
        blocks = message[:, : layout.gradient_numel].split_with_sizes(widths, dim=1)
        for k, column in zip(layout.packed, blocks, strict=True):
            shards, gradient = layout.shards[k], gradients[k]
            if column.size(1) != shards.padded_numel:
                column = column[:, : shards.padded_numel]
            if gradient is not None and self._are_rows[k] and gradient.is_contiguous():
                columns.append(column)
                sources.append(gradient.view(column.shape))
            else:
                pack_gradient(shards, gradient, column)
        if columns:
            torch._foreach_copy_(columns, sources)

    def _flag(self, flags: torch.Tensor, present: frozenset[int]) -> None:
        """Fill ``(any, num_flags or more)`` with ones, and with zeros for parameters without a gradient.

        Does nothing if this message has no flags.
        """
        if flags.size(1):
            flags.fill_(1)
            for k in self._all_indices - present:
                flags[:, k].zero_()

    def add_partial_sum(self, buffers: ReduceScatterBuffers) -> None:
        """Add the result of earlier partial reductions to one that is reduced over the shard axis."""
        kept, self.partial_sum = self.partial_sum, None
        if kept is not None:
            buffers.output.add_(kept.output, alpha=kept.divisor / buffers.divisor)
            buffers.present |= kept.present
            buffers.added = kept

    def keep_partial_sum(self, buffers: ReduceScatterBuffers) -> None:
        """Keep the sum over the shard axis for a later reduction."""
        # Note: partial sums
        self.add_partial_sum(buffers)
        self.partial_sum = replace(buffers, transfers=[], message=None, added=None)

    def partial_sum_shards(self) -> dict[ShardedParameter, torch.Tensor]:
        """Return this rank's shards of the sum of :meth:`keep_partial_sum`, as views of it."""
        if self.partial_sum is None:
            return {}
        shards = self.partial_sum.shards
        if shards is None:
            parts = self.partial_sum.output.split_with_sizes(self._widths)
            shards = self.partial_sum.shards = [parts[piece] for piece in self._pieces]
            for k, shape in self._not_vectors:
                shards[k] = shards[k].view(shape)
        found = ReducedBucket(self._members, shards, *self._presence(self.partial_sum)).select()
        return dict(zip(found.parameters, found.gradients, strict=True))

    def drop_from_partial_sum(self, parameters: Sequence[ShardedParameter]) -> None:
        """Let ``parameters``, whose shards are zero, not count as gradients in the sum of :meth:`keep_partial_sum`."""
        if self.partial_sum is not None:
            layout, dropped = self.plan.reduce, {k for k, each in enumerate(self._members) if each in parameters}
            self.partial_sum.present -= dropped
            if layout.num_flags:
                for k in dropped:
                    self.partial_sum.output[layout.flags_offset + k] = 0

    def call_hook(self, buffers: ReduceScatterBuffers, hook: Callable[[torch.Tensor], None]) -> None:
        """Call ``hook`` with this rank's shards of the reduced gradients, in one flat tensor without gaps.

        Gradients that no rank of the mesh has are zeros. If the hook makes them nonzero they count as gradients: it may
        add those of ranks outside of the mesh.
        """
        parts = buffers.output.split_with_sizes(self._widths)
        pieces = [parts[i] for i in self._pieces]
        begin, end = self._gradient_span
        if end - begin == sum(map(torch.Tensor.numel, pieces)):
            hook(buffers.output[begin:end])
        else:
            flat = torch.cat(pieces)
            hook(flat)
            for piece, result in zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(result)
        if len(buffers.present) < len(pieces):
            buffers.after_hook = torch.stack([piece.any() for piece in pieces])

    def finish(self, buffers: ReduceScatterBuffers, reduction: Reduction) -> ReducedBucket:
        """Divide the result, cast it to the dtype of the gradients and copy it to the device of the shards.

        The host does not wait: it launches the next operations while this reduction runs.
        """
        # Which parameters get a gradient.
        present, flags = self._presence(buffers)
        if flags is not None and self.pgs.device.has_streams:
            flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
        # Divide, cast, and move to where the shards rest.
        divide(buffers.output, reduction.post_divide)
        flat, widths = buffers.output.to(buffers.gradient_dtype), self._widths
        if flat.device != self.rest:  # without flags, with which page-locked memory could be twice as large
            layout, widths = self.plan.reduce, self._widths_on_host
            host = torch.empty(layout.sharded_numel, dtype=flat.dtype, device=self.rest, pin_memory=self.pin_memory)
            begin, end = layout.flags_offset, layout.flags_offset + layout.flags_width
            for part, source in zip(host.tensor_split([begin]), (flat[:begin], flat[end:]), strict=True):
                part.copy_(source, non_blocking=True)
            flat = host
        # As strided views, vectors take three times as long. Nothing else uses ``flat`` or its version counter.
        parts = torch.unsafe_split_with_sizes(flat, widths)
        shards = list(map(parts.__getitem__, self._pieces))
        for k, shape in self._not_vectors:
            shards[k] = shards[k].view(shape)
        reduced = ReducedBucket(self._members, shards, present, flags)
        return reduced.select() if flags is None and len(present) < len(shards) else reduced

    def _presence(self, buffers: ReduceScatterBuffers) -> tuple[frozenset[int], torch.Tensor | None]:
        """Return the parameters that get a gradient in any case, and flags on the device for the others.

        These get one if any rank has one, or if the user's hook made theirs nonzero. All get one if ranks may skip
        modules. There are no flags where all get one, or if the message has none.
        """
        layout = self.plan.reduce
        if self.pgs.reduces_unused or len(buffers.present) == len(self._all_indices):
            return self._all_indices, None
        flags = buffers.after_hook
        if layout.num_flags:
            sent = self.flags_of(buffers).ne(0)
            flags = sent if flags is None else flags | sent
        return buffers.present, flags


class Message(Protocol):
    """A message of one bucket, which receivers sum. Those of all buckets over an axis are sent in one all-to-all."""

    @property
    def row_bytes(self) -> int:
        """The number of bytes for each rank, the same on all ranks."""

    def write(self, rows: torch.Tensor) -> None:
        """Write ``rows``, ``(num_ranks, row_bytes)`` uint8, contiguous along the last dim only."""

    def read(self, rows: torch.Tensor) -> None:
        """Sum the received ``rows``, of the same form."""


class OwnReduce(Protocol):
    """The messages of one bucket whose gradients a kind sums. They are in fp32 and packed, with flags behind them."""

    @property
    def row_bytes(self) -> int:
        """The bytes sent to each rank of the shard axis."""

    @property
    def remembers(self) -> bool:
        """True if one step depends on values of earlier ones."""

    def message(
        self, bucket: BucketReducer, gradients: list[torch.Tensor | None], buffers: ReduceScatterBuffers
    ) -> Message:
        """Return the message over the shard axis. Reading it writes sums and flags to the output of ``buffers``."""


class ReduceKind(Hashable, Protocol):
    """A way to reduce gradients other than by the communicator. Buckets have parameters of equal kinds."""

    def claim(self, parameters: Sequence[ShardedParameter]) -> Mapping[ShardedParameter, ReduceKind]:
        """Return the kinds of those among ``parameters``, of one group, that it takes."""

    def make(self, bucket: BucketReducer, former: Any) -> OwnReduce:
        """Return the messages of ``bucket``. ``former`` made those of the same parameters before, if there were any."""


REDUCE_KINDS: list[ReduceKind] = []
"""Asked in this order: the first that takes a gradient has it. The communicator reduces those that none takes."""


def reduce_kinds_of(parameters: Sequence[ShardedParameter]) -> dict[ShardedParameter, ReduceKind]:
    """Return the kinds of those among ``parameters``, of one group, that have one."""
    claimed: dict[ShardedParameter, ReduceKind] = {}
    for kind in REDUCE_KINDS:
        claimed = {**kind.claim(parameters), **claimed}
    return claimed


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if one ``torch._chunk_cat`` takes all ``tensors``."""
    return len(set(map(_dtype_of, tensors))) < 2 and all(map(torch.Tensor.is_contiguous, tensors))


class ReductionSettings(NamedTuple):
    """The settings of a group's reductions."""

    divide_factor: float | None = None
    """The divisor of the sum; ``None``: the number of data-parallel ranks."""
    sum_only: bool = False
    """Communicators only sum; divisions are operations of their own."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    """Called with this rank's shards of the reduced gradients."""


class BucketReduction(NamedTuple):
    """One bucket of a reduction.

    ``hook`` is called with the reduced gradients: before their division by ``reduction.post_divide``, or after it if
    ``divides_first``.
    """

    bucket: BucketReducer
    reduction: Reduction
    buffers: ReduceScatterBuffers
    hook: Callable[[torch.Tensor], None] | None
    divides_first: bool


class Stage(NamedTuple):
    """Collectives on one stream, and what follows them. The next stage begins when they are done."""

    stream: CommStream
    launch: Callable[[], Work]
    finish: Callable[[], Any]


def stages_of(
    streams: CommStreams, reductions: Sequence[BucketReduction], device: torch.device, name: str, *, is_partial: bool
) -> list[Stage]:
    """Return the stages of a reduction over the shard axis, then over the replicate axis.

    ``reductions`` and ``name`` are the same on every rank. The last stage returns the sharded gradients. A partial
    reduction is over the shard axis only: the buckets keep its sums for a later one, and its result is empty.
    """
    steps = _HybridReduce(reductions, device, name)
    # Over the shard axis alone.
    if is_partial:
        return [Stage(streams.reduce, steps.reduce_scatter, steps.keep_partial_sum)]
    if all(each.bucket.pgs.axes.replicate.size == 1 for each in reductions):
        return [Stage(streams.reduce, steps.reduce_scatter, steps.finish_unreplicated)]
    # Then over the replicate axis.
    first = Stage(streams.reduce, steps.reduce_scatter, steps.finish_exchanges)
    return [first, Stage(streams.replicate, steps.all_reduce, steps.finish)]


class _HybridReduce:
    """The collectives of a reduction and the work after each of them.

    In this order: ``reduce_scatter``, then ``all_reduce`` if there is a replicate axis. After each, one of the methods
    that use its result.
    """

    def __init__(self, reductions: Sequence[BucketReduction], device: torch.device, name: str) -> None:
        self._reductions = reductions
        self._name = name
        messages = [(r.bucket.pgs.exchange, r.buffers.message) for r in reductions if r.buffers.message is not None]
        by_communicator = group_by_key(*zip(*messages, strict=True)) if messages else ()
        self._exchanges = [Exchange(members, communicator, device) for communicator, members in by_communicator]

    def reduce_scatter(self) -> Work:
        label = f"reduce-scatter of {self._name}"
        works: list[Work] = []
        # One collective for each communicator and operation, usually one in all.
        keys = [(each.bucket.pgs.scatter, each.reduction.op) for each in self._reductions]
        for (communicator, op), reductions in group_by_key(keys, self._reductions):
            transfers = [transfer for each in reductions for transfer in each.buffers.transfers]
            if transfers:
                works.append(communicator.launch(Collective.REDUCE_SCATTER, transfers, label, op))
        works += [exchange.launch(label) for exchange in self._exchanges]
        return works[0] if len(works) == 1 else WorkList(tuple(works))

    def finish_exchanges(self) -> None:
        """Sum what was received. The messages stay alive."""
        for exchange in self._exchanges:
            exchange.finish()

    def keep_partial_sum(self) -> list[ReducedBucket]:
        self.finish_exchanges()
        for bucket, _, buffers, *_ in self._reductions:
            bucket.keep_partial_sum(buffers)
        return []

    def all_reduce(self) -> Work:
        works: list[Work] = []
        label = f"all-reduce of {self._name}"
        for bucket, reduction, buffers, *_ in self._reductions:
            bucket.add_partial_sum(buffers)  # here, so that replicas sum it too
            transfers = [Transfer(buffers.output, buffers.output)]
            works.append(bucket.pgs.replicate.launch(Collective.ALL_REDUCE, transfers, label, reduction.op))
        return WorkList(tuple(works))

    def finish_unreplicated(self) -> list[ReducedBucket]:
        self.finish_exchanges()
        for bucket, _, buffers, *_ in self._reductions:
            bucket.add_partial_sum(buffers)
        return self.finish()

    def finish(self) -> list[ReducedBucket]:
        """Return the gradients. Partial sums are in them: one that is kept now is of a later backward."""
        reduced = []
        for bucket, reduction, buffers, hook, divides_first in self._reductions:
            if hook is not None:
                if divides_first:
                    divide(buffers.output, reduction.post_divide)
                    reduction = replace(reduction, post_divide=1.0)
                bucket.call_hook(buffers, hook)
            reduced.append(bucket.finish(buffers, reduction))
        return reduced


class Exchange:
    """A reduce-scatter of messages by one all-to-all, written on construction. They are columns, with a row per rank.

    It keeps the sent message alive, whose memory may come from another stream.
    """

    def __init__(self, messages: Sequence[Message], communicator: Communicator, device: torch.device) -> None:
        self._messages = messages
        self._communicator = communicator
        self._columns: list[slice] = []
        end = 0
        for message in messages:
            self._columns.append(slice(end, end + message.row_bytes))
            end += aligned_bytes(message.row_bytes)
        self._shape = (communicator.size, end)
        self._sent = communicator.allocate(communicator.size * end, torch.uint8, device)
        self._received: torch.Tensor | None = None
        for message, columns in zip(messages, self._columns, strict=True):
            message.write(self._sent.view(self._shape)[:, columns])

    def launch(self, label: str) -> Work:
        self._received = self._communicator.allocate(self._sent.numel(), torch.uint8, self._sent.device)
        return self._communicator.launch(Collective.ALL_TO_ALL, [Transfer(self._received, self._sent)], label)

    def finish(self) -> None:
        received, self._received = self._received, None
        if received is None:
            return
        for message, columns in zip(self._messages, self._columns, strict=True):
            message.read(received.view(self._shape)[:, columns])
