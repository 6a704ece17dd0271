"""The protocol of codecs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, cast, runtime_checkable

import torch

from composable_fsdp.errors import ConfigurationError

AnyCodec = TypeVar("AnyCodec")
_METHODS = ("payload_bytes", "encode", "decode")


class Codec(Protocol):
    """How values are encoded on the wire. A codec is a value: frozen, hashable, stateless, the same on every rank.

    Invariants: rows are encoded independently, each being what one rank sends or gets; the size of a payload depends on
    the number of elements alone; decoding gives the same values on every rank. Nan and infinity are not lost: a decoded
    row has a nan or an infinity where the original had one, perhaps also near it.
    """

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` elements."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode ``(num_rows, numel)`` of any float dtype into ``(num_rows, payload_bytes(numel))`` uint8, contiguous.

        ``rows`` may be the parameters themselves and must not be changed.
        """
        ...

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode a payload of :meth:`encode` into ``(num_rows, numel)`` fp32.

        ``payload`` may be strided along dim 0; each of its rows is aligned to 4 bytes.
        """
        ...


@runtime_checkable
class CodecPerParameter(Protocol):
    """A codec that depends on a parameter's shape, which ``encode`` does not see in a message of many shards."""

    def for_parameter(self, shape: Sequence[int]) -> Codec:
        """Return the codec for a parameter of this shape."""
        ...


def resolve_codec(codec: AnyCodec, shape: Sequence[int]) -> AnyCodec:
    """Return the codec for a parameter whose shard has this shape."""
    return cast(AnyCodec, codec.for_parameter(shape)) if isinstance(codec, CodecPerParameter) else codec


def check_codec(what: str, codec: object) -> None:
    """Raise ``ConfigurationError`` unless ``codec``, given as ``what``, has the methods of a codec."""
    if isinstance(codec, type) or not all(callable(getattr(codec, method, None)) for method in _METHODS):
        raise ConfigurationError(f"{what} takes a codec, with methods {', '.join(_METHODS)}, not {codec!r}.")
