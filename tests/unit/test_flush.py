"""Flushes of changed weights: their bytes, their order, and what a receiver refuses."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from composable_fsdp import stream_changed_params
from composable_fsdp.errors import ConfigurationError, FlushError, ParameterError
from composable_fsdp.plugins.weight_stream import Flush, Position, SentParams, WeightStream, apply_changes
from tests.helpers.sharding import single_rank
from tests.helpers.tensor_classes import model_of

State = dict[str, torch.Tensor]


class Sender:
    """A model that changes a little from update to update, and what a receiver of all updates has."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.sent, self.dtype = SentParams(), dtype

    def update(self, bucket_bytes: int = 1, **options: Any) -> list[bytes]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.view(-1)[::7] += 1
        stream = stream_changed_params(self.model, self.sent, bucket_bytes, self.dtype, whole_above=0.6, **options)
        return [flush.to_bytes() for flush in stream]

    def values(self) -> State:
        return {name: value.detach().to(self.dtype) for name, value in self.model.named_parameters()}

    def state(self) -> State:
        return {name: torch.zeros_like(value) for name, value in self.values().items()}


def receive(state: State, flushes: list[bytes], last: Position | None = None) -> Position:
    for flush in flushes:
        last = apply_changes(state, Flush.from_bytes(flush), last)
    assert last is not None
    return last


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(state: State, values: State) -> None:
    for name, value in values.items():
        assert torch.equal(bits(state[name]), bits(value)), name


def edited(data: bytes, indices: list[int] | None = None, **changes: Any) -> bytes:
    """Return the flush with other first indices or values in its header, and the checksum of that."""
    size = int.from_bytes(data[:8], "little")
    entries, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    places = {name: slice(*entries[name]["data_offsets"]) for name in ("indices", "values")}
    for k, index in enumerate(indices or ()):
        begin = places["indices"].start + 4 * k
        body[begin : begin + 4] = index.to_bytes(4, "little", signed=True)
    header = json.dumps({**json.loads(entries["__metadata__"]["flush"]), **changes})
    found = crc32(body[places["values"]], crc32(body[places["indices"]], crc32(header.encode())))
    entries["__metadata__"] = {"flush": header, "crc32": f"{found:08x}"}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2], ids=str)
def test_lost_repeated_and_reordered_flushes_are_refused_and_all_values_mend_it(dtype: torch.dtype) -> None:
    sender = Sender(dtype)
    state = sender.state()
    first, second, third = sender.update(), sender.update(), sender.update()
    assert len(first) == len(second) > 2
    with pytest.raises(FlushError, match=r"^flush \d of stream \d+ is not the next one: this receiver has none yet\."):
        receive(state, second)
    assert_same(state, sender.state())
    position = receive(state, first)
    assert position == (position.stream, len(first) - 1, True)
    before = {name: value.clone() for name, value in state.items()}
    for wrong in (second[1], first[-1], third[0]):
        text = r"is not the next one: this receiver is at flush \d+ of stream \d+\. A fl"
        with pytest.raises(FlushError, match=text):
            receive(state, [wrong], position)
    with pytest.raises(FlushError, match=r"^flush 0 begins stream (\d+), and .* of stream \1, which is not older\. It"):
        receive(state, first, position)
    assert_same(state, before)
    assert not receive(state, second[:1], position).is_complete
    position = receive(state, second[1:] + third, receive(state, second[:1], position))
    assert_same(state, sender.values())
    lost = sender.update()[:-1]
    position = receive(state, lost, position)
    with pytest.raises(FlushError, match=r"ask the sender for everything: SentParams\.forget\(\)\.$"):
        receive(state, sender.update(), position)
    sender.sent.forget()
    everything = sender.update()
    assert all(Flush.from_bytes(flush).is_whole for flush in everything)
    receive(state, sender.update(), receive(state, everything, position))
    assert_same(state, sender.values())
    with pytest.raises(FlushError, match="which is not older"):  # of the stream before
        receive(state, first, receive(state, everything))


