"""safetensors files: layout, reading, loading into unsharded models, atomic replacement."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composable_fsdp.checkpoint import load_safetensors, save_safetensors
from composable_fsdp.errors import CheckpointError, ConfigurationError
from tests._internals import (
    DTYPES,
    Cut,
    LocalShard,
    Replacement,
    ShardExtent,
    TensorSpec,
    dtype_code,
    main_file,
    read_headers,
)
from tests._internals import safetensors_files as stored


class Small(nn.Module):
    """Has tied weights, a persistent buffer, a non-persistent buffer and an expanded buffer."""

    spread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("spread", torch.zeros(1).expand(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def filled(seed: int) -> Small:
    torch.manual_seed(seed)
    model = Small()
    with torch.no_grad():
        for value in [*model.parameters(), model.get_buffer("norm.running_mean")]:
            value.copy_(torch.randn(value.shape))
    return model


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


library = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")
pytestmark = pytest.mark.behaviour("F-11")
NOWHERE = Path("/nowhere")
NAMES = st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__")


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    return [TensorSpec(n, draw(st.sampled_from(sorted(DTYPES.values(), key=str))), draw(shapes)) for n in names]


@given(specs(), st.integers(1, 200))
def test_files_are_no_larger_than_asked_and_aligned_and_keep_the_order(tensors, limit: int) -> None:
    files = Replacement.of(NOWHERE, tensors, {}, limit).files
    for file in files:
        assert len(file.tensors) <= 1 or sum(spec.nbytes for spec in file.tensors) <= limit
        assert all(file.offsets[spec.name] % spec.dtype.itemsize == 0 for spec in file.tensors)
    places = {spec.name: i for i, file in enumerate(files) for spec in file.tensors}
    assert [places[spec.name] for spec in tensors] == sorted(places.values())
    assert len(places) == len(tensors)


@given(specs())
def test_the_safetensors_library_reads_files_of_this_layout(tmp_path_factory, tensors) -> None:
    (file,) = Replacement.of(NOWHERE, tensors, {"other": tensors[0].name} if tensors else {}, 10**6).files
    data = bytes(i % 251 for i in range(file.nbytes - len(file.header)))
    path = tmp_path_factory.mktemp("layout") / file.name
    path.write_bytes(file.header + data)
    found = library.load_file(path)
    assert found.keys() == {spec.name for spec in tensors}
    for spec in tensors:
        begin = file.offsets[spec.name] - len(file.header)
        assert (found[spec.name].dtype, tuple(found[spec.name].shape)) == (spec.dtype, spec.shape)
        content = found[spec.name].reshape(-1).view(torch.uint8)
        assert bytes(content.tolist()) == data[begin : begin + spec.nbytes]


def test_several_files_have_an_index_and_one_has_none(tmp_path: Path) -> None:
    tensors = [TensorSpec(name, torch.bfloat16, (3,)) for name in "abc"]
    assert [f.name for f in Replacement.of(tmp_path, tensors, {}, 18).files] == ["model.safetensors"]
    files = Replacement.of(tmp_path, tensors, {"tied": "a"}, 12)
    with files.begun() as aside:
        files.commit(aside)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 18},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    metadata = [json.loads(file.header[8:])["__metadata__"] for file in files.files]
    assert metadata == [{"format": "pt", "tied": "a"}, {"format": "pt"}]
    beside = Replacement.of(tmp_path, tensors, {}, 12)
    assert beside.files[0].name == f"model-{beside.token}-00001-of-00002.safetensors"


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold torch\.complex128\. They hold torch\.bool"):
        dtype_code(torch.complex128)


def test_a_tensor_of_the_name_of_a_headers_metadata_is_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    (tmp_path / "model.safetensors").write_bytes(b"before")
    with pytest.raises(CheckpointError, match="cannot hold a tensor called __metadata__"):
        save_safetensors(model, tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_blocks_are_read_in_pieces_run_by_run(tmp_path: Path, monkeypatch) -> None:
    full = torch.arange(24 * 10, dtype=torch.float32).view(24, 10)
    library.save_file({"t": full, "one": torch.tensor(3), "wide": full.double() + 0.5}, tmp_path / "a.safetensors")
    monkeypatch.setattr(stored, "BLOCK_BYTES", 160)
    reads: list[int] = []
    real = os.preadv

    def counted(file: int, buffers: list[memoryview], at: int) -> int:
        reads.append(real(file, buffers, at))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counted)
    found = read_headers(tmp_path)
    for name, expected in (("t", full), ("wide", full.double() + 0.5)):
        extent = ShardExtent.after((24, 10), [Cut(1, 2, 1), Cut(0, 2, 0)])
        values = torch.zeros(extent.local_shape, dtype=expected.dtype)
        for box, piece in found[name].blocks(extent.boxes()):
            assert sum((n - 1) * s for n, s in zip(box.sizes, (10, 1), strict=True)) < 160 // piece.itemsize
            values[box.local_offsets[0] : box.local_offsets[0] + box.sizes[0]] = piece
        assert torch.equal(values, expected[:12, 5:])
    assert reads == [4 * 5] * 12 + [8 * 5] * 12
    ((_, one),) = found["one"].blocks(ShardExtent.after(()).boxes())
    assert one.item() == 3


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch, size: int) -> None:
    file, model = tmp_path / "model.safetensors", nn.Linear(300, 300, bias=False)
    save_safetensors(model, tmp_path)
    real = LocalShard.plain

    def shrinking(*arguments: Any, **options: Any) -> Any:
        os.truncate(file, size % file.stat().st_size)
        return real(*arguments, **options)

    monkeypatch.setattr(LocalShard, "plain", shrinking)
    with pytest.raises(CheckpointError, match=r"s could not be read at 'weight': its end is missing.*loaded in part"):
        load_safetensors(model, tmp_path)


def index(folder: Path, **weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_a_directory_is_read_as_transformers_does(tmp_path: Path) -> None:
    one, two = {"x": torch.ones(1)}, {"x": torch.zeros(1)}
    library.save_file(one, tmp_path / "some.safetensors")
    assert main_file(tmp_path).name == "some.safetensors"
    index(tmp_path, x="some.safetensors")
    assert main_file(tmp_path).name == "model.safetensors.index.json"
    library.save_file(two, tmp_path / "model.safetensors")
    assert main_file(tmp_path).name == "model.safetensors"


DAMAGED_INDEXES: dict[bytes, str] = {
    b"": "JSONDecodeError: Expecting value",
    b"{": "JSONDecodeError: ",
    b"[]": "TypeError: ",
    b"{}": "KeyError: 'weight_map'",
    b'{"weight_map": [["x", "good.safetensors"]]}': "AttributeError: 'list' object has no attribute 'items'",
    b'{"weight_map": {"a": "good.safetensors", "a": "good.safetensors"}}': "ValueError: 'a' is in it twice",
    b'{"weight_map": {}, "weight_map": {}}': "ValueError: 'weight_map' is in it twice",
    **{b'{"weight_map": {"x": %s}}' % it: "TypeError: the file of 'x' is no text" for it in (b"1", b"null", b"{}")},
    b'{"weight_map": {"x": %s}}' % (b"[" * 10**5): "RecursionError: ",
    b'{"weight_map": {"x": %s}}' % (b"9" * 10**5): "ValueError: Exceeds the limit",
    b"\xff" * 10**6: "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte$",
}
"""Each with the problem that its error names. The last one's is not as long as the file."""


def damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield paths of damaged or missing files with the expected error of each."""
    good = folder / "good.safetensors"
    library.save_file({"x": torch.ones(100)}, good)
    (folder / "empty").mkdir()
    yield folder / "empty", r"empty should have one safetensors file or index, but has none"
    yield folder / "absent.safetensors", r"absent\.safetensors is missing"
    yield folder / "absent.index.json", r"absent\.index\.json is missing"
    for size in (0, 4, 20, good.stat().st_size - 1):
        cut = folder / f"cut{size}.safetensors"
        cut.write_bytes(good.read_bytes()[:size])
        yield cut, rf"cut{size}\.safetensors is damaged, or no safetensors file: "
    header = folder / "header.safetensors"
    header.write_bytes(good.read_bytes().replace(b'"dtype"', b'"dtypo"'))
    yield header, r"header\.safetensors is damaged, or no safetensors file: "
    yield index(folder, x="gone.safetensors"), r"gone\.safetensors is missing\. model\.s.*json says that 'x' is in it"
    yield index(folder, x="good.safetensors", y="good.safetensors"), r"good\.safetensors lacks tensors .* has: y"
    library.save_file({"x": torch.ones(100), "z": torch.ones(1)}, folder / "more.safetensors")
    yield (
        index(folder, x="good.safetensors", z="more.safetensors"),
        "'x' is in two files: .*/good.saf.* and .*/more.saf",
    )
    yield index(folder, x="more.safetensors"), r"unexpected \(1\):\n    z: float32 \(1,\)"
    for text, problem in DAMAGED_INDEXES.items():
        (folder / "bad.index.json").write_bytes(text)
        yield folder / "bad.index.json", rf"bad\.index\.json is damaged, or no safetensors index: {problem}"
    library.save_file({"x": torch.ones(1)}, folder / "empty" / "a.safetensors")
    library.save_file({"x": torch.ones(1)}, folder / "empty" / "b.safetensors")
    yield folder / "empty", r"several: a\.safetensors, b\.safetensors\. Pass the path of one"


def test_an_error_about_an_index_is_short(tmp_path: Path) -> None:
    """The first of many missing files is named; a text with all names of a file is cut."""
    with pytest.raises(CheckpointError, match=r"0 is missing\. model.safetensors.index.json says that '0' is in it\.$"):
        read_headers(index(tmp_path, **{str(i): str(i) for i in range(10**5)}))
    library.save_file({"x": torch.ones(1)}, tmp_path / "a")
    for names in ({str(i): "a" for i in range(3 * 10**5)}, {"x" * 2**21: "a"}):
        with pytest.raises(CheckpointError, match=r"lacks tensors .* \(and \d+ characters more\)$") as raised:
            read_headers(index(tmp_path, **names))
        assert len(str(raised.value)) < 1.1e6


@pytest.mark.behaviour("F-12")
def test_damaged_or_missing_files_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(100))
    for path, message in damaged(tmp_path):
        with pytest.raises(CheckpointError, match=message):
            load_safetensors(model, path)
        assert not model.x.any()


NORM_BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_a_model_that_is_not_sharded_round_trips_with_its_ties(tmp_path: Path) -> None:
    model, other = filled(1), filled(2)
    model.spread = torch.full((1,), 7.0).expand(4)
    save_safetensors(model, tmp_path / "new")
    names = set(library.load_file(tmp_path / "new" / "model.safetensors"))
    assert names == set(model.state_dict()) - {"head.weight"}
    assert load_safetensors(other, tmp_path / "new") == ([], [])
    assert_alike(other, model)
    assert other.head.weight is other.embed.weight


def test_an_untied_model_loads_tied_values_into_both_parameters(tmp_path: Path) -> None:
    for limit in (1, 10**9):
        save_safetensors(filled(1), tmp_path, max_file_bytes=limit)
        other = filled(2)
        other.head.weight = nn.Parameter(torch.zeros(5, 3))
        load_safetensors(other, tmp_path)
        assert_alike(other, filled(1))


def test_broken_ties_in_files_are_an_error_unless_the_first_name_is_used(tmp_path: Path) -> None:
    model, other = filled(1), filled(2)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    library.save_file(values, tmp_path / "model.safetensors")
    load_safetensors(other, tmp_path)
    assert_alike(other, model)
    values["head.weight"][2, 1] += 1
    library.save_file(values, tmp_path / "model.safetensors")
    other = filled(2)
    with pytest.raises(CheckpointError, match=r"different values in the files: embed\.weight and head\.weight"):
        load_safetensors(other, tmp_path)
    assert_alike(other, filled(2))
    load_safetensors(other, tmp_path, strict=False)
    assert_alike(other, model)
    # With a third name, of the first tensor again.
    library.save_file({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "third.safetensors", metadata={"c": "a"})
    tied = nn.Module()
    tied.a = tied.b = tied.c = nn.Parameter(torch.zeros(3))
    load_safetensors(tied, tmp_path / "third.safetensors", strict=False)
    assert torch.equal(tied.a, torch.ones(3))


def test_file_names_are_those_of_the_model(tmp_path: Path) -> None:
    model = filled(1)
    save_safetensors(model, tmp_path, key_map=lambda name: f"model.{name}")
    assert "model.norm.weight" in library.load_file(tmp_path / "model.safetensors")
    mapping = {name: f"model.{name}" for name in model.state_dict()}
    for key_map in (lambda name: f"model.{name}", mapping):
        other = filled(2)
        load_safetensors(other, tmp_path, key_map=key_map)
        assert_alike(other, model)
    del mapping["norm.weight"]
    message = r"missing \(1\):\n    norm\.weight: float32 \(3,\)\n  unexpected \(1\):\n    model\.norm\.weight: float"
    with pytest.raises(CheckpointError, match=message):
        load_safetensors(filled(2), tmp_path, key_map=mapping)
    with pytest.raises(ConfigurationError, match=r"gives 'n' to both 'norm\.weight' and 'norm\.bias', which are not"):
        save_safetensors(model, tmp_path, key_map={"norm.weight": "n", "norm.bias": "n"})
    with pytest.raises(ConfigurationError, match=r"gives None for 'norm\.weight': it renames, and cannot leave out"):
        save_safetensors(model, tmp_path, key_map={"norm.weight": None})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="key_map must be a mapping or a callable of names, not list"):
        save_safetensors(model, tmp_path, key_map=["norm.weight"])  # type: ignore[arg-type]


def test_a_file_of_another_model_raises_one_error_with_all_differences(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in filled(1).state_dict().items()}
    del values["head.weight"], values["norm.bias"]
    values["norm.weight"] = torch.ones(4)
    values["norm.running_mean"] = torch.ones(3, dtype=torch.bfloat16)
    values["norm.num_batches_tracked"] = torch.tensor(1.5)
    values["other"] = torch.ones(1)
    library.save_file(values, tmp_path / "model.safetensors")
    model = filled(2)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, tmp_path)
    assert str(caught.value).splitlines() == [
        f"load_safetensors: {tmp_path} does not fit Small. Nothing was loaded.",
        "  missing (1):",
        "    norm.bias: float32 (3,)",
        "  unexpected (1):",
        "    other: float32 (1,)",
        "  of another shape (1):",
        "    norm.weight: (4,), expected (3,)",
        "  of another dtype (2):",
        "    norm.running_mean: bfloat16, expected float32 (convert_dtype=True converts it)",
        "    norm.num_batches_tracked: float32, expected int64",
    ]
    assert_alike(model, filled(2))


def test_missing_and_unexpected_names_are_returned_if_not_strict(tmp_path: Path) -> None:
    library.save_file({"norm.weight": torch.full((3,), 4.0), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    model = filled(2)
    missing, unexpected = load_safetensors(model, tmp_path, strict=False)
    assert missing == ["spread", "embed.weight", "norm.bias", *NORM_BUFFERS]
    assert unexpected == ["other"]
    expected = filled(2)
    nn.init.constant_(expected.norm.weight, 4.0)
    assert_alike(model, expected)


def test_dtypes_are_converted_on_request_both_ways(tmp_path: Path) -> None:
    save_safetensors(filled(1), tmp_path, dtype=torch.bfloat16)
    values = library.load_file(tmp_path / "model.safetensors")
    assert values["embed.weight"].dtype == torch.bfloat16
    assert values["norm.num_batches_tracked"].dtype == torch.int64
    model = filled(2)
    load_safetensors(model, tmp_path, convert_dtype=True)
    expected = filled(1).bfloat16().float()
    assert_alike(model, expected)
    with pytest.raises(ConfigurationError, match=r"dtype must be a floating-point one, not torch\.int8"):
        save_safetensors(model, tmp_path, dtype=torch.int8)


def test_the_error_for_a_model_on_meta_names_the_function_to_call(tmp_path: Path) -> None:
    save_safetensors(filled(1), tmp_path)
    with torch.device("meta"):
        model = Small()
    for call in (load_safetensors, save_safetensors):
        with pytest.raises(CheckpointError, match=r"meta device .* embed\.weight, .* Call composable_fsdp\.to_empty"):
            call(model, tmp_path)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"step": 3}

    def set_extra_state(self, state: object) -> None:
        raise AssertionError("no such tensor is in the files")


def test_extra_state_is_left_out_with_a_warning(tmp_path: Path) -> None:
    model = WithExtraState(2, 2)
    with pytest.warns(UserWarning, match="leaves out the extra state of modules: _extra_state"):
        save_safetensors(model, tmp_path)
    assert load_safetensors(model, tmp_path) == ([], [])


def test_arguments_of_saving_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.safetensors must be a directory"):
        save_safetensors(filled(1), tmp_path / "model.safetensors")


class Killed(BaseException):
    """Simulates a kill: no cleanup runs after it."""


class Fuse:
    """Allows ``calls`` changes of the file system, then raises."""

    CALLS = ("replace", "unlink", "mkdir", "rmdir", "pwrite", "fsync", "posix_fallocate")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
        self.left = calls
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            if not self.left:
                raise Killed
            self.left -= 1
            return call(*args, **kwargs)

        return counted


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize(("before", "after"), [(10**9, 60), (60, 10**9), (60, 100)])
def test_a_save_that_is_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path, before, after) -> None:
    old, new = filled(1), filled(2)
    outcomes = []
    for calls in range(1000):
        folder = tmp_path / str(calls)
        save_safetensors(old, folder, max_file_bytes=before)
        (folder / "config.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            fuse = Fuse(patch, calls)
            with contextlib.suppress(Killed):
                save_safetensors(new, folder, max_file_bytes=after)
        found = filled(3)
        load_safetensors(found, folder)
        outcomes.append("new" if torch.equal(found.embed.weight, new.embed.weight) else "old")
        assert_alike(found, new if outcomes[-1] == "new" else old)
        save_safetensors(old, folder, max_file_bytes=before)
        load_safetensors(found, folder)
        assert_alike(found, old)
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.json", main_file(folder).name} | {s.file.name for s in read_headers(folder).values()}
        if fuse.left:
            break
    assert outcomes == sorted(outcomes, reverse=True)
    assert {*outcomes} == {"old", "new"}


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("limit", [60, 10**9])
def test_a_killed_first_save_leaves_no_checkpoint(tmp_path, limit: int) -> None:
    new, complete = filled(2), 0
    for calls in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            fuse = Fuse(patch, calls)
            with contextlib.suppress(Killed):
                save_safetensors(new, tmp_path / str(calls), max_file_bytes=limit)
        found = filled(3)
        try:
            load_safetensors(found, tmp_path / str(calls))
        except CheckpointError as error:
            assert not complete
            assert re.search(r"is missing|has none|has only parts of one", str(error))  # noqa: PT017
            assert_alike(found, filled(3))
        else:
            complete += 1
            assert_alike(found, new)
        if fuse.left:
            break
    assert complete > 1


@pytest.mark.behaviour("F-06")
def test_parts_of_another_library_without_their_index_are_not_a_model(tmp_path) -> None:
    for part in (1, 2):
        library.save_file({f"value{part}": torch.ones(2)}, tmp_path / f"pytorch_model-0000{part}-of-00002.safetensors")
        text = r"only parts of one, such as pytorch_model-00001-of-00002\.safetensors"
        with pytest.raises(CheckpointError, match=text):
            load_safetensors(filled(3), tmp_path, strict=False)
