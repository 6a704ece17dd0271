"""What a codec is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from composable_fsdp.errors import ConfigurationError

__all__ = ["Codec", "CodecPerParameter", "check_codec", "resolve_codec"]

_METHODS = ("payload_bytes", "encode", "decode")


class Codec(Protocol):
    """How values travel. A codec is a value: frozen, hashable, without state, the same on every rank.

    Invariants: rows are encoded by themselves, each what one rank sends or gets; the size of a payload follows from the
    number of elements alone; decoding gives the same values on every rank. Nan and infinity do not get lost: what is
    decoded has a nan or an infinity where a row had one, perhaps also near it.
    """

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(num_rows, numel)`` of any float dtype as ``(num_rows, payload_bytes(numel))`` of uint8, contiguous.

        ``rows`` may be the parameters themselves: they must not be changed.
        """
        ...

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """``(num_rows, numel)`` of what :meth:`encode` made, in fp32.

        ``payload`` may be strided along dim 0; each of its rows begins on a boundary of 4 bytes.
        """
        ...


@runtime_checkable
class CodecPerParameter(Protocol):
    """A codec that depends on the parameter: a rank encodes the shards of many as one message and sees no shapes."""

    def for_parameter(self, shape: Sequence[int]) -> Codec:
        """The codec of a parameter of this shape."""
        ...


def resolve_codec(codec: Codec, shape: Sequence[int]) -> Codec:
    """The codec with which a parameter travels whose piece on a rank has this shape."""
    return codec.for_parameter(shape) if isinstance(codec, CodecPerParameter) else codec


def check_codec(what: str, codec: object) -> None:
    """Raises ``ConfigurationError`` unless ``codec``, given as ``what``, has what a codec needs."""
    if isinstance(codec, type) or not all(callable(getattr(codec, method, None)) for method in _METHODS):
        raise ConfigurationError(f"{what} takes a codec, with methods {', '.join(_METHODS)}, not {codec!r}.")
    try:
        hash(codec)
    except TypeError:
        raise ConfigurationError(
            f"{what} takes a codec that can be hashed, as parameters with equal codecs travel together, which "
            f"{type(codec).__name__} cannot: make it a frozen dataclass."
        ) from None
