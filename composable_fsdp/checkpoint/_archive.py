"""Files of ``torch.save`` that somebody has sent, checked before ``torch.load(weights_only=True)`` reads them.

That admits few classes, but not only small values. A record of a zip file may be compressed, so that 4 MB become 4 GB;
``bytearray(10**12)`` is a call that it makes; and a tuple in 40 others, twice in each, is hashed 2**40 times if it is a
key, or ends the process if it is nested more deeply than the stack is. Here the zip file has each byte once, and the
pickle in it is read into a graph of its containers, in which no value is made, before any is.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from struct import unpack
from typing import IO, Any, NoReturn

from torch.distributed.checkpoint import FileSystemReader

from composable_fsdp.errors import CheckpointError

_MOST_DEPTH = 1000
"""The most values in each other. Python pickles no more either."""

_MOST_VALUES = 1_000_000
"""The most values of a pickle, beside one for each of its bytes. Those of a container count wherever it is."""

_TAIL = 98
"""The bytes of the three records that end a zip file without a comment."""

_MEMORY = re.compile(r"torch\.(cuda\.|sparse\.|storage\.)*\w*(Tensor|Storage)")
"""Names of classes that give memory of any size if they are called. Pickles of tensors only name them."""


class _FilePart(io.RawIOBase):
    """The ``nbytes`` from ``start`` of a file, read as a file."""

    def __init__(self, file: IO[bytes], start: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._start, self._nbytes, self._at = file.fileno(), start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        left = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        count = os.preadv(self._file, [left], self._start + self._at) if left else 0
        self._at += count
        return count


class ArchiveReader(FileSystemReader):
    """Torch's reader of tensors in a folder. It checks the part of a file that a tensor is in before torch reads it."""

    def _slice_file(self, file: IO[bytes], place: Any) -> IO[bytes]:
        part = io.BufferedReader(_FilePart(file, place.offset, place.length))
        check_archive(part)
        return part


def check_archive(file: IO[bytes]) -> None:
    """Check a file of ``torch.save``, and go back to its begin.

    Raises:
        CheckpointError: it is no zip file, or has a part that takes more memory or time than its bytes ask for.
    """
    try:
        _check_end(file)
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError("a record of it is compressed. Save it again with torch.save")
            if sum(record.file_size for record in records) > file.seek(0, os.SEEK_END):
                raise CheckpointError("its records are larger than the file: several are in one place")
            for record in records:
                if record.filename.lower().endswith("data.pkl"):  # torch finds names in any case
                    file.seek(record.header_offset + 26)  # zipfile compares checksums, which save does not compute
                    file.seek(sum(unpack("<HH", file.read(4))), os.SEEK_CUR)
                    _Graph(io.BytesIO(file.read(record.file_size))).check(record.file_size)
        file.seek(0)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointError(f"it is no file of torch.save, or damaged: {type(error).__name__}: {error}") from error


def _check_end(file: IO[bytes]) -> None:
    """Raise unless the directory of the zip file ends where the end records begin: other readers may find another."""
    nbytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, nbytes - _TAIL))
    tail = file.read(_TAIL)
    signature, size, start, comment = unpack("<4s8xIIH", tail[-22:])
    end = nbytes - 22
    if tail[-42:-38] == b"PK\6\7":
        end = nbytes - _TAIL
        signature, size, start = unpack("<4s36xQQ", tail[:56])
        if unpack("<Q", tail[-34:-26]) != (end,):
            signature = b""
    if signature not in (b"PK\5\6", b"PK\6\6") or comment or start + size != end:
        raise CheckpointError("it is no file of torch.save: its zip directory is not at its end")


_SIDE_EFFECTS = ("torch.distributed.", "torch.nested.", "torch._dynamo.")
"""Prefixes of names that torch admits once it has imported them. A ``DeviceMesh``, for one, makes process groups."""


