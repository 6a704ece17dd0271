"""The codecs of a parameter group."""

from __future__ import annotations

from dataclasses import dataclass

from composable_fsdp.codecs._encoder import GradientCodec
from composable_fsdp.codecs.error_feedback import without_feedback
from composable_fsdp.codecs.protocol import Codec, check_codec
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.policies import checks_keywords


@checks_keywords
@dataclass(frozen=True)
class CommunicationPolicy:
    """Codecs for the floating-point parameters of a group, and for their gradients.

    Nothing is sent over an axis of one rank, and so nothing is encoded.

    Args:
        all_gather: the codec of parameters, such as ``Int8()``; ``None`` sends them in the dtype of computation. Every
            rank computes with the decoded values, also of its own shard. The all-gather in backward from a smaller mesh
            (``reshard_after_forward=n``) is not encoded again.
        reduce_scatter: the codec of gradients over the shard axis, or ``ErrorFeedback`` of one. Each rank encodes a
            message for each other rank, and sums the messages that it receives in fp32, in the order of ranks; the
            policy's ``reduce_dtype`` has no effect then. ``None`` sends gradients in the reduce dtype.
        min_numel: parameters with fewer elements, such as norms and biases, are not encoded.

    Codecs decode to fp32: float64 parameters are rounded to that on the wire, and their gradients are summed in it.
    """

    all_gather: Codec | None = None
    reduce_scatter: GradientCodec | None = None
    min_numel: int = 4096

    def __post_init__(self) -> None:
        if type(self.min_numel) is not int or self.min_numel < 0:
            raise ConfigurationError(
                f"CommunicationPolicy(min_numel=...) is a number of elements, not {self.min_numel!r}."
            )
        # Parameters are sent anew each time, so no error piles up: they take no error feedback.
        for name, codec in (("all_gather", self.all_gather), ("reduce_scatter", without_feedback(self.reduce_scatter))):
            if codec is not None:
                check_codec(f"CommunicationPolicy({name}=...)", codec)
