"""Metadata of DCP is read into values: whatever a sender writes into it, nothing is called and no class is changed."""

from __future__ import annotations

import collections
import os
import pathlib
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
from tests.helpers.pickle_fuzz import attributes, harmless, valid_metadata, watched

FILE = "__0_0.distcp"


def refused(folder: Path, data: bytes) -> str:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        read_metadata(folder)
    return str(raised.value)


def metadata(**changed: Any) -> Metadata:
    """Return metadata of the tensor ``w`` of 4 floats in two chunks, of which ``changed`` replaces values."""
    given: dict[str, Any] = {"size": (4,), "offsets": (0, 2), "sizes": (2, 2), "name": FILE, "at": 0, "length": 100}
    given |= changed
    chunks = [
        ChunkStorageMetadata(torch.Size([at]), torch.Size([length]))
        for at, length in zip(given["offsets"], given["sizes"], strict=True)
    ]
    length = given["length"]
    places = {
        MetadataIndex("w", chunk.offsets): _StorageInfo(given["name"], given["at"] + index * length, length)
        for index, chunk in enumerate(chunks)
    }
    return Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size(given["size"]), chunks)}, None, places)


def raw_sizes(data: bytes, old: int, new: bytes) -> bytes:
    """Return ``data`` with the one-byte integer ``old`` replaced by the opcodes ``new``, outside frames."""
    found = data.replace(pickle.BININT1 + bytes([old]), new)
    assert found != data
    return b"\x80\x04" + found[11:]  # protocol 4, without its frame


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / FILE).write_bytes(bytes(1000))
    return tmp_path


def test_what_torch_writes_is_read_as_torch_reads_it(folder: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16)
    saved: dict[str, Any] = {"extra": BytesStorageMetadata(), "optimizer.param_groups.0.lr": BytesStorageMetadata()}
    places = {MetadataIndex(key): _StorageInfo(FILE, 10 * index, 10) for index, key in enumerate(saved)}
    for number, dtype in enumerate(kinds):
        chunks = [ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((size, 2))) for at, size in ((0, 3), (3, 1))]
        saved[f"model.{dtype}"] = TensorStorageMetadata(TensorProperties(dtype), torch.Size((4, 2)), chunks)
        for index, chunk in enumerate(chunks):
            place = _StorageInfo(FILE, 100 + 120 * number + 60 * index, 60)
            places[MetadataIndex(f"model.{dtype}", chunk.offsets, index)] = place
    for number, (key, size) in enumerate((("scalar", ()), ("empty", (0, 3)))):
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
        saved[key] = TensorStorageMetadata(TensorProperties(pin_memory=True), torch.Size(size), [chunk])
        places[MetadataIndex(key, chunk.offsets)] = _StorageInfo(FILE, 900 + 40 * number, 40)
    planned: dict[str, Any] = {key: tuple(key.split(".", 1)) for key in saved}
    planned["optimizer.param_groups.0.lr"] = ("optimizer", "param_groups", 0, "lr")
    full = Metadata(saved, planned, places, StorageMeta(folder, "id", None, ["m"]))
    for protocol in (4, 5):
        (folder / ".metadata").write_bytes(pickle.dumps(full, protocol))
        found = read_metadata(folder)
        dtypes = {key: each.properties.dtype for key, each in saved.items() if isinstance(each, TensorStorageMetadata)}
        for key, each in found.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                assert each.properties.dtype == dtypes[key]
                assert (each.size, each.chunks) == (saved[key].size, saved[key].chunks)
        assert found.state_dict_metadata.keys() == saved.keys()
        assert found.planner_data == planned
        assert found.storage_data == places
        assert [each.index for each in found.storage_data] == [each.index for each in places]


class _Calls:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._called = function, arguments

    def __reduce__(self) -> Any:
        return self._called