class _Node:
    """A container, or what a call returns, with the values in it: nodes and leaves."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def nodes(self) -> Iterator[_Node]:
        return (value for value in self.values if isinstance(value, _Node))


class _Name(str):
    """The name of a class or function."""

    __slots__ = ()


class Opcodes(dict[int, Callable[[Any], None]]):
    """The handler of each opcode of an unpickler that has no others."""

    def __missing__(self, code: int) -> NoReturn:
        raise pickle.UnpicklingError(f"it has the opcode {bytes([code])!r}, which is no part of such a file")


_PLAIN = b"".join(
    (
        *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.BINPERSID, pickle.EMPTY_TUPLE),
        *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING),
    )
)


class _Graph(pickle._Unpickler):
    """Reads the containers of a pickle, with the opcodes that ``torch.load(weights_only=True)`` has."""

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def check(self, nbytes: int) -> None:
        """Raise if the pickle of ``nbytes`` has too many values in each other, or in all."""
        result = self.load()
        root = _Node([result, *(value for stack in (self.stack, *self.metastack) for value in stack)])
        measures: dict[_Node, tuple[float, int]] = {}
        """The number of values in a node, and its depth. A list or dict may be in itself: it is a value there."""
        path = [(root, root.nodes())]
        while path:
            node, rest = path[-1]
            if (inner := next(rest, None)) is None:
                path.pop()
                found = [measures.get(value, (1, 0)) for value in node.values]
                measures[node] = 1.0 + sum(each for each, _ in found), 1 + max((depth for _, depth in found), default=0)
            elif inner not in measures:
                measures[inner] = 1, 1
                path.append((inner, inner.nodes()))
        count, depth = measures[root]
        if count > _MOST_VALUES + nbytes or depth > _MOST_DEPTH:
            raise CheckpointError(f"it has {count:g} values in {nbytes} bytes, nested {depth} deep: some are repeated")

    def find_class(self, module: str, name: str) -> _Name:
        if (found := _Name(f"{module}.{name}")).startswith(_SIDE_EFFECTS):
            raise CheckpointError(f"it has a {found}, which is not read: its constructor may call other ranks")
        return found

    def persistent_load(self, pid: object) -> None:
        """Return nothing for a storage, which is a record of the zip file."""

    def _container(self) -> None:
        self.stack.append(_Node([]))

    def _tuple(self) -> None:
        values = self.pop_mark()
        self.stack.append(_Node(values))

    def _short_tuple(self, length: int) -> None:
        self.stack[-length:] = [_Node(self.stack[-length:])]

    def _add(self, length: int) -> None:
        values = self.stack[-length:]
        del self.stack[-length:]
        self.stack[-1].values.extend(values)

    def _add_marked(self) -> None:
        values = self.pop_mark()
        self.stack[-1].values.extend(values)

    def _call(self) -> None:
        arguments = self.stack.pop()
        _check_call(self.stack.pop(), arguments)
        self.stack.append(_Node([arguments]))

    dispatch = Opcodes({code: pickle._Unpickler.dispatch[code] for code in _PLAIN})
    dispatch |= dict.fromkeys(b"".join((pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET)), _container)
    dispatch |= dict.fromkeys(b"".join((pickle.REDUCE, pickle.NEWOBJ)), _call)
    dispatch |= dict.fromkeys(b"".join((pickle.APPENDS, pickle.SETITEMS)), _add_marked)
    dispatch |= dict.fromkeys(b"".join((pickle.APPEND, pickle.BUILD)), partial(_add, length=1))
    dispatch |= {pickle.SETITEM[0]: partial(_add, length=2), pickle.TUPLE[0]: _tuple}
    dispatch |= {pickle.TUPLE1[0]: partial(_short_tuple, length=1), pickle.TUPLE2[0]: partial(_short_tuple, length=2)}
    dispatch |= {pickle.TUPLE3[0]: partial(_short_tuple, length=3)}


def _check_call(name: object, arguments: object) -> None:
    values = arguments.values if isinstance(arguments, _Node) else []
    if type(name) is not _Name:
        return  # torch calls no other
    if _MEMORY.fullmatch(name) or (name == "builtins.bytearray" and any(type(each) in (int, bool) for each in values)):
        raise CheckpointError(f"it calls {name}, which gives memory of any size")
    if name == "torch._tensor._rebuild_from_type_v2" and len(values) > 2:
        _check_call(values[0], values[2])