def test_a_flush_with_any_byte_changed_or_cut_is_refused_or_right() -> None:
    sender = Sender()
    first, second = sender.update(), sender.update()
    state = sender.state()
    position = receive(state, first)
    before = {name: value.clone() for name, value in state.items()}
    after = {name: value.clone() for name, value in before.items()}
    apply_changes(after, Flush.from_bytes(second[0]), position)
    refused = 0
    for at in range(len(second[0])):
        for bit in (1, 0x80):
            damaged = bytearray(second[0])
            damaged[at] ^= bit
            try:
                receive(state, [bytes(damaged)], position)
            except FlushError:
                refused += 1
                assert_same(state, before)
            else:  # space that nobody reads, or the case of a digit of the checksum
                assert_same(state, after)
                state = {name: value.clone() for name, value in before.items()}
        with pytest.raises(FlushError):
            Flush.from_bytes(second[0][:at])
    assert refused > 1.9 * len(second[0])
    damaged = bytearray(second[0][:-1] + b"\x77")
    with pytest.raises(FlushError, match=r" it is damaged: its checksum is [0-9a-f]{8}, and the sender wrote [0-9a-f]"):
        Flush.from_bytes(damaged)


def test_headers_of_attackers_are_refused_and_nothing_is_written() -> None:
    sender = Sender()
    first = sender.update()
    second = sender.update(1 << 20)  # other buckets: everything
    state = sender.state()
    position = receive(state, first)
    second, position = sender.update(1 << 20), receive(state, second, position)
    before = {name: value.clone() for name, value in state.items()}
    (name, shape, count), *rest = Flush.from_bytes(second[0]).tensors
    for changes, match in (
        ({"format": "other/1"}, "it has the format 'other/1' of another program or version, not 'composable_fsdp"),
        ({"stream": "now"}, "^these bytes are no flush: ValueError"),
        ({"stream": "-1"}, "make no sense"),
        ({"dtype": "F99"}, "no flush: KeyError"),
        ({"dtype": ["F32"]}, "no flush: TypeError"),
        ({"more": 1}, "no flush: TypeError"),
        ({"number": 1.5}, "make no sense"),
        ({"number": True}, "make no sense"),
        ({"parts": 0}, "make no sense"),
        ({"tensors": 3}, "no flush: TypeError"),
        ({"tensors": [[name, shape, -1], *rest]}, "make no sense"),
        ({"tensors": [[name, [-1, 5], count], *rest]}, "make no sense"),
        ({"tensors": [[name, shape, prod(shape) + 1], *rest]}, "make no sense"),
        ({"tensors": [[name, shape, count + 1], *rest]}, "its tensors are not those of its header"),
        ({"tensors": [[name, shape, count], [name, shape, count], *rest[1:]]}, "make no sense"),
        ({"tensors": [[3, shape, count], *rest]}, "make no sense"),
        ({"tensors": [["other", shape, count], *rest]}, "does not fit the state: it has no 'other'"),
        ({"tensors": [[name, [*shape, 1], count], *rest]}, rf"'{name}' is \(.*\) of torch.bfloat16, and \(.*, 1\) of"),
        ({"aliases": [["a", name]]}, "no flush: AttributeError"),
        ({"aliases": {"a": "b"}}, "make no sense"),
        ({"aliases": {name: name}}, "make no sense"),
        ({"tensors": [[name, [1 << 61] * 50_000, count]]}, "make no sense"),
        ({"tensors": [[name, [1 << 61, 1 << 61], count], *rest]}, "make no sense"),
        ({"is_whole": "no"}, "is_whole is no bool"),
        ({"is_whole": True}, "make no sense"),
        ({"number": 0, "stream": str(position.stream + 1)}, "^flush 0 begins a stream and has no full values"),
        ({"dtype": "F16"}, "its tensors are not those of its header"),
    ):
        with pytest.raises(FlushError, match=match):
            receive(state, [edited(second[0], **changes)], position)
    for indices, match in (
        *(([index], "indices outside of their tensors") for index in (-1, prod(shape), 1 << 30)),
        ([0, 0], "indices that do not ascend in their tensor"),
        ([1, 0], "indices that do not ascend in their tensor"),
    ):
        with pytest.raises(FlushError, match=f"^these bytes are no flush: ValueError: it has {match}"):
            receive(state, [edited(second[0], indices)], position)
    for data in (b"", b"\xff" * 8, (1 << 60).to_bytes(8, "little") + b"{}", b"\2" + bytes(7) + b"[]"):
        with pytest.raises(FlushError):
            Flush.from_bytes(data)
    half: dict[str, Any] = {"__metadata__": {"flush": "\ud800", "crc32": "0"}}
    half["values"] = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}
    for text in (json.dumps(half), "[" * 100_000, "{}", "[]", "3", '{"__metadata__":3,"values":{}}', "nan"):
        with pytest.raises(FlushError, match=r"^these bytes are no flush: "):
            Flush.from_bytes(len(text).to_bytes(8, "little") + text.encode())
    assert_same(state, before)
    apply_changes(state, Flush.from_bytes(second[0]), position)
    assert_same(state, sender.values())


