"""What somebody else put into a folder: only regular files are read, no link is written to, and texts are shown."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import traceback
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_fsdp.checkpoint import load_safetensors, save, save_safetensors
from composable_fsdp.cli import main
from composable_fsdp.diagnostics.timeline import LANES
from composable_fsdp.errors import CheckpointError, ConfigurationError, FSDPError, PeerError, printable
from tests._internals import _files, checkpoint_save, directory, rank_group, text_table, write
from tests.helpers.command import run_command
from tests.helpers.single_rank_checkpoints import trained

SLICE = {"ph": "X", "name": "forward a", "cat": "passes", "ts": 0.0, "dur": 1e6, "args": {"bytes": 8}}
VALUES: dict[str, Any] = {"rank": 0, "attempt": 0, "traceEvents": [SLICE]}


def step_of(group: str) -> dict[str, Any]:
    """Return the file of a rank with one step, in which it waits for ``group``."""
    lanes = (("passes", "forward"), ("gather", "gather"), ("waits", "wait"), ("passes", "backward"))
    made = [SLICE | {"name": f"{name} {group}", "cat": lane, "ts": 1e6 * at} for at, (lane, name) in enumerate(lanes)]
    return VALUES | {"traceEvents": made}


HOSTILE = (
    "\x1b[2J",
    "\x1b]52;c;eA==\x07",
    "\x9b2J",
    "\r",
    "\x08",
    "\x7f",
    "\x00",
    "\u202e",
    "\u2066",
    "\u200b",
    "\u2028",
)


@pytest.mark.parametrize("mark", HOSTILE)
def test_texts_are_printable_wherever_they_are_shown(mark: str, tmp_path: Path) -> None:
    assert printable(mark).isprintable()
    for kind in (CheckpointError, ConfigurationError, PeerError):
        assert str(kind(f"a {mark} b\nc")) == f"a {printable(mark)} b\nc"
    assert mark not in text_table(("name",), [(f"a{mark}",)], ())
    (tmp_path / f"rank-0{mark.strip(chr(0) + '/')}1.json").write_text("{")
    shown = run_command("timeline", tmp_path)
    assert shown.exit_code == 2
    assert mark.strip(chr(0)) == "" or printable(mark) in shown.stderr
    assert all(character.isprintable() or character == "\n" for character in shown.stdout + shown.stderr)


def test_groups_in_a_timeline_are_printable(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").write_text(json.dumps(step_of("\x1b[2J")))
    assert run_command("timeline", tmp_path).exit_code == 0
    assert "forward \\\\x1b[2J" in (tmp_path / "timeline.json").read_text()


def test_names_in_a_manifest_are_printable(tmp_path: Path) -> None:
    path = save(tmp_path, *trained(), step=1).path
    document = json.loads((path / "manifest.json").read_text())
    document["manifest"]["files"]["\x1b[2J"] = {"bytes": 0, "crc32": "00000000"}
    document["crc32"] = directory._checksum(document["manifest"])
    (path / "manifest.json").write_text(json.dumps(document))
    done = run_command("checkpoint", "convert", path, tmp_path / "target")
    assert "x1b[2J is missing" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_plain_texts_stay_as_they_are() -> None:
    text = "größe × 2 … 重み\n\tlayers.3: 🙂"
    assert printable(text) == text == str(FSDPError(text))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"rank": -1}, "rank: it is not a number from 0 to "),
        ({"rank": "0"}, "rank: it is not a number from 0 to "),
        ({"attempt": True}, "attempt: it is not a number from 0 to "),
        ({"traceEvents": [SLICE, SLICE | {"ts": float("inf")}]}, "ts: it is not a number from 0 to "),
        ({"traceEvents": [SLICE | {"dur": float("nan")}]}, "dur: it is not a number from 0 to "),
        ({"traceEvents": [SLICE | {"dur": -1.0}]}, "dur: it is not a number from 0 to "),
        ({"traceEvents": [SLICE | {"args": {"bytes": 10**400}}]}, "bytes: it is not a number from 0 to "),
        ({"traceEvents": [SLICE | {"args": []}]}, "it is no timeline of this version: AttributeError("),
        ({"traceEvents": [SLICE | {"cat": []}]}, "tuple.index(x): x not in tuple"),
        ({"traceEvents": [{"ph": "X"}]}, "it is no timeline of this version: KeyError('ts')"),
        ({"traceEvents": 3}, "it is no timeline of this version: TypeError("),
    ],
)
def test_an_entry_of_another_type_or_range_is_named(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    (tmp_path / "rank-00000.json").write_text(json.dumps(VALUES | changed))
    done = run_command("timeline", tmp_path)
    assert f"rank-00000.json cannot be read: {problem}" in done.stderr
    assert done.exit_code == 2


def changes_of(value: Any) -> st.SearchStrategy[Any]:
    """Return ``value`` with other values in some places."""
    if isinstance(value, dict):
        inner: st.SearchStrategy[Any] = st.fixed_dictionaries({name: changes_of(each) for name, each in value.items()})
    elif isinstance(value, list):
        inner = st.tuples(*map(changes_of, value)).map(list)
    else:
        inner = st.just(value)
    return st.integers(0, 63).flatmap(lambda draw: ANYTHING if draw == 40 else inner)


ANYTHING: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 7, 2**63, 10**400, -1e10, 1e300, float("nan"), float("inf"), "", "\ud800", "\x1b[2J", [], {}, [[]]]
)
"""What JSON can have."""


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("ts", "dur"), st.sampled_from([0, 0.5, 1e6, 9e16])),
    "args": st.fixed_dictionaries({"bytes": st.sampled_from([0, 1, 2**62])}),
    "ph": st.just("X"),
    "cat": st.sampled_from(LANES),
    "name": st.sampled_from(["", "\ud800", "$a", "forward a", "backward a"]),
}
EXTREME = st.lists(st.fixed_dictionaries(FIELDS)).map(lambda events: VALUES | {"traceEvents": events})
"""Documents that are admitted."""
DOCUMENTS = changes_of(VALUES | {"traceEvents": [SLICE] * 2}) | EXTREME


@settings(max_examples=60, deadline=None)
@given(st.lists(DOCUMENTS, max_size=2))
def test_no_file_of_a_timeline_ends_in_a_traceback(documents: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        for rank, document in enumerate(documents):
            Path(folder, f"rank-0000{rank}.json").write_text(json.dumps(document))
        done = run_command("timeline", folder, "--json")
        assert done.exception is None
        assert (done.stdout + done.stderr).encode("utf-8")


def test_lone_surrogates_and_nested_lists_are_shown(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").write_text(json.dumps(step_of("\udc80")))
    assert run_command("timeline", tmp_path).exit_code == 0
    (tmp_path / "rank-00001.json").write_text('{"rank": ' + "[" * 10**5)
    shown = run_command("timeline", tmp_path)
    assert (shown.exit_code, shown.exception) == (2, None)
    assert "rank-00001.json cannot be read: " in shown.stderr


def test_what_the_encoding_of_a_terminal_lacks_is_escaped(tmp_path: Path) -> None:
    with redirect_stderr(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) as stderr, pytest.raises(SystemExit):
        main(arguments=["timeline", str(tmp_path / "größe")])
    stderr.seek(0)
    assert "gr\\xf6\\xdfe" in stderr.read()


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "[Errno 22] this is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "[Errno 22] this link leads out of its folder"),
        (make_huge, "[Errno 27] this has 1099511627776 bytes, at most"),
    ],
)
def test_only_regular_files_of_a_timeline_are_read(tmp_path: Path, make: Any, problem: str) -> None:
    make(tmp_path / "rank-00000.json")
    assert f"rank-00000.json cannot be read: {problem}" in run_command("timeline", tmp_path).stderr


def test_files_are_replaced_and_links_not_followed(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("precious")
    folder.mkdir()
    (folder / "rank-00000.json").symlink_to(precious)
    write(folder, 0, [])
    (folder / "timeline.json").symlink_to(precious)
    (folder / "timeline.png").symlink_to(precious)
    run_command("timeline", folder)
    assert not (folder / "timeline.json").is_symlink()
    assert json.loads((folder / "timeline.json").read_text())["displayTimeUnit"] == "ms"
    assert precious.read_text() == "precious"
    assert sorted(os.listdir(folder))[:2] == ["rank-00000.json", "timeline.json"], "no file is left beside"


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("link", [True, False])
def test_a_lock_that_is_a_link_is_not_written_to(tmp_path: Path, link: bool) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    run.mkdir()
    if link:
        (run / ".lock").symlink_to(precious)
        with pytest.raises(CheckpointError, match=r"\.lock is no file to lock: .*\. Delete it\."):
            save(run, *trained(), step=1)
    else:
        (run / ".lock").hardlink_to(precious)
        save(run, *trained(), step=1)
    assert precious.read_text() == "precious"


@pytest.mark.behaviour("F-12")
def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    save(tmp_path, *trained(), step=1)


def test_pipes_and_links_named_like_leftovers_of_a_safetensors_save_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / ".incomplete-1")
    (run / ".incomplete-2").symlink_to(tmp_path / "precious")
    save_safetensors(trained()[0], run)
    assert os.listdir(run) == ["model.safetensors"]
    assert (tmp_path / "precious" / "file").exists()


SAVES: dict[str, Any] = {
    "*.partial": lambda run: save(run, *trained(), step=1),
    ".incomplete-*": lambda run: save_safetensors(trained()[0], run, max_file_bytes=40),
}
WRITTEN = (
    *(
        "__0_0.distcp",
        ".metadata.tmp",
        ".metadata",
        "manifest.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ),
    *(f"model-{i:05}-of-{n:05}.safetensors" for n in (2, 3) for i in range(1, n + 1)),
)


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize(
    ("call", "planted"),
    [("mkdir", "link"), ("mkdir", "links"), ("fsync", "link"), ("fsync", "links"), ("fsync", "empty")],
)
@pytest.mark.parametrize("pattern", SAVES)
def test_a_folder_that_is_swapped_during_a_save_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, call: str, planted: str
) -> None:
    run, precious, theirs = tmp_path / "run", tmp_path / "precious", tmp_path / "theirs"
    for folder in (run, precious, theirs):
        folder.mkdir()
    for name in WRITTEN:
        (precious / name).write_text(name)
        if planted == "links":
            (theirs / name).symlink_to(precious / name)
    if planted == "link":
        theirs.rmdir()
        theirs.symlink_to(precious)
    plain = getattr(os, call)

    def swapping(*arguments: Any, **options: Any) -> None:
        plain(*arguments, **options)
        for found in run.glob(pattern) if os.path.lexists(theirs) else ():
            found.rename(run / "away")
            theirs.rename(found)

    monkeypatch.setattr(os, call, swapping)
    with pytest.raises(CheckpointError, match=r"File exists|Not a dir|Too many|No such file|has put something else"):
        SAVES[pattern](run)
    assert {path.name: path.read_text() for path in precious.iterdir()} == {name: name for name in WRITTEN}
    assert not (run / "step-00000001").exists()
    assert not list(run.glob("*.safetensors*"))


def test_a_file_that_another_rank_made_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "hard").hardlink_to(tmp_path / "precious")
    (tmp_path / "soft").symlink_to("precious")
    os.mkfifo(tmp_path / "pipe")
    folder = _files.Directory(tmp_path)
    for name in ("hard", "soft", "pipe"):
        with pytest.raises(OSError, match=rf"(is not the file that was made here|Too many levels).*/{name}'"):
            folder.reopen(name)
    for _ in range(2):
        folder.close()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_permissions_of_all_that_is_written_are_those_of_the_umask(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        model, optimizer = trained()
        for step in (1, 2):
            save(tmp_path / "checkpoints", model, optimizer, step=step)
        save_safetensors(model, tmp_path / "one")
        save_safetensors(model, tmp_path / "many", max_file_bytes=1)
        _files.replace_file(tmp_path / "timeline.json", "")
    finally:
        os.umask(previous)
    found = {path: path.lstat().st_mode & 0o7777 for path in tmp_path.rglob("*")}
    assert len(found) > 15
    assert found == {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in found}


def test_a_hub_cache_is_read_and_other_links_are_not(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs" / "0123"
    for each in (snapshot, blob.parent):
        each.mkdir(parents=True)
    blob.write_text("weights")
    (snapshot / "model").symlink_to("../../blobs/0123")
    assert _files.regular_file(snapshot, "model") == blob
    (tmp_path / "secret").write_text("secret")
    (snapshot / "other").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="leads out of its folder"):
        _files.regular_file(snapshot, "other")


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    _files.replace_file(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _files.replace_file(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "pipe", "link", "sub", "sub/file", "", ".", "x" * 300])
def test_an_index_of_safetensors_names_regular_files_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "sent"
    (folder / "sub").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    for file in (tmp_path / "secret", folder / "sub" / "file"):
        file.write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError) as raised:
        load_safetensors(model, folder)
    assert f"index.json says that 'weight' is in {name!r}, which is refused: " in str(raised.value)
    assert any(text in str(raised.value) for text in ("plain name", "regular file", "out of its folder", "too long"))
    assert "secret" not in str(raised.value).replace("/secret", "")


@pytest.mark.parametrize(
    ("length", "header"),
    [
        (2**62, b"{}"),
        (2**64 - 1, b"{}"),
        (None, {"shape": [2**40, 2**40], "data_offsets": [0, 16]}),
        (None, {"shape": [-2, 2], "data_offsets": [0, 16]}),
        (None, {"shape": [2, 2], "data_offsets": [0, 2**62]}),
        (None, {"shape": [2, 2], "data_offsets": [16, 0]}),
        (None, {"shape": [10**9], "data_offsets": [0, 16]}),
    ],
)
def test_sizes_in_a_header_of_safetensors_are_checked(tmp_path: Path, length: int | None, header: Any) -> None:
    text = header if isinstance(header, bytes) else json.dumps({"weight": {"dtype": "F32", **header}}).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(size + text + bytes(16))
    with pytest.raises(CheckpointError, match="is damaged, or no safetensors file"):
        load_safetensors(torch.nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("shape", [[0, 2**63 + 5], [2**62, 0, 2**62], [2**64 - 1, 0]])
def test_a_shape_that_no_tensor_can_have_is_named_with_its_file(tmp_path: Path, shape: list[int]) -> None:
    """An empty tensor takes no bytes of a file, but torch multiplies its sizes to strides."""
    text = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit Linear.*weight: \(.*, expected \(2, 2\)"):
        load_safetensors(torch.nn.Linear(2, 2), file)


@pytest.mark.parametrize("mark", ["\x1b]0;owned\x07", "\x9b2J", "\u202e"])
def test_causes_of_errors_are_printable(tmp_path: Path, mark: str) -> None:
    header = json.dumps({mark: {"dtype": mark, "shape": [1], "data_offsets": [0, 4]}}, ensure_ascii=False).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError) as raised:
        load_safetensors(torch.nn.Linear(2, 2), tmp_path)
    text = "".join(traceback.format_exception(raised.value))
    assert "SafetensorError" in text
    assert mark not in text
    assert printable(mark) in text


def test_all_causes_of_an_error_are_printable() -> None:
    def refuse() -> None:
        try:
            raise KeyError("\x1b[1m")
        except KeyError:
            try:
                raise pickle.UnpicklingError("\x1b[2m", 3)
            except pickle.UnpicklingError as error:
                raise ValueError("\x1b[3m\nx") from error

    with pytest.raises(CheckpointError) as raised:
        rank_group.RankGroup(0, 1, None, 1).agree("loading", refuse)
    text = "".join(traceback.format_exception(raised.value))
    assert "\x1b" not in text
    assert all(f"x1b[{number}m" in text for number in (1, 2, 3))


def test_a_long_name_lengthens_one_line_of_a_table() -> None:
    lines = text_table(("name", "size"), [("x" * 10**5, "1"), *[("y", "2")] * 1000], ()).splitlines()
    assert len(lines[1]) == 10**5 + 3
    assert max(map(len, lines[2:])) < 400


@pytest.mark.parametrize(("left", "position"), [(624, 624), (2, 624), (0, 625), (625, 0), (-1, 626), (1, 1)])
def test_a_random_state_of_torch_is_inside_its_numbers(left: int, position: int) -> None:
    before = torch.get_rng_state()
    raw = bytearray(before.numpy().tobytes())
    struct.pack_into("<i", raw, 8, left)
    struct.pack_into("<Q", raw, 16, position)
    state = {"cpu": torch.frombuffer(raw, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=f"random state of torch is at {position} of 624 numbers, {left} left"):
        checkpoint_save.set_random_state(state)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1248, 1249])
def test_each_random_state_of_torch_is_restored(draws: int) -> None:
    torch.manual_seed(3)
    torch.empty(draws, dtype=torch.int32).random_()
    state = {"cpu": torch.get_rng_state()}
    wanted = torch.rand(3)
    checkpoint_save.set_random_state(state)
    assert torch.equal(torch.rand(3), wanted)
