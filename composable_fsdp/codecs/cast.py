"""A codec that casts values to another float dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_fsdp.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Cast:
    """Values cast to ``dtype``: a 16-bit float, or fp32, which is exact. Values too large for fp16 become infinity.

    Unlike ``MixedPrecisionPolicy(param_dtype=...)``, received values are computed with in their original dtype. For
    gradients, ``Cast(torch.float32)`` fixes the order of summation to that of ranks, whatever the backend does.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigurationError(f"Cast takes torch.bfloat16, torch.float16 or torch.float32, not {self.dtype}.")

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        return numel * self.dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8."""
        num_rows, numel = rows.shape
        return rows.to(self.dtype).contiguous().view(-1).view(torch.uint8).view(num_rows, self.payload_bytes(numel))

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode a payload of :meth:`encode`, which may be strided along dim 0, into ``(num_rows, numel)`` fp32."""
        return payload.reshape(-1).view(self.dtype).view(payload.size(0), numel).float()
