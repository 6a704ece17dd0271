"""Files of ``torch.save`` that somebody has sent: what takes more memory or time than their bytes is refused."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.serialization import config as serialization_config

from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import CheckpointError
from tests._internals import check_archive, checkpoint_save
from tests.helpers.single_rank_checkpoints import trained


def archive(stream: bytes, kind: int = zipfile.ZIP_STORED, name: str = "archive/data.pkl") -> bytes:
    """Return a file as torch.save writes it, with any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as file:
        for each, data in ((name, stream), ("archive/byteorder", b"little"), ("archive/version", b"3\n")):
            file.writestr(each, data)
    return out.getvalue()


def check(data: bytes) -> None:
    file = io.BytesIO(data)
    check_archive(file)
    assert file.tell() == 0


def called(name: str, arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + arguments + pickle.REDUCE


def number(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


HUGE = number(1 << 40) + pickle.TUPLE1
DOUBLED = b"".join(pickle.BINPUT + b"\x01" + pickle.BINGET + b"\x01" + pickle.TUPLE2 for _ in range(60))
STREAMS = {
    "a deep key": (b"})" + 5000 * pickle.TUPLE1 + b"K\x01s", "nested 5002 deep"),
    "a doubled key": (b"})" + DOUBLED + b"K\x01s", "values in 308 bytes, nested 62 deep"),
    "a key of many uses": (b"(" + 2000 * b"K\x01" + b"tq\x01}(" + 2000 * b"h\x01K\x02" + b"u", r"4.\d*e\+06 values"),
    "the elements of a set": (called("builtins.set", b"](" + b")" + DOUBLED + b"e" + pickle.TUPLE1), "values in"),
    "values left behind": (b"})" + DOUBLED + b"K\x01sN", "values in"),
    "bytes": (called("builtins.bytearray", HUGE), "it calls builtins.bytearray"),
    "a tensor": (called("torch.Tensor", HUGE), r"it calls torch\.Tensor, which gives memory of any size"),
    "a storage": (called("torch.storage.UntypedStorage", HUGE), r"it calls torch\.storage\.UntypedStorage"),
    "a new tensor": (b"ctorch\nFloatTensor\n" + HUGE + pickle.NEWOBJ, r"it calls torch\.FloatTensor"),
    "a call by another": (
        called("torch._tensor._rebuild_from_type_v2", b"(cbuiltins\nbytearray\nctorch\nTensor\n" + HUGE + b"Nt"),
        "it calls builtins.bytearray",
    ),
    "a mesh": (
        called("torch.distributed.device_mesh.DeviceMesh", pickle.EMPTY_TUPLE),
        r"a torch\.distributed\.device_mesh\.DeviceMesh, which is not read: its constructor may call other ranks",
    ),
    "a later protocol": (pickle.EMPTY_LIST + pickle.MEMOIZE, r"it has the opcode b'\\x94'"),
    "no memo": (b"h\x05", "damaged: .*Error"),
    "no stack": (b"s", "damaged: IndexError"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_small_pickle_asks_for_little(case: str) -> None:
    stream, problem = STREAMS[case]
    with pytest.raises(CheckpointError, match=problem):
        check(archive(b"\x80\x02" + stream + pickle.STOP))


def test_what_torch_saves_is_let_through() -> None:
    repeated = (1, 2, 3)
    cycle: list[Any] = []
    cycle.append(cycle)
    weight = nn.Parameter(torch.zeros(2))
    values = {
        "plain": [None, True, 1, -(2**70), 0.5, 1j, "text", b"bytes", bytearray(b"more"), {1, 2}, torch.float32],
        "keys": {repeated: 1, (repeated, "x"): 2, 3: 4, None: 5},
        "classes": [OrderedDict(a=1), Counter("abc"), torch.Size((1, 2)), torch.device("cpu"), cycle],
        "tensors": [weight, torch.zeros(1).expand(10**6), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")],
        "many": list(range(10**5)),
    }
    out = io.BytesIO()
    torch.save(values, out)
    check(out.getvalue())
    out.seek(0)
    assert torch.load(out, weights_only=True).keys() == values.keys()


@pytest.mark.parametrize("case", ["compressed", "in one place", "another directory", "a comment", "upper case", "text"])
def test_a_zip_file_has_each_byte_once(case: str) -> None:
    nothing = b"\x80\x02" + 10**5 * b"N" + b"."
    data = bytearray(archive(nothing))
    start = data.index(b"PK\1\2")
    if case == "compressed":
        data = bytearray(archive(nothing, zipfile.ZIP_DEFLATED))
    elif case == "in one place":
        entries = bytes(data[start:-22])
        end = bytearray(data[-22:])
        end[8:16] = struct.pack("<HHI", 300, 300, 100 * len(entries))
        data = data[:start] + 100 * entries + end
    elif case == "another directory":
        data[start:start] = data[start:-22]
    elif case == "a comment":
        data[-2:] = b"\x01\x00 "
    elif case == "upper case":
        data = bytearray(archive(b"\x80\x02" + called("builtins.bytearray", HUGE) + b".", name="archive/DATA.PKL"))
    else:
        data = bytearray(b"hello")
    problems = {"compressed": "is compressed", "in one place": "larger than", "upper case": "calls builtins.bytearray"}
    with pytest.raises(CheckpointError, match=problems.get(case, "it is no file of torch.save")):
        check(bytes(data))


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("part", ["a tensor", "an object"])
def test_compressed_records_are_refused_wherever_they_are_read(tmp_path: Path, monkeypatch, part: str) -> None:
    model, optimizer = trained()
    written = torch.save

    def compressed(value: Any, file: Any) -> None:
        if isinstance(value, torch.Tensor) is not (part == "a tensor"):
            return written(value, file)
        plain, out = io.BytesIO(), io.BytesIO()
        with cast(Any, serialization_config).patch({"save.compute_crc32": True}):  # save does not
            written(value, plain)
        with zipfile.ZipFile(plain) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
            for record in source.infolist():
                target.writestr(record.filename, source.read(record))
        file.write(out.getvalue())
        return None

    monkeypatch.setattr(checkpoint_save, "check_archive", lambda file: None)  # save asks whether load reads it
    monkeypatch.setattr(torch, "save", compressed)
    save(tmp_path, model, optimizer, {"a": 1}, step=1)
    monkeypatch.undo()
    where = "the tensors in .* cannot be read" if part == "a tensor" else r"'ranks\.0\.extra' cannot be read"
    with pytest.raises(CheckpointError, match=rf"{where}: .*a record of it is compressed\. Save it again"):
        load(tmp_path, model, optimizer)
