"""The Walsh-Hadamard transform, which spreads large values of a block over the whole block."""

from __future__ import annotations

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = ["check_rotatable", "hadamard_"]


def check_rotatable(block: int) -> None:
    """Raise ``ConfigurationError`` unless ``block`` is a power of two, the sizes that have a transform."""
    if block & (block - 1):
        raise ConfigurationError(f"with rotate=True, a block must be a power of two, not {block!r}.")


def hadamard_(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each block of ``rows``, ``(num_rows, n * block)``, in place by the Hadamard matrix of ones and minus
    ones.

    Applied twice, it multiplies by ``block``. It is exact for integers as long as they stay below 2**24. It adds and
    subtracts two elements at a time, in an order that does not depend on the number of blocks, as that of a matrix
    product may: all ranks get the same bits.
    """
    blocks = rows.view(-1, block)
    half = 1
    while half < block:
        first, second = blocks.unflatten(1, (block // (2 * half), 2, half)).unbind(2)
        # Runs of two are slower than two long strides: on CPU, a third of the whole transform.
        pairs = zip(first.unbind(2), second.unbind(2), strict=True) if half == 2 else [(first, second)]
        for a, b in pairs:
            a.add_(b)
            torch.sub(a, b, alpha=2, out=b)  # (a + b) - 2 b, as the former a is overwritten
        half *= 2
    return rows
