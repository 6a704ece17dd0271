"""Kills a save at each call by which it writes, and checks the remaining files.

    python -m tests.helpers.kill_at_calls FOLDER

A first save notes its calls. Python's audit events find the files that it opens for writing and what it does by ``os``,
such as renames and links; only those of ``READS`` change nothing. The bytes of the writes must be those that the kernel
counts, so that none is missed, and a file that is mapped is an error, since nobody sees what is written to it.

Then one process after the other saves over the same checkpoint and is killed at one of the calls, a write when half of
it is done. The checkpoint must then have the old or the new values, complete, and the next save must succeed. Tried are
``save`` and ``save_safetensors``.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import load, load_safetensors, save, save_safetensors

READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr", "os.fork", "os.lockf")
WITHOUT_EVENT = ("fsync", "fdatasync", "posix_fallocate", "mkfifo", "mknod")


class Calls:
    """The calls of this process that write, from :meth:`patch` on. It ends at the one with the number ``last``."""

    def __init__(self, last: int | None = None) -> None:
        self.kinds: list[str] = []
        self.nbytes = 0
        self._last = last

    def is_last(self, kind: str) -> bool:
        self.kinds.append(kind)
        return len(self.kinds) - 1 == self._last

    def note(self, kind: str) -> None:
        if self.is_last(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def written(self, data: Any, write: Callable[[memoryview], int]) -> int:
        view = memoryview(data).cast("B")
        if self.is_last("write"):
            write(view[: len(view) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        count = write(view)
        self.nbytes += count
        return count

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self.note("open")
        elif event.startswith("os.") and event not in READS:
            self.note(event)
        elif event == "mmap.__new__" and arguments[0] != -1:
            raise AssertionError("a file is mapped: what is written to it is not seen")

    def patch(self) -> None:
        calls, raw, write, pwrite, plain = self, io.FileIO, os.write, os.pwrite, builtins.open

        class File(raw):  # type: ignore[valid-type,misc]
            def write(self, data: Any, /) -> int:
                return calls.written(data, super().write)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return plain(file, mode, buffering, *rest, **options)
            opened = File(file, mode.replace("b", "").replace("t", ""), opener=options.pop("opener", None))
            if buffering == 0:
                return opened
            binary = io.BufferedRandom(opened) if "+" in mode else io.BufferedWriter(opened)
            return binary if "b" in mode else io.TextIOWrapper(binary, *rest, **options)

        def changing(name: str) -> None:
            call = getattr(os, name)

            def changed(*arguments: Any, **options: Any) -> Any:
                calls.note(name)
                return call(*arguments, **options)

            setattr(os, name, changed)

        patched: dict[tuple[Any, str], Any] = dict.fromkeys([(io, "open"), (builtins, "open")], open_file)
        patched[io, "FileIO"] = File
        patched[os, "write"] = lambda fd, data: calls.written(data, lambda view: write(fd, view))
        patched[os, "pwrite"] = lambda fd, data, at: calls.written(data, lambda view: pwrite(fd, view, at))
        for (owner, name), value in patched.items():
            setattr(owner, name, value)
        for name in WITHOUT_EVENT:
            changing(name)
        sys.addaudithook(self.audit)


def build(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 301))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save_dcp(folder: Path, value: float) -> None:
    model = build(value)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save(folder, model, optimizer, {"value": value}, step=7, keep_last=1)


def load_dcp(folder: Path) -> nn.Module:
    model = build(-1)
    assert load(folder, model)["value"] == model[0].weight[0, 0]  # type: ignore[index]
    return model


def save_files(folder: Path, value: float) -> None:
    model = build(value)
    fully_shard(model)
    save_safetensors(model, folder, max_file_bytes=5000)


def load_files(folder: Path) -> nn.Module:
    model = build(-1)
    load_safetensors(model, folder)
    return model


def value_of(model: nn.Module) -> float:
    values = {float(each) for parameter in model.parameters() for each in parameter.detach().reshape(-1)}
    assert len(values) == 1, f"the files mix values of several saves: {values}"
    return values.pop()


def written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def in_child(action: Callable[[], None], errors: Path) -> int:
    """Return the status of a forked process that calls ``action``."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        action()
        os._exit(0)
    except BaseException:
        errors.write_text(traceback.format_exc())
        os._exit(1)


def try_all(folder: Path, do_save: Callable[[Path, float], None], do_load: Callable[[Path], nn.Module]) -> Counter[str]:
    """Return the calls of a save by kind, at each of which one was killed."""
    before, run, errors, noted = (folder / name for name in ("before", "run", "errors", "calls.json"))
    do_save(before, 1.0)

    def note() -> None:
        calls, begun = Calls(), written_bytes()
        calls.patch()
        do_save(run, 2.0)
        noted.write_text(json.dumps([calls.kinds, calls.nbytes, written_bytes() - begun]))

    def save_until(last: int) -> None:
        Calls(last).patch()
        do_save(run, 2.0)

    shutil.copytree(before, run)
    assert in_child(note, errors) == 0, errors.read_text()
    kinds, nbytes, counted = json.loads(noted.read_text())
    assert nbytes == counted > 0, f"calls wrote {nbytes} bytes, and the process {counted}: some calls were not seen"
    found = set[float]()
    for last in range(len(kinds)):
        shutil.rmtree(run)
        shutil.copytree(before, run)
        assert in_child(lambda last=last: save_until(last), errors) == signal.SIGKILL  # type: ignore[misc]
        left = value_of(do_load(run))
        assert left in (1.0, 2.0), f"killed at call {last}, {kinds[last]}: {left}"
        assert not found or left >= max(found), f"killed at call {last}, {kinds[last]}: the new one is gone"
        found.add(left)
        do_save(run, 3.0)
        assert value_of(do_load(run)) == 3.0
    assert found == {1.0, 2.0}, "kills came before and after the new checkpoint"
    return Counter(kinds)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    found = {}
    for name, do_save, do_load in (("save", save_dcp, load_dcp), ("save_safetensors", save_files, load_files)):
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        found[name] = try_all(folder, do_save, do_load)
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
