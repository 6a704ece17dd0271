"""Which rank computes which matrix, and which matrices are exchanged together. Numbers only.

The update of a matrix, such as an orthogonalisation, needs the whole matrix, so each matrix has one *owner*: the rank
that computes its update. Owners are balanced by cost over all matrices, and a *bucket* is a set of matrices that one
pair of all-to-alls exchanges.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def newton_schulz_cost(rows: int, columns: int) -> float:
    """Return the multiplications and additions of one Newton-Schulz iteration of a matrix of this shape.

    With k the smaller side and n the larger one: k x n by n x k for the Gram matrix, k x k by k x k for its square, and
    k x k by k x n for the product (Jordan et al. 2024, Muon). The number of iterations is the same for all matrices.
    """
    short, long = min(rows, columns), max(rows, columns)
    return 4.0 * short * short * long + 2.0 * short**3


def by_cost(costs: Sequence[float]) -> list[int]:
    """Return the indices of ``costs`` from the largest to the smallest, equal ones in their order."""
    return sorted(range(len(costs)), key=lambda index: -costs[index])


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each matrix, from 0 to ``ranks - 1``, so that the largest sum of costs is small.

    The most expensive matrix that is left goes to the rank with the least (Graham 1969): the largest sum is at most 4/3
    of the smallest possible one, and close to it if ranks own several matrices each. No rank owns less than the others
    without need, but a matrix is never divided: with fewer matrices than ranks, some ranks own nothing.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in by_cost(costs):
        load, owner = loads[0]
        owners[index] = owner
        heapq.heapreplace(loads, (load + costs[index], owner))
    return owners


def message_limit(bucket_bytes: int, largest: int) -> int:
    """Return the most bytes of the matrices in a message of a rank.

    Six messages live at once: those that a bucket is computed from and to, and two each of its neighbours. Two buckets
    hold them. The limit is at least ``largest``, the bytes of the largest matrix: with less, each of the largest ones
    would be a bucket of its own, and one rank would compute it while all others wait.
    """
    return max(bucket_bytes // 3, largest)


def cut_buckets(costs: Sequence[float], owners: Sequence[int], owned: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of the matrices of each bucket, the most expensive ones first.

    Matrices are taken in the order of :func:`assign_owners`, in which consecutive ones have different owners, so that
    the work in a bucket is balanced too. Shards are equal but for rounding, so ranks hold about as much as they own.

    Args:
        costs: the cost of each matrix.
        owners: its owner.
        owned: bytes of the message with the matrix that its owner sends.
        limit: the most bytes that a rank owns in a bucket of several matrices.
    """
    buckets: list[list[int]] = [[]]
    of_owner: dict[int, int] = {}
    for index in by_cost(costs):
        if of_owner.get(owners[index], 0) + owned[index] > limit and buckets[-1]:
            buckets.append([])
            of_owner = {}
        buckets[-1].append(index)
        of_owner[owners[index]] = of_owner.get(owners[index], 0) + owned[index]
    return buckets
