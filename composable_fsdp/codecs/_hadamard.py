"""The Walsh-Hadamard transform, which spreads what is large in a block over all of it."""

from __future__ import annotations

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = ["check_rotatable", "hadamard_"]


def check_rotatable(block: int) -> None:
    """Raises ``ConfigurationError`` unless there is a transform of ``block`` elements."""
    if block & (block - 1):
        raise ConfigurationError(f"with rotate=True, a block must be a power of two, not {block!r}.")


def hadamard_(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Multiplies each block of ``rows``, ``(num_rows, n * block)``, by the Hadamard matrix of ones and minus ones.

    In place. Twice is ``block`` times what it was; of integers, it is exact as long as they stay below 2**24. Sums and
    differences of two elements at a time, in an order that does not depend on how many blocks there are, as that of a
    matrix product may: all ranks get the same bits.
    """
    blocks = rows.view(-1, block)
    half = 1
    while half < block:
        first, second = blocks.unflatten(1, (block // (2 * half), 2, half)).unbind(2)
        # Runs of two are slower than one long stride for each of the two: on CPU, a third of the whole transform.
        pairs = zip(first.unbind(2), second.unbind(2), strict=True) if half == 2 else [(first, second)]
        for a, b in pairs:
            a.add_(b)
            torch.sub(a, b, alpha=2, out=b)  # (a + b) - 2 b, for want of the former a
        half *= 2
    return rows