class Plain:
    """A receiver that follows ``docs/wire.md`` on arrays of bytes, without this library."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.last = ("", -1)

    def apply(self, data: bytes) -> None:
        size = int.from_bytes(data[:8], "little")
        entries, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        metadata = entries["__metadata__"]
        header = json.loads(metadata["flush"])
        parts = {name: body[slice(*entries[name]["data_offsets"])] for name in ("indices", "values") if name in entries}
        found = crc32(parts["values"], crc32(parts.get("indices", b""), crc32(metadata["flush"].encode())))
        assert found == int(metadata["crc32"], 16)
        assert header["number"] == 0 or (header["stream"], header["number"]) == (self.last[0], self.last[1] + 1)
        self.last = header["stream"], header["number"]
        width = {"BF16": 2, "F32": 4}[header["dtype"]]
        values = np.frombuffer(parts["values"], dtype=f"u{width}")
        begin = 0
        for name, shape, count in header["tensors"]:
            array = self.arrays.setdefault(name, np.zeros(prod(shape), dtype=f"u{width}"))
            if header["is_whole"]:
                array[:] = values[begin : begin + count]
            else:
                kind = {"I32": "i4", "I64": "i8"}[entries["indices"]["dtype"]]
                array[np.frombuffer(parts["indices"], dtype=kind)[begin : begin + count]] = values[
                    begin : begin + count
                ]
            begin += count


def test_another_program_can_read_a_flush_by_the_page_of_its_form() -> None:
    sender, other = Sender(), Plain()
    for data in (data for _ in range(4) for data in sender.update()):
        other.apply(data)
    for name, value in sender.values().items():
        assert value.view(torch.uint8).numpy().tobytes() == other.arrays[name].tobytes(), name


def test_the_safetensors_library_reads_a_flush_and_patches_have_the_form_of_vllm() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    sender = Sender()
    sender.update()
    data = sender.update()[0]
    tensors, flush = safetensors.load(data), Flush.from_bytes(data)
    assert flush.indices is not None
    assert flush.values is not None
    assert torch.equal(tensors["indices"], flush.indices)
    assert torch.equal(tensors["values"], flush.values)
    for patch in flush.patches():
        assert patch._fields == ("name", "shape", "dtype", "values", "indices")
        assert patch.indices is not None
        assert torch.equal(sender.values()[patch.name].view(-1)[patch.indices.long()], patch.values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "flushes"
    made.mkdir()
    return made


def test_files_appear_as_a_whole_in_their_order_and_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    sender, names = Sender(), []
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for _ in range(3):
        with torch.no_grad():
            sender.model[0].weight.view(-1)[::9] -= 1  # type: ignore[operator]
        for flush in stream_changed_params(sender.model, sender.sent, 70, torch.bfloat16):
            path = flush.save(folder)
            names.append(path.name)
    assert sorted(os.listdir(folder)) == names
    state, position = sender.state(), None
    for name in names:
        position = apply_changes(state, Flush.load(folder, name), position)
    assert_same(state, sender.values())
    (folder / names[0]).unlink()
    (folder / names[0]).symlink_to(victim)
    with pytest.raises(OSError, match="leads out of its folder"):
        Flush.load(folder, names[0])
    for name in ("../victim", "", "no"):
        with pytest.raises(OSError, match=r"plain name of a file|No such file"):
            Flush.load(folder, name)
    with pytest.raises(FlushError, match=r"has \d+ bytes, at most 10 are read\. Pass most_bytes\.$"):
        Flush.load(folder, names[1], most_bytes=10)
    sender.sent.forget()
    flush = next(iter(stream_changed_params(sender.model, sender.sent, 1 << 20, torch.bfloat16)))
    link = folder / f"{flush.stream:020d}-{0:08d}.safetensors"
    link.symlink_to(victim)
    assert flush.save(folder) == link
    assert not link.is_symlink()
    assert victim.read_text() == "mine"


def test_states_of_many_kinds_are_written_in_place() -> None:
    sender = Sender()
    values = sender.state()
    with torch.inference_mode():
        made = {name: value.clone() for name, value in values.items()}
    strided = {name: torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 1] for name, value in values.items()}
    parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    states: list[dict[str, Any]] = [made, strided, parameters, {**values, "more": torch.ones(2)}]
    position = None
    for data in (data for _ in range(3) for data in sender.update()):
        position, *_ = (apply_changes(state, Flush.from_bytes(data), position) for state in states)
    for state in states:
        assert_same(state, sender.values())
    with single_rank():
        placed: dict[str, torch.Tensor] = {
            name: distribute_tensor(value, init_device_mesh("cpu", (1,))) for name, value in values.items()
        }
        with pytest.raises(FlushError, match=r"'0\.weight' is a DTensor, not a plain tensor"):
            receive(placed, sender.update(1 << 20))


def test_tied_names_scalars_empty_and_integer_parameters() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(3, 4))
    model.b = model.a
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.empty = nn.Parameter(torch.empty(0, 4))
    model.table = nn.Parameter(torch.arange(9), requires_grad=False)
    sent, position = SentParams(), None
    values = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    both = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: value.clone() for name, value in both.items() if name != "a"}
    for _ in range(3):
        with torch.no_grad():
            model.a[1, 2] = float("nan")
            model.scalar.neg_()
            model.table[3] += 1
        for flush in stream_changed_params(model, sent, whole_above=1):
            data = Flush.from_bytes(flush.to_bytes())
            apply_changes(second, data, position)
            position = apply_changes(both, data, position)
        assert_same(both, values)
        assert_same(second, {name: values[name] for name in second})


def test_arguments_and_parameters_that_make_no_sense() -> None:
    model = nn.Linear(2, 2)
    for arguments, match in (
        (
            {"since": None},
            r"^stream_changed_params needs since=SentParams\(\), kept from call to call, and whole_above",
        ),
        ({"since": SentParams(), "whole_above": 2}, "and whole_above from 0 to 1, not SentParams and 2"),
        ({"since": SentParams(), "bucket_bytes": 0}, "^bucket_bytes is"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            stream_changed_params(model, **arguments)
    model.weight = nn.Parameter(model.weight.to(torch.complex128))
    text = r"^parameter 'weight' is of torch.complex128, of which stream_changed_par"
    with pytest.raises(ParameterError, match=text):
        stream_changed_params(model, SentParams())
    assert len(stream_changed_params(model, SentParams(), key_map=lambda name: None if name == "weight" else name)) == 1
    with pytest.raises(ParameterError, match=r"^parameter 'pair\.weight' is of a class that wraps other tensors, "):
        stream_changed_params(model_of(["pair"], 0), SentParams())


def test_a_model_without_parameters_has_no_flushes() -> None:
    sent = SentParams()
    for _ in range(3):
        assert list(stream_changed_params(nn.Linear(2, 2), sent, key_map=lambda name: None)) == []


def test_flushes_are_empty_once_the_next_one_is_asked_for() -> None:
    sender, kept, copies = Sender(), [], []
    for flush in stream_changed_params(sender.model, sender.sent, 70):
        kept.append(flush)
        copies.append(flush.clone())
    with pytest.raises(FlushError, match=r"^this flush has no values: the stream has gone on to the next one, or this"):
        kept[0].to_bytes()
    assert sum(len(Flush.from_bytes(copy.to_bytes()).tensors) for copy in copies) == 4
    assert sender.sent.nbytes >= sum(p.nbytes for p in sender.model.parameters())


@pytest.mark.parametrize(
    "place",
    [
        torch.zeros(1, 1).expand(3, 4),
        torch.zeros(3, 4).to_sparse(),
        torch.zeros(3, 4, device="meta"),
        torch._neg_view(torch.zeros(3, 4)),
        torch.zeros(3, 4, dtype=torch.complex64).conj(),
    ],
    ids=["expanded", "sparse", "meta", "negative", "conjugate"],
)
def test_a_tensor_that_cannot_be_written_is_refused_before_another_is_written(place: torch.Tensor) -> None:
    model = nn.Module()
    model.first = nn.Parameter(torch.ones(3, 4, dtype=place.dtype))
    model.second = nn.Parameter(torch.ones(3, 4, dtype=place.dtype))
    (flush,) = (each.clone() for each in stream_changed_params(model, SentParams()))
    state = {"first": torch.zeros(3, 4, dtype=place.dtype), "second": place}
    with pytest.raises(FlushError, match=r"'second' is on meta, sparse, or a conjugate, .*\. Nothing is written\.$"):
        apply_changes(state, flush)
    assert not state["first"].any()


def test_values_noted_by_a_call_that_fails_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no connection")

    sender = Sender()
    state = sender.state()
    position = receive(state, sender.update(1 << 20))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(WeightStream, "_agree", fail)
            with pytest.raises(RuntimeError, match="no connection"):
                sender.update(1 << 20)
        with torch.no_grad():  # only what update() changes itself differs from then on
            for parameter in sender.model.parameters():
                parameter.view(-1)[::7] -= 1
                parameter.view(-1)[1::7] += 1
    receive(state, sender.update(1 << 20), position)
    assert_same(state, sender.values())


def test_another_name_or_shape_of_a_parameter_has_all_values() -> None:
    model, sent = nn.Module(), SentParams()
    model.a = nn.Parameter(torch.randn(50, 20))
    model.b = model.a
    assert [flush.aliases for flush in stream_changed_params(model, sent, key_map={"a": "a"}.get)] == [{}]
    (named,) = (flush.clone() for flush in stream_changed_params(model, sent))
    assert (named.is_whole, named.aliases) == (True, {"b": "a"})
    for shape in (20, 50), (7, 9), (70, 90):
        model.a.data = torch.randn(shape)
        state = {"a": torch.zeros(shape)}
        for flush in stream_changed_params(model, sent):
            apply_changes(state, flush)
        assert torch.equal(state["a"], model.a)


def test_dtypes_without_a_name_in_safetensors_are_refused_before_anything_is_sent() -> None:
    model = nn.Linear(2, 2)
    model.more = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fnuz), requires_grad=False)
    with pytest.raises(
        ParameterError, match=r"^parameter 'more' is of torch\.float8_e4m3fnuz, of which stream_changed"
    ):
        stream_changed_params(model, SentParams())