@pytest.mark.parametrize("function", [print, getattr, setattr, exec, pathlib.Path.unlink, torch.load, torch.Size])
def test_nothing_is_called(folder: Path, function: Callable[..., Any]) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Calls(function, "x"), 4))
    text = rf"it has a \w+\.[\w.]*{function.__name__} where torch has a Metadata"
    with watched(folder) as touched, pytest.raises(CheckpointError, match=text):
        read_metadata(folder)
    assert not touched


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("owner", [pathlib.PosixPath, MetadataIndex, torch.Size, collections.OrderedDict, print])
def test_no_attribute_of_a_class_is_set(folder: Path, owner: Any) -> None:
    """BUILD sets attributes of what is on the stack, by a state or by slots."""
    before = attributes()
    owned = b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (owner.__module__, owner.__qualname__)
    )
    attribute = pickle.SHORT_BINUNICODE + b"\x09with_name" + pickle.NONE
    named = owned + pickle.STACK_GLOBAL
    valid = pickle.dumps(metadata(), 4)[:-1]
    for state in (
        pickle.EMPTY_DICT + attribute + pickle.SETITEM,
        pickle.NONE + pickle.EMPTY_DICT + attribute + pickle.SETITEM + pickle.TUPLE2,
    ):
        stream = b"\x80\x04" + named + state + pickle.BUILD + valid[11:] + pickle.TUPLE2 + pickle.STOP
        assert "it sets attributes of a str" in refused(folder, stream)
    assert attributes() == before


def frames(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + pickle.STOP


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (frames(pickle.GLOBAL, b"os\nsystem\n"), r"the opcode b'c'"),
        (frames(pickle.INST, b"os\nsystem\n"), r"the opcode b'\('|the opcode b'i'"),
        (frames(pickle.MARK, pickle.NONE, pickle.OBJ), r"the opcode b'o'"),
        (frames(pickle.PERSID, b"x\n"), r"the opcode b'P'"),
        (frames(pickle.EXT1, b"\x01"), r"the opcode b'\\x82'"),
        (frames(pickle.NONE, pickle.NONE, pickle.NONE, pickle.NEWOBJ_EX), r"the opcode b'\\x92'"),
        (frames(pickle.NONE, pickle.POP), r"the opcode b'0'"),
        (frames(pickle.NEXT_BUFFER), r"the opcode b'\\x97'"),
        (frames(pickle.BINUNICODE, struct.pack("<I", 2**32 - 1)), "asks for 4294967295 bytes"),
        (frames(pickle.FRAME, struct.pack("<Q", 2**62)), f"asks for {2**62} bytes"),
        (frames(pickle.NONE, pickle.LONG_BINPUT, b"\xff\xff\xff\xff"), "has a NoneType where"),
        (frames(pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, pickle.TUPLE1 * 10**6, pickle.NONE, pickle.SETITEM), "keys"),
        (frames(pickle.EMPTY_TUPLE, pickle.TUPLE1 * 10**6), "has a tuple where torch has a Metadata"),
        (frames(pickle.MARK * 10**5), "IndexError"),
        (b"", "EOFError"),
        (bytes(1000), r"the opcode b'\\x00'"),
    ],
)
def test_other_opcodes_and_huge_requests_are_refused(folder: Path, stream: bytes, text: str) -> None:
    (folder / ".metadata").write_bytes(stream)
    with pytest.raises(CheckpointError, match=rf"\.metadata is damaged: .*({text})"):
        read_metadata(folder)


def test_a_small_file_asks_for_no_large_memory(folder: Path) -> None:
    doubled = pickle.SHORT_BINUNICODE + b"\xff" + b"a" * 255 + pickle.MEMOIZE
    doubled += b"".join(2 * (pickle.BINGET + bytes([i])) + pickle.STACK_GLOBAL + pickle.MEMOIZE for i in range(20))
    assert "it has a text of 255 letters, of which 100 are read" in refused(folder, frames(doubled))
    objects: dict[str, Any] = dict.fromkeys("abcde", BytesStorageMetadata())
    data = pickle.dumps(Metadata(objects, {"a": ("b" * 9000,) * 900}, {}), 4)
    assert "a is not what joins its path" in refused(folder, data)


