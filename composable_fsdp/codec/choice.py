"""Which codecs a group uses."""

from __future__ import annotations

from dataclasses import dataclass

from composable_fsdp.codec.protocol import Codec
from composable_fsdp.errors import ConfigurationError

__all__ = ["CommunicationPolicy"]


@dataclass(frozen=True)
class CommunicationPolicy:
    """How the floating-point parameters of a group travel between ranks.

    Args:
        all_gather: the codec of the all-gather, such as ``Int8()``; ``None`` sends them in the dtype of computation.
            Every rank computes with what came out of the codec, its own shard included. Where the shard axis has one
            rank, nothing travels and nothing is encoded; nor is it on the way back from a smaller mesh
            (``reshard_after_forward=n``).
        min_numel: parameters with fewer elements, such as norms and biases, travel as they are.
    """

    all_gather: Codec | None = None
    min_numel: int = 4096

    def __post_init__(self) -> None:
        methods = ("payload_bytes", "encode", "decode")
        if self.all_gather is not None and not all(callable(getattr(self.all_gather, m, None)) for m in methods):
            raise ConfigurationError(
                f"CommunicationPolicy(all_gather=...) takes a codec, with methods {', '.join(methods)}, not "
                f"{self.all_gather!r}."
            )
