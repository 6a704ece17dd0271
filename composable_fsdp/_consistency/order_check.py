"""That all ranks are about to do the same, before any of them does it.

A collective that ranks enter with other sizes kills the process in gloo, and one with other tensors of the same size
mixes them. To compare before each would cost as much as the collective. So ranks remember which operation they agreed
to do after which few: what follows as it did before is done without asking, anything else is compared first.

Invariant: all ranks have agreed on the same operations in the same order, so they remember the same successors. If one
goes on without asking, every other one that goes on without asking does the same; a rank that does something else asks,
is not answered, and neither gets further. Who waits finds out by calling the roll (``_consistency/watchdog.py``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from zlib import crc32

from composable_fsdp._consistency.rank_report import order_text
from composable_fsdp.errors import ConfigurationError, DivergenceError

__all__ = ["CONTEXT", "LEVEL_VARIABLE", "OrderCheck", "OrderChecker", "order_check_from"]

LEVEL_VARIABLE = "COMPOSABLE_FSDP_ORDER_CHECK"

CONTEXT = 8
"""Operations that tell what is next. The last one alone does not: gradients of a group are reduced in several messages
that are called the same, and what comes after the last of them is something else.
"""
_MOST_REMEMBERED = 1 << 14
"""Contexts; a program whose order is always new would otherwise remember more and more."""


class OrderCheck(Enum):
    """How much ranks compare."""

    OFF = "off"
    """Nothing."""
    FIRST = "first"
    """What has not followed the operation before it until now: the first iteration, and what changes later."""
    ALWAYS = "always"
    """Every operation."""


def order_check_from(value: str | None = None) -> OrderCheck:
    """``value``, or what the environment says, or ``FIRST``.

    Raises:
        ConfigurationError: there is no such level.
    """
    found = value if value is not None else os.environ.get(LEVEL_VARIABLE) or OrderCheck.FIRST.value
    try:
        return OrderCheck(found)
    except ValueError:
        levels = ", ".join(repr(level.value) for level in OrderCheck)
        raise ConfigurationError(f"the order check is one of {levels}, not {found!r}.") from None


class OrderChecker:
    """What the ranks of one process group have agreed to do after what. Final.

    Args:
        exchange: takes this rank's number, gives those of all ranks, in their order. Fixed in size whatever comes.
        tell: takes this rank's text, gives those of all ranks; called by all of them when their numbers differ.
        level: how much is compared.
    """

    def __init__(
        self,
        exchange: Callable[[int], Sequence[int]],
        tell: Callable[[str], Mapping[int, str]],
        level: OrderCheck,
    ) -> None:
        self._exchange, self._tell, self.level = exchange, tell, level
        self._successors: dict[tuple[str, ...], str] = {}
        self._before: deque[str] = deque(maxlen=CONTEXT)
        self.number = 0
        """Operations begun so far."""
        self.compared = 0
        """How many of them were compared with those of the other ranks, which takes a message."""

    def begin(self, operation: str) -> None:
        """``operation`` is next; it says what travels, sizes included.

        Raises:
            DivergenceError: another rank is about to do something else.
        """
        self.number += 1
        before = tuple(self._before)
        known = self.level is OrderCheck.OFF or self._successors.get(before) == operation
        if not known or self.level is OrderCheck.ALWAYS:
            self.compared += 1
            own = crc32(operation.encode())
            if any(other != own for other in self._exchange(own)):
                raise DivergenceError(order_text(self._tell(operation)))
            if len(self._successors) >= _MOST_REMEMBERED:
                self._successors.clear()
            self._successors[before] = operation
        self._before.append(operation)
