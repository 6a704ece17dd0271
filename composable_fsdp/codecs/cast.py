"""Values in another float dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = ["Cast"]


@dataclass(frozen=True, slots=True)
class Cast:
    """Travels as ``dtype``: a 16-bit float, or fp32, which is exact. What does not fit fp16 comes out as infinity.

    Other than with ``MixedPrecisionPolicy(param_dtype=...)``, what arrives is computed with in its original dtype. For
    gradients, ``Cast(torch.float32)`` fixes the order of addition, that of ranks, whatever the backend does.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigurationError(f"Cast takes torch.bfloat16, torch.float16 or torch.float32, not {self.dtype}.")

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        return numel * self.dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8."""
        num_rows, numel = rows.shape
        return rows.to(self.dtype).contiguous().view(-1).view(torch.uint8).view(num_rows, self.payload_bytes(numel))

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` fp32 of what :meth:`encode` made, which may be strided along dim 0."""
        return payload.reshape(-1).view(self.dtype).view(payload.size(0), numel).float()