def placed(places: dict[str, Any], *, chunks: int = 1, numel: int = 10) -> Metadata:
    listed = [ChunkStorageMetadata(torch.Size([at * numel]), torch.Size([numel])) for at in range(chunks)]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([numel * chunks]), listed)
    saved: dict[str, Any] = {key: BytesStorageMetadata() if "object" in key else tensor for key in places}
    found = {
        MetadataIndex(key, None if "object" in key else listed[index].offsets): _StorageInfo(FILE, *place)
        for key, each in places.items()
        for index, place in enumerate(each)
    }
    return Metadata(saved, None, found)


@pytest.mark.parametrize(
    "names",
    [
        [f"optimizer.state.w.{number}" for number in range(30)],
        [f"optimizer.param_groups.{number}.lr" for number in range(30)],
        [f"model.object.{number}" for number in range(30)],
        ["model.a", *(f"object.{number}" for number in range(30))],
    ],
)
def test_values_have_no_more_bytes_than_the_files(folder: Path, names: list[str]) -> None:
    """A place takes 100 bytes of metadata: so 100 kB would take 1000 times the bytes of the file."""
    text = refused(folder, pickle.dumps(placed({name: [(0, 40)] for name in names})))
    assert "several values are in the same bytes of a file" in text


def test_chunks_at_one_offset_are_in_one_place(folder: Path) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 40
    tensor: dict[str, Any] = {"w": TensorStorageMetadata(TensorProperties(), torch.Size([40]), chunks)}
    found = Metadata(tensor, None, {MetadataIndex("w", chunks[0].offsets): _StorageInfo(FILE, 0, 100)})
    assert "in the same bytes of a file" in refused(folder, pickle.dumps(found))


def test_tied_tensors_are_in_one_place(folder: Path) -> None:
    places: dict[str, Any] = {f"model.{number}": [(0, 400), (500, 400)] for number in range(100)}
    (folder / ".metadata").write_bytes(pickle.dumps(placed(places, chunks=2)))
    assert read_metadata(folder).state_dict_metadata.keys() == places.keys()
    places["model.0"] = [(500, 400), (0, 400)]
    assert "in the same bytes of a file" in refused(folder, pickle.dumps(placed(places, chunks=2)))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"sizes": (2, 3)}, "a chunk lies outside its tensor"),
        ({"sizes": (2, 1)}, "do not have its number of elements"),
        ({"size": (10**15,), "offsets": (0,), "sizes": (10**15,)}, "a chunk of 4000000000000000 bytes has 100"),
        ({"size": (2**40,) * 2, "offsets": (), "sizes": ()}, "no memory can hold"),
        ({"size": (2**40, 0, 2**40), "offsets": (), "sizes": ()}, "no memory can hold"),
        ({"size": (0, 2**62, 2), "offsets": (), "sizes": ()}, "no memory can hold"),
        ({"size": (1,) * 65, "offsets": (0,) * 65, "sizes": (1,) * 65}, "no memory can hold"),
        ({"at": 950}, "ends behind the end of __0_0.distcp"),
        ({"at": 2**61, "length": 2**61}, "ends behind the end"),
        ({"length": 7}, "a chunk of 8 bytes has 7"),
        ({"offsets": (0, 0), "sizes": (4, 0), "length": 15}, "a chunk of 16 bytes has 15"),
        ({"offsets": (0, 0), "sizes": (0, 4), "length": 15}, "a chunk of 16 bytes has 15"),
        ({"length": -1}, "is negative"),
        ({"at": -1}, "is negative"),
        ({"at": 2**70}, "more than 64 bits"),
        ({"name": "/dev/zero"}, "is not the plain name of a file"),
        ({"name": "../outside"}, "is not the plain name of a file"),
        ({"name": ".."}, "is not the plain name of a file"),
        ({"name": "a\0b"}, "is not the plain name of a file"),
        ({"name": "sub/file"}, "is not the plain name of a file"),
        ({"name": "pipe"}, "is not a regular file"),
        ({"name": "sub"}, "is not a regular file"),
        ({"name": "link"}, "leads out of its folder"),
        ({"name": "device"}, "leads out of its folder"),
        ({"name": "absent"}, "absent is missing"),
    ],
)
def test_sizes_and_names_are_checked(folder: Path, changed: dict[str, Any], text: str) -> None:
    inside = folder / "sent"
    (inside / "sub").mkdir(parents=True)
    (folder / "outside").write_bytes(bytes(1000))
    (inside / FILE).write_bytes(bytes(1000))
    (inside / "sub" / "file").write_bytes(bytes(1000))
    (inside / "link").symlink_to(folder / "outside")
    (inside / "device").symlink_to("/dev/zero")
    os.mkfifo(inside / "pipe")
    assert text in refused(inside, pickle.dumps(metadata(**changed)))


