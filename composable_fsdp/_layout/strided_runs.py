"""Runs of packed parameters that one strided copy moves to the unsharded buffer.

A layer often has several parameters of one shape in a row: scales and shifts, biases, adapters, experts. If they are
equally spaced both in a rank's row of the message and in the unsharded buffer, one strided copy moves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from composable_fsdp._layout.bucket_layout import GatherLayout

__all__ = ["PackedRun", "find_runs"]


@dataclass(frozen=True, slots=True)
class PackedRun:
    """A run of ``count`` parameters with ``padded_numel`` elements on each rank. Lengths and offsets are in elements.

    The k-th begins at ``start + k * width`` in each rank's row, and at ``place + k * step`` in the unsharded buffer.
    """

    start: int
    width: int
    place: int
    step: int
    padded_numel: int
    count: int = 1


def find_runs(layout: GatherLayout) -> tuple[PackedRun, ...]:
    """Group the packed parameters of ``layout`` into as few runs as possible, in order.

    The rows of each packed parameter must be its memory in order.
    """
    runs: list[PackedRun] = []
    start = 0
    for i, width in zip(layout.packed, layout.packed_widths, strict=True):
        shards, place = layout.shards[i], layout.places.offsets[i]
        last = runs[-1] if runs else None
        if last is not None and (last.width, last.padded_numel) == (width, shards.padded_numel):
            step = last.step if last.count > 1 else place - last.place
            if place == last.place + last.count * step:
                runs[-1] = PackedRun(last.start, width, last.place, step, last.padded_numel, last.count + 1)
                start += width
                continue
        runs.append(PackedRun(start, width, place, shards.full_numel, shards.padded_numel))
        start += width
    return tuple(runs)
