"""Which codecs a group uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composable_fsdp.codecs._encoder import GradientCodec
from composable_fsdp.codecs.cast import Cast
from composable_fsdp.codecs.error_feedback import ErrorFeedback, without_feedback
from composable_fsdp.codecs.protocol import Codec, check_codec, resolve_codec
from composable_fsdp.errors import ConfigurationError

__all__ = ["EXACT", "PLAIN", "CommunicationPolicy", "GradientCodecs"]


@dataclass(frozen=True)
class CommunicationPolicy:
    """How the floating-point parameters of a group, and their gradients, travel between ranks.

    Where an axis has one rank, nothing travels over it and nothing is encoded.

    Args:
        all_gather: the codec of parameters, such as ``Int8()``; ``None`` sends them in the dtype of computation. Every
            rank computes with what came out of the codec, its own shard included. On the way back from a smaller mesh
            (``reshard_after_forward=n``) nothing is encoded again.
        reduce_scatter: the codec of gradients over the shard axis, or ``ErrorFeedback`` of one. Each rank encodes what
            it has for each other one, and adds up what it gets in fp32, in the order of ranks; the policy's
            ``reduce_dtype`` does not matter then. ``None`` sends them in the reduce dtype.
        all_reduce: the same over the replicate axis of a hybrid mesh, where the sums of the shard axis travel twice:
            once to be added up, once as the total. Between hosts, and so often the coarser of both.
        min_numel: parameters with fewer elements, such as norms and biases, travel as they are.

    Codecs give fp32: float64 parameters keep no more than that on the way, and their gradients are added up in it.
    """

    all_gather: Codec | None = None
    reduce_scatter: GradientCodec | None = None
    all_reduce: GradientCodec | None = None
    min_numel: int = 4096

    def __post_init__(self) -> None:
        if type(self.min_numel) is not int or self.min_numel < 0:
            raise ConfigurationError(
                f"CommunicationPolicy(min_numel=...) is a number of elements, not {self.min_numel!r}."
            )
        if isinstance(self.all_gather, ErrorFeedback):
            raise ConfigurationError(
                "CommunicationPolicy(all_gather=ErrorFeedback(...)) makes no sense: parameters are sent anew each "
                "time, so no error piles up. Give the codec alone."
            )
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            codec = without_feedback(getattr(self, name))
            if codec is not None:
                check_codec(f"CommunicationPolicy({name}=...)", codec)


@dataclass(frozen=True, slots=True)
class GradientCodecs:
    """How gradients travel over the shard axis and over the replicate axis; ``None`` is a plain reduction."""

    shard: GradientCodec | None = None
    replicate: GradientCodec | None = None

    def for_parameter(self, shape: Sequence[int]) -> GradientCodecs:
        """The same for a parameter whose piece on a rank has this shape."""
        return GradientCodecs(_resolved(self.shard, shape), _resolved(self.replicate, shape))

    def alongside(self, other: GradientCodecs) -> GradientCodecs:
        """The same, but exact values where ``other`` is encoded, so that both travel in one message."""
        return GradientCodecs(
            self.shard or (EXACT if other.shard is not None else None),
            self.replicate or (EXACT if other.replicate is not None else None),
        )


def _resolved(codec: GradientCodec | None, shape: Sequence[int]) -> GradientCodec | None:
    if codec is None:
        return None
    return codec.for_parameter(shape) if isinstance(codec, ErrorFeedback) else resolve_codec(codec, shape)


PLAIN = GradientCodecs()
"""Gradients that are reduced without codecs."""

EXACT = Cast(torch.float32)
"""What travels along with encoded gradients, and is added up like them, without being changed."""
