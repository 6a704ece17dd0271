"""Reads random pickles as metadata, and asserts that nothing but an error or values came of it.

A stream is torch's own metadata with opcodes replaced, inserted, repeated or left out, or opcodes alone: all opcodes of
all protocols, with names of admitted classes, of classes and functions that do harm, and of what they have. Afterwards
no attribute of any class or module has changed, and no stream has opened, renamed or deleted a file outside its folder,
started a process or imported a module.
"""

from __future__ import annotations

import gc
import os
import pickle
import pickletools
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composable_fsdp.errors import CheckpointError
from tests._internals import read_metadata

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
NAMES = (
    *((_METADATA, each) for each in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, each) for each in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    *((_METADATA, each) for each in ("_MEM_FORMAT_ENCODING", "Metadata.__init__", "os", "os.unlink")),
    *(
        ("torch.distributed.checkpoint.filesystem", each)
        for each in ("_StorageInfo", "os.remove", "FileSystem.rm_file")
    ),
    *(("torch", each) for each in ("Size", "float32", "bfloat16", "Size.numel", "load", "hub.download_url_to_file")),
    *(("torch.serialization", each) for each in ("_get_layout", "load")),
    *(("pathlib", each) for each in ("PosixPath", "PurePosixPath", "Path.unlink", "PosixPath.__new__", "os.system")),
    *(("builtins", each) for each in ("getattr", "setattr", "eval", "exec", "open", "print", "__import__", "type")),
    *(("os", each) for each in ("system", "remove", "rename", "mkdir", "environ.update")),
    *(("copyreg", each) for each in ("_reconstructor", "__newobj__", "add_extension", "pickle")),
    *(("collections", each) for each in ("OrderedDict", "OrderedDict.fromkeys")),
    *(("functools", each) for each in ("partial", "reduce")),
    *(("operator", each) for each in ("attrgetter", "methodcaller", "setitem")),
    *(("importlib", each) for each in ("import_module", "reload")),
)
ADMITTED = [
    *((_METADATA, each) for each in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties")),
    *((_METADATA, each) for each in ("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_FILES, "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")),
]
"""The names of metadata, as ``NAMES`` has them too."""
CALLS = [each for each in pickletools.opcodes if each.name in ("BUILD", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ")]
TEXTS = ("with_name", "__members__", "__setstate__", "__init__", "__class__", "__dict__", "__call__", "fqn", "chunks")


def valid_metadata(folder: Path) -> bytes:
    """Write a file of values to ``folder``, and return metadata of it as torch pickles it."""
    (folder / "__0_0.distcp").write_bytes(bytes(1000))
    saved: dict[str, Any] = {"extra": BytesStorageMetadata()}
    places = {MetadataIndex("extra"): _StorageInfo("__0_0.distcp", 900, 100)}
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        key, chunks = (
            f"model.{number}",
            [ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((2, 3))) for at in (0, 2)],
        )
        saved[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size((4, 3)), chunks)
        for index, chunk in enumerate(chunks):
            at = MetadataIndex(key, chunk.offsets, index)
            places[at] = _StorageInfo("__0_0.distcp", 200 * number + 100 * index, 100)
    planned = {key: tuple(key.split(".", 1)) for key in saved}
    stored = StorageMeta(folder, "save", None, ["a"])
    return pickle.dumps(Metadata(saved, planned, places, stored))


def opcodes_of(data: bytes) -> list[bytes]:
    positions = [position for _, _, position in pickletools.genops(data)]
    return [data[begin:end] for begin, end in zip(positions, [*positions[1:], len(data)], strict=True)]


def random_opcode(chance: random.Random, folder: Path) -> bytes:
    """Return an opcode with an argument of its kind, and before it now and then what it takes from the stack."""
    opcode = chance.choice(CALLS if chance.random() < 0.4 else pickletools.opcodes)
    code, kind = opcode.code.encode("latin-1"), opcode.arg.name if opcode.arg else ""
    number = chance.choice((0, 1, 2, 5, 80, 255, 65535, 2**31 - 1, 2**32 - 1, 2**63 - 1))
    module, name = chance.choice(ADMITTED if chance.random() < 0.6 else NAMES)
    text = chance.choice((*TEXTS, module, name, str(folder / "new"), "touch /tmp/pickle_fuzz_was_here"))
    data = text.encode()
    sized = {"1": "<B", "4": "<I", "8": "<Q"}
    match kind:
        case "":
            argument = b""
        case "uint1" | "uint2" | "uint4" | "uint8":
            size = int(kind[-1])
            argument = (number % 2 ** (8 * size)).to_bytes(size, "little")
        case "int4":
            argument = struct.pack("<i", chance.choice((-1, 0, 3, 2**31 - 1)))
        case "float8":
            argument = struct.pack(">d", 1.5)
        case "long1" | "long4":
            argument = struct.pack(sized[kind[-1]], 2) + b"\x05\x80"
        case "stringnl_noescape_pair":
            argument = f"{module}\n{name}\n".encode()
        case "decimalnl_short" | "decimalnl_long" | "floatnl":
            argument = b"%d\n" % number
        case "stringnl":
            argument = b"'%b'\n" % data
        case "unicodestringnl" | "stringnl_noescape":
            argument = data + b"\n"
        case _:
            length = len(data) if chance.random() < 0.9 else number % 256 ** int(kind[-1])
            argument = struct.pack(sized[kind[-1]], length) + data
    if chance.random() < 0.5:
        return code + argument
    pushed = pickle.GLOBAL + f"{module}\n{name}\n".encode()
    if chance.random() < 0.5:
        pushed = b"".join(pickle.SHORT_BINUNICODE + bytes([len(each)]) + each.encode() for each in (module, name))
        pushed += pickle.STACK_GLOBAL
    state = pickle.SHORT_BINUNICODE + bytes([len(data)]) + data
    values = pickle.MARK + state + pushed + pickle.DICT
    asks = (state + pickle.TUPLE1, pickle.NONE + values + pickle.TUPLE2, pickle.EMPTY_TUPLE, values, b"")
    return pushed + chance.choice(asks) + code + argument


def random_stream(chance: random.Random, valid: list[bytes], folder: Path) -> bytes:
    opcodes = list(valid) if chance.random() < 0.7 else [*valid[:2], *(b"" for _ in range(chance.randrange(12))), b"."]
    for _ in range(1 + chance.randrange(6)):
        at = chance.randrange(len(opcodes))
        match chance.randrange(5):
            case 0 if len(opcodes) > 1:
                del opcodes[at]
            case 1:
                opcodes[at] = random_opcode(chance, folder)
            case 2:
                other = chance.randrange(len(opcodes))
                opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
            case 3:
                opcodes.insert(at, opcodes[chance.randrange(len(opcodes))])
            case _:
                opcodes.insert(at, random_opcode(chance, folder))
    # Frames would have to be as long as what they contain, and streams work without.
    return b"".join(each for each in opcodes if each[:1] != pickle.FRAME or chance.random() < 0.01)


def attributes() -> dict[tuple[str, int, str], int]:
    """Return the identity of each attribute of all modules and classes."""
    gc.collect()
    tools = ("hypothesis", "_pytest", "xdist", "execnet")  # which count and note in modules of their own
    owners: list[Any] = [m for name, m in list(sys.modules.items()) if not name.startswith(tools)]
    pending: list[type] = [object]
    known: set[type] = {object}
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        for each in subclasses:
            if each not in known:
                known.add(each)
                pending.append(each)
    # What Python itself keeps on modules and classes, such as the slots of one that was pickled.
    ignored = ("__warningregistry__", "_abc_impl", "__annotations__", "__slotnames__")
    return {
        (f"{owner!r:.100}", id(owner), name): id(value)
        for owner in (*owners, *known)
        for name, value in list(vars(owner).items())
        if name not in ignored
    }


_allowed: Path | None = None
_touched: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _allowed is None or not event.startswith(("open", "os.", "subprocess", "shutil", "import", "exec", "socket")):
        return
    paths = [os.fspath(each) for each in arguments[:2] if isinstance(each, str | os.PathLike)]
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    is_inside = paths and all(path.startswith(f"{_allowed}/") or path in ("r", "rb") for path in paths)
    if event != "os.fspath" and (writes or not is_inside):
        _touched.append(f"{event}{arguments}")


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Yield what is touched outside ``folder``, by Python's audit events."""
    global _allowed
    _touched.clear()
    _allowed = folder
    try:
        yield _touched
    finally:
        _allowed = None


def harmless(streams: int, seed: int, folder: Path) -> int:
    """Read ``streams`` random pickles as the metadata of ``folder``. Return how many were read without an error."""
    chance, path, read = random.Random(seed), folder / ".metadata", 0
    data = valid_metadata(folder)
    path.write_bytes(data)
    read_metadata(folder)
    valid = opcodes_of(data)
    before = attributes()
    for number in range(streams):
        stream = random_stream(chance, valid, folder)
        path.write_bytes(stream)
        with watched(folder) as touched:
            try:
                read_metadata(folder)
                read += 1
            except CheckpointError:
                pass
        assert not touched, f"stream {number} of seed {seed} {stream!r}: {touched}"
    after = attributes()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert not changed, f"{seed=}: {sorted(changed)[:10]}"
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"]
    return read


sys.addaudithook(_audit)
