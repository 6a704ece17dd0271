"""Flushes: numbered values of tensors with a checksum, as they go to another program. No communication.

``docs/wire.md`` is the specification of the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._extents import DTYPES, has_own_memory
from composable_fsdp._files import open_regular, replace_file
from composable_fsdp.errors import FlushError

__all__ = ["INTEGERS", "Flush", "Patch", "Position", "apply_changes"]

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


@dataclass(eq=False)
class Flush:
    """Values of some tensors, one part of an update. Valid until the stream is asked for the next one.

    Attributes:
        stream: the stream: flushes that a receiver must apply one after the other.
        number: of the flush in its stream, from 0.
        part: the number of the flush in its update, from 0.
        parts: the flushes of an update.
        is_whole: it has all values of its tensors, and no indices.
        dtype: of all values.
        tensors: name, shape and number of values of each tensor.
        aliases: further names of tied tensors, with the names of their tensors.
        values: 1-d, those of one tensor after those of another; ``None`` on a rank that gets no values.
        indices: of the values in their flattened full tensors, 1-d, int32 or int64, ascending for each tensor; ``None``
            if the flush is whole.
    """

    stream: int
    number: int
    part: int
    parts: int
    is_whole: bool
    dtype: torch.dtype
    tensors: Sequence[tuple[str, tuple[int, ...], int]]
    aliases: Mapping[str, str]
    values: torch.Tensor | None
    indices: torch.Tensor | None = None

    def _header(self) -> bytes:
        """Return the description of the flush as JSON."""
        # The stream is text: numbers of JSON have 53 bits in other languages.
        entries = {name: getattr(self, name) for name in _HEADER}
        entries |= {"format": FORMAT, "stream": str(self.stream), "dtype": _CODES[self.dtype]}
        return json.dumps(entries, separators=(",", ":")).encode()

    @property
    def nbytes(self) -> int:
        """The bytes of header, indices and values."""
        return len(self._header()) + sum(t.nbytes for t in (self.indices, self.values) if t is not None)

    def patches(self) -> Iterator[Patch]:
        """Yield the values by tensor. The tensors share the memory of the flush."""
        values, end = self._given(), 0
        for name, shape, count in self.tensors:
            begin, end = end, end + count
            indices = None if self.indices is None else self.indices[begin:end]
            yield Patch(name, shape, self.dtype, values[begin:end], indices)

    def clone(self) -> Flush:
        """Return a copy, which stays valid."""
        return replace(
            self, values=self._given().clone(), indices=None if self.indices is None else self.indices.clone()
        )

    def to_bytes(self) -> bytes:
        """Return the flush as a safetensors file, with a checksum."""
        header, values = self._header(), _bytes_of(self._given())
        indices = b"" if self.indices is None else _bytes_of(self.indices)
        checksum = crc32(values, crc32(indices, crc32(header)))
        entries: dict[str, Any] = {"__metadata__": {"flush": header.decode(), "crc32": f"{checksum:08x}"}}
        tensors = {"values": self.values} if self.indices is None else {"values": self.values, "indices": self.indices}
        end, data = 0, []
        for name, tensor in sorted(tensors.items(), key=lambda item: -cast(torch.Tensor, item[1]).itemsize):
            assert tensor is not None
            offsets = [end, end := end + tensor.nbytes]
            entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            data.append(values if name == "values" else indices)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        return b"".join((len(text).to_bytes(8, "little"), text, *data))

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Flush:
        """Return the flush of :meth:`to_bytes`, in host memory. Everything is checked, but for the receiver's state.

        Raises:
            FlushError: it is no such file, or is damaged.
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
            text, checksum = metadata["flush"], int(metadata["crc32"], 16)
            tensors = {name: _tensor_of(view[8 + size :], **entry) for name, entry in entries.items()}
            values, indices = tensors.pop("values"), tensors.pop("indices", None)
            found = crc32(text.encode())
            for tensor in (indices, values):
                found = found if tensor is None else crc32(_bytes_of(tensor), found)
            if found != checksum:
                raise ValueError(f"it is damaged: its checksum is {found:08x}, and the sender wrote {checksum:08x}")
            nbytes = values.nbytes + (0 if indices is None else indices.nbytes)
            if tensors or nbytes != len(view) - 8 - size:
                raise ValueError("it has other tensors or bytes")
            header: dict[str, Any] = json.loads(text)
            if (form := header.pop("format")) != FORMAT:
                raise ValueError(f"it has the format {form!r} of another program or version, not {FORMAT!r}")
            header["tensors"] = [(name, tuple(shape), count) for name, shape, count in header["tensors"]]
            header |= {"stream": int(header["stream"]), "dtype": DTYPES[header["dtype"]]}
            flush = Flush(**{**header, "values": values, "indices": indices})
            flush._check(values)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FlushError(f"these bytes are no flush: {type(error).__name__}: {error}. Ask for it again.") from error
        return flush

    def _check(self, values: torch.Tensor) -> None:
        """Raise a ``ValueError`` if the description or the indices make no sense, or do not fit the values."""
        if type(self.is_whole) is not bool:
            raise TypeError("is_whole is no bool")
        numbers = [self.number, self.part, self.parts, *(n for _, s, count in self.tensors for n in (*s, count))]
        names = [name for name, _, _ in self.tensors]
        is_right = (
            all(type(n) is int and 0 <= n < 1 << 62 for n in (self.stream, *numbers))
            and all(type(name) is str for name in (*names, *self.aliases.values()))
            and len(set(names)) == len(names)
            and set(names).issuperset(self.aliases.values())
            and set(names).isdisjoint(self.aliases)
            and self.part < self.parts
            and all(len(shape) <= _MOST_DIMS for _, shape, _ in self.tensors)
            and sum(prod(shape) for _, shape, _ in self.tensors) < 1 << 62
            and all(count == prod(s) if self.is_whole else count <= prod(s) for _, s, count in self.tensors)
        )
        if not is_right:
            raise ValueError("its header has values that make no sense")
        numel = sum(count for *_, count in self.tensors)
        of_indices = None if self.indices is None else self.indices.numel()
        if (values.dtype, values.numel(), of_indices) != (self.dtype, numel, None if self.is_whole else numel):
            raise ValueError("its tensors are not those of its header")
        if self.indices is None:
            return
        if self.indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"its indices are {self.indices.dtype}")
        sizes = torch.tensor([prod(shape) for _, shape, _ in self.tensors], dtype=torch.int64)
        counts = torch.tensor([count for *_, count in self.tensors], dtype=torch.int64)
        limits = torch.repeat_interleave(sizes, counts)
        if bool(((self.indices < 0) | (self.indices >= limits)).any()):
            raise ValueError("it has indices outside of their tensors")
        if bool(((self.indices + torch.repeat_interleave(sizes.cumsum(0) - sizes, counts)).diff() <= 0).any()):
            raise ValueError("it has indices that do not ascend in their tensor")

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the flush to a safetensors file in ``folder``, and return its path.

        The file appears as a whole. Names in their order are the order of flushes.
        """
        path = Path(folder, f"{self.stream:020d}-{self.number:08d}.safetensors")
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


_HEADER = [each.name for each in fields(Flush) if each.name not in ("values", "indices")]


@torch.inference_mode()  # state may have been made in it
def apply_changes(state: Mapping[str, torch.Tensor], flush: Flush, last: Position | None = None) -> Position:
    """Write the values of ``flush`` to the tensors of ``state``, in place, and return the receiver's new position.

    A receiver begins with ``last=None`` and the first flush of a stream, which is part of an update with all values,
    and passes on the position::

        position = None
        for flush in flushes:
            position = apply_changes(state, flush, position)

    Everything is checked before anything is written; the bytes of a flush by :meth:`Flush.from_bytes`. After an error
    the state and the position are what they were: the same flush may be applied once it has arrived undamaged. If a
    flush is lost, ask the sender for everything, by :meth:`SentParams.forget`. Use the state while
    ``position.is_complete``: between the flushes of an update some tensors have values of the step before.

    Args:
        state: plain tensors by name, of the flush's shapes and dtypes, on any devices and with any strides. Of the
            names of a tied tensor it may have any; further names of the state are left alone.
        flush: the next one.
        last: the position after the flush before.

    Raises:
        FlushError: the flush is not the next one, or does not fit the state.
    """
    values, indices = flush._given(), flush.indices
    at = "has none yet" if last is None else f"is at flush {last.number} of stream {last.stream}"
    if flush.number == 0 and last is not None and flush.stream <= last.stream:
        raise FlushError(
            f"flush 0 begins stream {flush.stream}, and this receiver {at}, which is not older. It is a repetition, or "
            "the sender's clock goes wrong: for that pass last=None."
        )
    if flush.number and (last is None or (flush.stream, flush.number) != (last.stream, last.number + 1)):
        raise FlushError(
            f"flush {flush.number} of stream {flush.stream} is not the next one: this receiver {at}. A flush was "
            "lost, repeated, or overtaken by another. Ignore a repetition; else ask the sender for everything: "
            "SentParams.forget()."
        )
    if flush.number < flush.parts and not flush.is_whole:
        raise FlushError(f"flush {flush.number} begins a stream and has no full values. Ask the sender for everything.")
    names: dict[str, list[str]] = {name: [name] for name, _, _ in flush.tensors}
    for alias, name in flush.aliases.items():
        names[name].append(alias)
    places = {name: [state[each] for each in known if each in state] for name, known in names.items()}
    problems = [problem for name, shape, _ in flush.tensors for problem in _misfits(name, shape, flush, places[name])]
    if problems:
        raise FlushError(f"flush {flush.number} does not fit the state: {'; '.join(problems[:5])}. Nothing is written.")
    kind, end = INTEGERS[flush.dtype.itemsize], 0
    moved = {  # all that can fail is before the first write
        device: (values.to(device).view(kind), None if indices is None else indices.to(device, torch.int64))
        for device in dict.fromkeys(place.device for known in places.values() for place in known)
    }
    for name, shape, count in flush.tensors:
        begin, end = end, end + count
        for place in places[name] if count else ():
            new, chosen = moved[place.device]
            bits = place.detach().view(kind)
            if chosen is None:
                bits.copy_(new[begin:end].view(shape))
            else:
                bits.put_(chosen[begin:end], new[begin:end])
    return Position(flush.stream, flush.number, flush.part == flush.parts - 1)


def _misfits(name: str, shape: tuple[int, ...], flush: Flush, places: Sequence[torch.Tensor]) -> Iterator[str]:
    if not places:
        yield f"it has no {name!r}"
    for place in places:
        if isinstance(place, DTensor) or not has_own_memory(place):
            yield f"{name!r} is a {type(place).__name__}, not a plain tensor"
        elif (tuple(place.shape), place.dtype) != (shape, flush.dtype):
            yield f"{name!r} is {tuple(place.shape)} of {place.dtype}, and {shape} of {flush.dtype} in the flush"
        elif place.layout != torch.strided or place.is_meta or place.is_conj() or place.is_neg() or _repeats(place):
            yield f"{name!r} is on meta, sparse, or a conjugate, negative or expanded view: no memory of its own values"


def _repeats(tensor: torch.Tensor) -> bool:
    """Return whether several elements of ``tensor`` are one in memory, as after ``expand``."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return data


def _tensor_of(data: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    (numel,), (begin, end), kind = shape, data_offsets, DTYPES[dtype]
    if type(numel) is not int or not 0 <= begin <= end <= len(data) or end - begin != numel * kind.itemsize:
        raise ValueError(f"{numel} elements of {dtype} in bytes {begin} to {end} of {len(data)}")
    return torch.frombuffer(bytearray(data[begin:end]), dtype=kind) if numel else torch.empty(0, dtype=kind)
