"""Flushes: numbered values of tensors with a checksum, as they go to another program. No communication.

``docs/wire.md`` is the specification of the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._extents import DTYPES
from composable_fsdp._files import open_regular, replace_file
from composable_fsdp.errors import FlushError

__all__ = ["INTEGERS", "Flush", "FlushHeader", "Patch", "Position", "apply_changes"]

FORMAT = "composable_fsdp.flush/1"
MOST_HEADER_BYTES = 100 << 20
"""The most bytes of a header that is read, as in the safetensors library."""

_MOST_DIMS = 64
"""As in torch."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes as which elements are compared and written, by their bytes: all bits count."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Patch(NamedTuple):
    """Values of one tensor. The fields are those of vLLM's ``CheckpointWeightPatch``.

    Attributes:
        name: of the tensor.
        shape: of the full tensor.
        dtype: of the tensor and the values.
        values: 1-d.
        indices: of the values in the flattened full tensor, ascending, int32 or int64. ``None``: all values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


class Position(NamedTuple):
    """The last flush that a receiver has applied.

    Attributes:
        stream: the stream, which is the time of its begin in nanoseconds.
        number: of the last flush that was applied.
        is_complete: it was the last one of an update, so that all tensors have values of one step.
    """

    stream: int
    number: int
    is_complete: bool


@dataclass(frozen=True)
class FlushHeader:
    """The description of a flush, sent as JSON.

    Attributes:
        stream: the stream: flushes that a receiver must apply one after the other.
        number: of the flush in its stream, from 0.
        part: the number of the flush in its update, from 0.
        parts: the flushes of an update.
        is_whole: it has all values of its tensors, and no indices.
        dtype: of all values.
        tensors: name, shape and number of values of each tensor.
        aliases: further names of tied tensors, with the names of their tensors.
    """

    stream: int
    number: int
    part: int
    parts: int
    is_whole: bool
    dtype: torch.dtype
    tensors: Sequence[tuple[str, tuple[int, ...], int]]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the header as JSON."""
        # The stream is text: numbers of JSON have 53 bits in other languages.
        text = {**vars(self), "format": FORMAT, "stream": str(self.stream), "dtype": _CODES[self.dtype]}
        return json.dumps(text, separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> FlushHeader:
        """Return the header that :meth:`text` has written. Everything is checked.

        Raises:
            FlushError: it is no such header.
        """
        try:
            found: Any = json.loads(text)
            if (form := found.pop("format")) != FORMAT:
                raise ValueError(f"it has the format {form!r} of another program or version, not {FORMAT!r}")
            tensors = [(name, tuple(shape), count) for name, shape, count in found["tensors"]]
            header = FlushHeader(
                **{**found, "stream": int(found["stream"]), "dtype": DTYPES[found["dtype"]], "tensors": tensors}
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FlushError(
                f"the header of this flush cannot be read: {type(error).__name__}: {error}. Ask for it again."
            ) from error
        numbers = [header.number, header.part, header.parts, *(n for _, s, count in tensors for n in (*s, count))]
        texts = [name for name, _, _ in tensors]
        known = set(texts) if all(type(name) is str for name in texts) else set[str]()
        is_right = (
            all(type(n) is int and 0 <= n < 1 << 62 for n in (header.stream, *numbers))
            and len(known) == len(texts)
            and (type(found["is_whole"]), type(found["aliases"])) == (bool, dict)
            and all(type(name) is str and name in known for name in header.aliases.values())
            and known.isdisjoint(header.aliases)
            and header.part < header.parts
            and all(len(s) <= _MOST_DIMS for _, s, _ in tensors)
            and all(count == prod(s) if header.is_whole else count <= prod(s) for _, s, count in tensors)
        )
        if not is_right:
            raise FlushError("the header of this flush has values that make no sense. Ask for the flush again.")
        return header


class Flush:
    """Values of some tensors, one part of an update. Valid until the stream is asked for the next one.

    Two flat tensors, on the device of the stream or in host memory:

    Attributes:
        header: JSON text, which :class:`FlushHeader` describes.
        indices: of the values in their flattened full tensors, 1-d, int32 or int64, ascending for each tensor; ``None``
            if the flush is whole.
        values: 1-d, those of one tensor after those of another; ``None`` on a rank that gets no values.
        checksum: the CRC-32 of the header, the indices and the values.
    """

    def __init__(self, header: str, indices: torch.Tensor | None, values: torch.Tensor | None, checksum: int) -> None:
        self.header, self.indices, self.values, self.checksum = header, indices, values, checksum

    @staticmethod
    def of(header: FlushHeader, indices: torch.Tensor | None, values: torch.Tensor | None) -> Flush:
        made = Flush(header.text(), indices, values, 0)
        if values is not None:
            made.checksum = made.computed_checksum()
        return made

    def computed_checksum(self) -> int:
        """Return the checksum of what the flush has now."""
        found = crc32(self.header.encode())
        for tensor in (self.indices, self.values):
            found = found if tensor is None else crc32(_bytes_of(tensor), found)
        return found

    @cached_property
    def parsed(self) -> FlushHeader:
        """The header, checked."""
        return FlushHeader.parse(self.header)

    @property
    def nbytes(self) -> int:
        """The bytes of header, indices and values."""
        return len(self.header.encode()) + sum(t.nbytes for t in (self.indices, self.values) if t is not None)

    def patches(self) -> Iterator[Patch]:
        """Yield the values by tensor. The tensors share the memory of the flush."""
        values = self._given()
        ends = accumulate(count for *_, count in self.parsed.tensors)
        for (name, shape, count), end in zip(self.parsed.tensors, ends, strict=True):
            indices = None if self.indices is None else self.indices[end - count : end]
            yield Patch(name, shape, self.parsed.dtype, values[end - count : end], indices)

    def clone(self) -> Flush:
        """Return a copy, which stays valid."""
        indices = None if self.indices is None else self.indices.clone()
        return Flush(self.header, indices, self._given().clone(), self.checksum)

    def to_bytes(self) -> bytes:
        """Return the flush as a safetensors file."""
        values = self._given()
        tensors = {"values": values} if self.indices is None else {"values": values, "indices": self.indices}
        entries: dict[str, Any] = {"__metadata__": {"flush": self.header, "crc32": f"{self.checksum:08x}"}}
        end, data = 0, []
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
            offsets = [end, end := end + tensor.nbytes]
            entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            data.append(_bytes_of(tensor))
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        return b"".join((len(text).to_bytes(8, "little"), text, *data))

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Flush:
        """Return the flush of :meth:`to_bytes`, in host memory. The checksum is not compared yet.

        Raises:
            FlushError: it is no such file.
        """
        view = memoryview(data)
        size = int.from_bytes(view[:8], "little")
        if len(view) < 8 or size > min(len(view) - 8, MOST_HEADER_BYTES):
            raise FlushError(
                f"{len(view)} bytes are no whole flush, or its header is longer than 100 MiB. Ask for it again."
            )
        try:
            entries = json.loads(bytes(view[8 : 8 + size]))
            metadata = entries.pop("__metadata__")
            header, checksum = metadata["flush"], int(metadata["crc32"], 16)
            tensors = {name: _tensor_of(view[8 + size :], **entry) for name, entry in entries.items()}
            values, indices = tensors.pop("values"), tensors.pop("indices", None)
            nbytes = sum(tensor.nbytes for tensor in (values, indices) if tensor is not None)
            header.encode()  # an error if it has half of a character
            if tensors or nbytes != len(view) - 8 - size or type(header) is not str:
                raise ValueError("it has other tensors or bytes")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FlushError(f"these bytes are no flush: {type(error).__name__}: {error}. Ask for it again.") from error
        return Flush(header, indices, values, checksum)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the flush to a safetensors file in ``folder``, and return its path.

        The file appears as a whole. Names in their order are the order of flushes.
        """
        path = Path(folder, f"{self.parsed.stream:020d}-{self.parsed.number:08d}.safetensors")
        replace_file(path, self.to_bytes())
        return path

    @staticmethod
    def load(folder: str | os.PathLike[str], name: str, most_bytes: int = 8 << 30) -> Flush:
        """Read the file ``name`` in ``folder``.

        Raises:
            OSError: it is no regular file in the folder.
            FlushError: it is no flush, or has more than ``most_bytes``.
        """
        with open_regular(folder, name) as file:
            if (nbytes := os.fstat(file.fileno()).st_size) > most_bytes:
                raise FlushError(f"{name} has {nbytes} bytes, at most {most_bytes} are read. Pass most_bytes.")
            return Flush.from_bytes(file.readall())

    def _given(self) -> torch.Tensor:
        if self.values is None:
            raise FlushError(
                "this flush has no values: the stream has gone on to the next one, or this rank gets none "
                "(rank0_only). Clone a flush that is kept."
            )
        return self.values

    def _release(self) -> None:
        self.indices = self.values = None


@torch.inference_mode()  # state may have been made in it
def apply_changes(state: Mapping[str, torch.Tensor], flush: Flush, last: Position | None = None) -> Position:
    """Write the values of ``flush`` to the tensors of ``state``, in place, and return the receiver's new position.

    A receiver begins with ``last=None`` and the first flush of a stream, which is part of an update with all values,
    and passes on the position::

        position = None
        for flush in flushes:
            position = apply_changes(state, flush, position)

    Everything is checked before anything is written. After an error the state and the position are what they were: the
    same flush may be applied once it has arrived undamaged. If a flush is lost, ask the sender for everything, by
    :meth:`SentParams.forget`. Use the state while ``position.is_complete``: between the flushes of an update some
    tensors have values of the step before.

    Args:
        state: plain tensors by name, of the flush's shapes and dtypes, on any devices and with any strides. Of the
            names of a tied tensor it may have any; further names of the state are left alone.
        flush: the next one.
        last: the position after the flush before.

    Raises:
        FlushError: the flush is damaged, is not the next one, or does not fit the state.
    """
    header = flush.parsed
    values, indices = flush._given(), flush.indices
    _check_order(header, last)
    if (found := flush.computed_checksum()) != flush.checksum:
        raise FlushError(
            f"flush {header.number} is damaged: its checksum is {found:08x}, and the sender wrote "
            f"{flush.checksum:08x}. Ask for it again."
        )
    numel = sum(count for *_, count in header.tensors)
    given = (values.dtype, values.shape, (indices is None), (numel,) if indices is None else tuple(indices.shape))
    if given != (header.dtype, (numel,), header.is_whole, (numel,)):
        raise FlushError(f"the tensors of flush {header.number} are not those of its header. Ask for it again.")
    names: dict[str, list[str]] = {name: [name] for name, _, _ in header.tensors}
    for alias, name in header.aliases.items():
        names[name].append(alias)
    places = {name: [state[each] for each in known if each in state] for name, known in names.items()}
    problems = [problem for name, shape, _ in header.tensors for problem in _misfits(name, shape, header, places[name])]
    if problems:
        raise FlushError(
            f"flush {header.number} does not fit the state: {'; '.join(problems[:5])}. Nothing is written."
        )
    if indices is not None:
        _check_indices(header, indices)
    kind, end = INTEGERS[header.dtype.itemsize], 0
    moved = {  # all that can fail is before the first write
        device: (values.to(device).view(kind), None if indices is None else indices.to(device, torch.int64))
        for device in dict.fromkeys(place.device for known in places.values() for place in known)
    }
    for name, shape, count in header.tensors:
        begin, end = end, end + count
        for place in places[name] if count else ():
            new, at = moved[place.device]
            bits = place.detach().view(kind)
            if at is None:
                bits.copy_(new[begin:end].view(shape))
            else:
                bits.put_(at[begin:end], new[begin:end])
    return Position(header.stream, header.number, header.part == header.parts - 1)


def _check_order(header: FlushHeader, last: Position | None) -> None:
    if header.number == 0:
        if last is not None and header.stream <= last.stream:
            raise FlushError(
                f"flush 0 begins stream {header.stream}, and this receiver is at flush {last.number} of stream "
                f"{last.stream}, which is not older. It is a repetition, or the sender's clock goes wrong: for "
                "that pass last=None."
            )
    elif last is None or header.stream != last.stream or header.number != last.number + 1:
        at = "has none yet" if last is None else f"is at flush {last.number} of stream {last.stream}"
        raise FlushError(
            f"flush {header.number} of stream {header.stream} is not the next one: this receiver {at}. A flush was "
            "lost, repeated, or overtaken by another. Ignore a repetition; else ask the sender for everything: "
            "SentParams.forget()."
        )
    if header.number < header.parts and not header.is_whole:
        raise FlushError(
            f"flush {header.number} begins a stream and has no full values. Ask the sender for everything."
        )


def _misfits(name: str, shape: tuple[int, ...], header: FlushHeader, places: Sequence[torch.Tensor]) -> Iterator[str]:
    if not places:
        yield f"it has no {name!r}"
    for place in places:
        if isinstance(place, DTensor) or type(place).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            yield f"{name!r} is a {type(place).__name__}, not a plain tensor"
        elif (tuple(place.shape), place.dtype) != (shape, header.dtype):
            yield f"{name!r} is {tuple(place.shape)} of {place.dtype}, and {shape} of {header.dtype} in the flush"
        elif place.layout != torch.strided or place.is_meta or place.is_conj() or place.is_neg() or _repeats(place):
            yield f"{name!r} is on meta, sparse, or a conjugate, negative or expanded view: no memory of its own values"


def _repeats(tensor: torch.Tensor) -> bool:
    """Return whether several elements of ``tensor`` are one in memory, as after ``expand``."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_indices(header: FlushHeader, indices: torch.Tensor) -> None:
    sizes = torch.tensor([prod(shape) for _, shape, _ in header.tensors], dtype=torch.int64)
    counts = torch.tensor([count for *_, count in header.tensors], dtype=torch.int64)
    begins, limits = (
        torch.repeat_interleave(each, counts).to(indices.device) for each in (sizes.cumsum(0) - sizes, sizes)
    )
    if indices.dtype not in (torch.int32, torch.int64) or bool(((indices < 0) | (indices >= limits)).any()):
        raise FlushError(f"flush {header.number} has indices outside of their tensors. Nothing is written.")
    if bool(((indices + begins).diff() <= 0).any()):
        raise FlushError(f"flush {header.number} has indices that do not ascend in their tensor. Nothing is written.")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return data


def _tensor_of(data: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    (numel,), (begin, end), kind = shape, data_offsets, DTYPES[dtype]
    if type(numel) is not int or not 0 <= begin <= end <= len(data) or end - begin != numel * kind.itemsize:
        raise ValueError(f"{numel} elements of {dtype} in bytes {begin} to {end} of {len(data)}")
    return torch.frombuffer(bytearray(data[begin:end]), dtype=kind) if numel else torch.empty(0, dtype=kind)
