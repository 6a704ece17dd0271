"""Page-locked host memory, of which torch's allocator rounds every size up to a power of two.

A flat tensor of 1.125 GiB takes 2 GiB. So the parameters of a bucket in page-locked memory are cut into several buckets
where that wastes less. They share the messages of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf

__all__ = ["MOST_WASTE", "cut_pinned", "pinned_bytes"]

MOST_WASTE = 0.1
"""The part of the memory in use that rounding may add, if any cut makes that possible."""

_UNCUT_BYTES = 1 << 20
"""Less than this is not cut: the copies of each part would cost more than the memory is worth."""


def pinned_bytes(nbytes: int) -> int:
    """Return the page-locked memory that an allocation of ``nbytes`` takes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@lru_cache(maxsize=1024)
def cut_pinned(sizes: Sequence[tuple[int, ...]]) -> list[range]:
    """Cut parameters into the fewest runs whose allocations waste at most :data:`MOST_WASTE`, or else the least.

    Args:
        sizes: the bytes of each parameter in each of several allocations that a run makes: one for its shards, one for
            its gradients.
    """
    columns = [(0, *accumulate(column)) for column in zip(*sizes, strict=True)]
    count, total = len(sizes), sum(ends[-1] for ends in columns)
    if total < _UNCUT_BYTES or sum(pinned_bytes(ends[-1]) for ends in columns) <= (1 + MOST_WASTE) * total:
        return [range(count)]
    taken = [
        [sum(pinned_bytes(ends[end] - ends[begin]) for ends in columns) for begin in range(end)]
        for end in range(count + 1)
    ]
    least = [0.0] * (count + 1)
    for end in range(1, count + 1):
        least[end] = min(least[begin] + taken[end][begin] for begin in range(end))
    enough = max((1 + MOST_WASTE) * total, least[count])
    costs, begins = [0.0, *[inf] * count], list[list[int]]()  # of the first parameters in one more run each time
    while costs[count] > enough:
        begins.append([min(range(end), key=lambda b: costs[b] + taken[end][b], default=0) for end in range(count + 1)])
        costs = [inf, *(costs[begins[-1][end]] + taken[end][begins[-1][end]] for end in range(1, count + 1))]
    runs, end = list[range](), count
    for begin_of in reversed(begins):
        runs.append(range(begin_of[end], end))
        end = begin_of[end]
    return runs[::-1]