def test_compressed_values_are_refused(folder: Path) -> None:
    """Torch reads what its transforms decompress as a whole, of any size."""
    found = metadata()
    next(iter(found.storage_data.values())).transform_descriptors = ["zstd"]
    assert "a value is compressed: torch.distributed.checkpoint.load reads it" in refused(folder, pickle.dumps(found))


@pytest.mark.parametrize("path", [(), (7,), ((),), ("a", None)])
def test_a_path_begins_with_a_name(folder: Path, path: Any) -> None:
    found = metadata()
    found.planner_data = {"w": path}
    assert "where torch has a str" in refused(folder, pickle.dumps(found))


def test_a_negative_dim_is_refused(folder: Path) -> None:
    data = pickle.dumps(metadata(size=(77,), offsets=(0,), sizes=(77,)), 4)
    assert "is negative" in refused(folder, raw_sizes(data, 77, pickle.BININT + struct.pack("<i", -1)))


def test_shared_chunks_do_not_multiply_the_work(folder: Path) -> None:
    """A list of 20,000 chunks that 20,000 tensors share takes 600 kB. To read it each time takes 4 * 10**8 steps."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([0]), [chunk] * 20_000)
    saved: dict[str, Any] = {f"{number}": tensor for number in range(20_000)}
    assert "it repeats chunks" in refused(folder, pickle.dumps(Metadata(saved, None, {})))


def test_values_that_a_pickle_shares_do_not_multiply_the_work(folder: Path) -> None:
    """A pickle names an object again in three bytes: what is made of it is made once, or refused."""
    key, path = "a.b", ("a", "b")
    objects: dict[str, Any] = {f"{number}": BytesStorageMetadata() for number in range(1000)} | {
        key: BytesStorageMetadata()
    }
    paths = dict.fromkeys(objects, path)
    assert "0 is not what joins its path" in refused(folder, pickle.dumps(Metadata(objects, paths, {})))
    long = "a" + ".a" * 1001  # 80 keys of 9,900 dots took 100 s to compare with the names in param groups
    tensors: dict[str, Any] = {long: BytesStorageMetadata()}
    assert "a path of more than 1000 parts" in refused(folder, pickle.dumps(Metadata(tensors, {long: (long,)}, {})))


def test_a_link_within_the_folder_is_read(folder: Path) -> None:
    (folder / "link").symlink_to(folder / FILE)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata(name="link")))
    assert read_metadata(folder).state_dict_metadata.keys() == {"w"}


@pytest.mark.behaviour("F-12")
def test_random_pickles_do_no_harm(tmp_path: Path) -> None:
    """``harmless(10_000, seed, folder)`` reads more of them."""
    assert harmless(300, 57, tmp_path) < 300


def test_the_fuzzer_sees_changed_classes_and_touched_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes()
    monkeypatch.setattr(pathlib.PurePath, "with_name", None)
    ((changed, *_), *_) = {key for key, value in attributes().items() if before.get(key) != value}
    assert "PurePath" in changed
    with watched(tmp_path / "inside") as touched:
        (tmp_path / "outside").write_text("")
        (tmp_path / "outside").unlink()
    assert [each.split("(")[0] for each in touched] == ["open", "os.remove"]
    assert pickle.loads(valid_metadata(tmp_path)).storage_meta.save_id == "save"
