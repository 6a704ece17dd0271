"""The check that a rank runs its modules in the order of its first iteration.

``_consistency/order_check.py`` compares the order across ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist

__all__ = ["ExecutionOrderWarning", "ForwardOrder"]


class ExecutionOrderWarning(UserWarning):
    """This rank's forward went through its modules in another order than in the first iteration."""


class ForwardOrder:
    """The order in which groups ended their first forward that led to a backward. Final."""

    def __init__(self) -> None:
        self._first: tuple[str, ...] = ()
        self._told = False

    def compare(self, order: Sequence[str]) -> None:
        """``order`` is that of a forward that has come to its end.

        Warns:
            ExecutionOrderWarning: it is another one than the first time. Only once: then it is known to change.
        """
        if self._told or not order:
            return
        if not self._first:
            self._first = tuple(order)
            return
        if self._first == tuple(order):
            return
        self._told = True
        rank = dist.get_rank() if dist.is_initialized() else 0
        pairs = enumerate(zip_longest(self._first, order, fillvalue="the end of forward"))
        place, (then, now) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {rank}: number {place + 1} was "
            f"{then} and is {now} now. What was gathered ahead was not what came next, which costs time in each "
            "iteration whose order is new. If ranks do not change it alike, they are told so by an error. "
            'model.set_order_check("off") silences this.',
            ExecutionOrderWarning,
            stacklevel=2,
        )
