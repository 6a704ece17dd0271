"""Communication volume of a training step, by parameter group and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from composable_fsdp._core.gather import AnyBucket, WireBytes, all_gather_wire_bytes, reduce_scatter_wire_bytes
from composable_fsdp._core.hooks import root_of, states_of
from composable_fsdp._core.memory import group_by_key
from composable_fsdp._core.mesh import ProcessGroups
from composable_fsdp._core.state import FSDPState
from composable_fsdp._text import text_table
from composable_fsdp.policies import ReshardKind


@dataclass(frozen=True, slots=True)
class CommunicationRow:
    """The bytes that one parameter group sends in one direction in a training step, per rank.

    Attributes:
        group: the group's name in the model; ``"root"`` is the model's own.
        direction: ``"all-gather"``, ``"all-gather (smaller mesh)"``, ``"reduce-scatter"`` or ``"all-reduce"``.
        per_step: the number of such collectives in a step.
        bytes: the bytes that a rank sends to others in all of them, and receives.
        plain_bytes: the same without codecs and hooks.
    """

    group: str
    direction: str
    per_step: int
    bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class CommunicationReport:
    """The rows of :func:`communication_report`, printed as a table."""

    rows: tuple[CommunicationRow, ...]

    @property
    def bytes(self) -> int:
        """The total bytes that a rank sends in a step."""
        return sum(row.bytes for row in self.rows)

    @property
    def plain_bytes(self) -> int:
        """The same without codecs and hooks."""
        return sum(row.plain_bytes for row in self.rows)

    def __repr__(self) -> str:
        rows = [*self.rows, CommunicationRow("total", "", 0, self.bytes, self.plain_bytes)]
        cells = [
            (
                row.group,
                row.direction,
                str(row.per_step or ""),
                f"{row.bytes:,}",
                f"{row.plain_bytes:,}",
                f"{row.bytes / row.plain_bytes if row.plain_bytes else 1.0:.2f}",
            )
            for row in rows
        ]
        numbers = ("per step", "bytes", "plain bytes", "ratio")
        return text_table(("group", "direction", *numbers), cells, numbers)


def communication_report(model: nn.Module) -> CommunicationReport:
    """Compute the bytes that ``model`` sends in a training step of one forward and one backward.

    It is computed from the current parameter groups, without communication. All-gathers and reduce-scatters count once
    per rank other than the sender; all-reduces, also those in place of either, count twice, as ring algorithms send
    them. Tensors with hooks count from their first gather or reduction on. Groups that share a message count as if each
    had its own, with up to 16 bytes more padding on each rank. Not counted: gathers for modules that use another
    group's parameters, for activation checkpointing, for methods called outside of forward, and microbatches.

    Args:
        model: the outermost sharded module, or one that contains it.

    Raises:
        ConfigurationError: no module in it is sharded.
    """
    rows = (row for name, state in states_of(model) for row in _rows(name, state))
    return CommunicationReport(tuple(row for row in rows if row.plain_bytes))


def reshard_kind(state: FSDPState) -> ReshardKind:
    """Return what happens to unsharded parameters after forward."""
    kind = state.options.reshard.kind
    if kind is ReshardKind.AUTO:
        return ReshardKind.NEVER if root_of(state).root_state is state else ReshardKind.ALWAYS
    return kind


def _rows(name: str, state: FSDPState) -> Iterator[CommunicationRow]:
    kind, smaller, again = reshard_kind(state), state.options.reshard.mesh_size, state.options.unshard_in_backward

    def row(
        direction: str,
        times: int,
        wire_bytes: Callable[[Sequence[AnyBucket]], WireBytes],
        size_of: Callable[[ProcessGroups], int] = lambda pgs: pgs.axes.shard.size,
    ) -> CommunicationRow:
        groups = group_by_key([bucket.pgs for bucket in state.group.buckets], state.group.buckets)
        each = [(size_of(pgs), wire_bytes(buckets)) for pgs, buckets in groups]
        sent = sum(times * traffic.bytes * (size - 1) // size for size, traffic in each)
        plain = sum(times * traffic.plain_bytes * (size - 1) // size for size, traffic in each)
        return CommunicationRow(name, direction, times, sent, plain)

    yield row("all-gather", 2 if kind is ReshardKind.ALWAYS and again else 1, all_gather_wire_bytes)
    if kind is ReshardKind.SMALLER and again:
        from composable_fsdp.plugins.smaller_mesh import without_values

        def of_slices(buckets: Sequence[AnyBucket]) -> WireBytes:
            return all_gather_wire_bytes([without_values(bucket, smaller) for bucket in buckets])

        yield row("all-gather (smaller mesh)", 1, of_slices, lambda pgs: min(smaller, pgs.axes.shard.size))
    if state.group.plan.num_trainable:
        yield row("reduce-scatter", 1, reduce_scatter_wire_bytes)
        yield row("all-reduce", 1, all_reduce_wire_bytes, lambda pgs: pgs.replicate.size)


def all_reduce_wire_bytes(buckets: Sequence[AnyBucket]) -> WireBytes:
    """Return the bytes of the reduction over the replicate axis."""
    total = plain = 0
    for bucket in (bucket for bucket in buckets if bucket.plan.reduce.indices):
        numel, own = bucket.plan.reduce.output.numel, bucket.reducer.own
        own_bytes = None if own is None else own.all_reduce_bytes
        total += 2 * numel * bucket.plan.sum_dtype.itemsize if own_bytes is None else own_bytes
        plain += 2 * numel * bucket.plan.reduce_dtype.itemsize
    return WireBytes(total, plain)
