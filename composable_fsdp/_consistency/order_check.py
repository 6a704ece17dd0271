"""Check that all ranks are about to run the same operation, before any of them does.

A collective with different sizes on different ranks kills the process in gloo; one with different tensors of the same
size mixes them up. A comparison before each collective would cost as much as the collective. Therefore ranks remember
which operation follows each short sequence of operations. An operation that follows as it did before runs without a
comparison; any other is compared first.

Invariant: all ranks have agreed on the same operations in the same order, so they remember the same successors, and all
ranks that run an operation without a comparison run the same one. A rank that deviates waits for a comparison that the
others do not join, so no rank proceeds, and the watchdog of each waiting rank finds the cause.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from zlib import crc32

from composable_fsdp._consistency.rank_report import order_text
from composable_fsdp.errors import ConfigurationError, DivergenceError

LEVEL_VARIABLE = "COMPOSABLE_FSDP_ORDER_CHECK"

CONTEXT = 8
"""The number of operations that determine the next one. The last one alone does not: a group's gradients are reduced by
several operations of the same label, and the last of them is followed by another operation.
"""
_MAX_CONTEXTS = 1 << 14
"""The number of contexts to remember, which bounds memory if a program never repeats its order."""


class OrderCheck(Enum):
    """How much ranks compare."""

    OFF = "off"
    """No operations."""
    FIRST = "first"
    """Operations in a new order: the first iteration, and later changes."""
    ALWAYS = "always"
    """Every operation."""

    def __str__(self) -> str:
        return self.value


def order_check_from(value: str | None = None) -> OrderCheck:
    """Return the level ``value``, or else that of the environment variable, or else ``FIRST``.

    Raises:
        ConfigurationError: there is no such level.
    """
    found = value if value is not None else os.environ.get(LEVEL_VARIABLE) or OrderCheck.FIRST.value
    try:
        return OrderCheck(found)
    except ValueError:
        what = "the order check" if value is not None else f"the environment variable {LEVEL_VARIABLE}"
        raise ConfigurationError(f"{what} is one of 'off', 'first', 'always', not {found!r}.") from None


class OrderChecker:
    """The operations that the ranks of one process group have agreed on.

    Args:
        exchange: takes this rank's number and returns those of all ranks, in rank order.
        exchange_text: takes this rank's text and returns those of all ranks. All ranks call it if their numbers differ.
        level: how much is compared.
    """

    def __init__(
        self,
        exchange: Callable[[int], Sequence[int]],
        exchange_text: Callable[[str], Mapping[int, str]],
        level: OrderCheck,
    ) -> None:
        self._exchange, self._exchange_text, self.level = exchange, exchange_text, level
        self._successors: dict[tuple[str, ...], str] = {}
        self._context: deque[str] = deque(maxlen=CONTEXT)
        self.compared = 0
        """The number of operations that were compared, which takes a message each."""

    def begin(self, label: str, sizes: tuple[int, ...]) -> None:
        """Check that the operation ``label`` with tensors of ``sizes`` bytes is next on all ranks.

        Raises:
            DivergenceError: another rank is about to run a different operation.
        """
        operation = f"{label} ({sum(sizes)} bytes in {len(sizes)} tensors, {hash(sizes) & 0xFFFF:04x})"
        context = tuple(self._context)
        known = self.level is OrderCheck.OFF or self._successors.get(context) == operation
        if not known or self.level is OrderCheck.ALWAYS:
            self.compared += 1
            own = crc32(operation.encode())
            if any(other != own for other in self._exchange(own)):
                raise DivergenceError(order_text(self._exchange_text(operation)))
            if len(self._successors) >= _MAX_CONTEXTS:
                self._successors.clear()
            self._successors[context] = operation
        self._context.append(operation)
