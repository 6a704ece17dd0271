"""Checkpoints of several ranks: common failures, rendezvous, and resumed training."""

from __future__ import annotations

import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import latest, load, load_safetensors, save, save_safetensors
from composable_fsdp.errors import CheckpointError
from tests._internals import watchdog
from tests.helpers.checkpoint_worlds import (
    WORLDS,
    Gate,
    adamw,
    all_ranks_raise,
    assert_holds,
    fill,
    local,
    train,
    zeroed,
)
from tests.helpers.known_watchdog import known_watchdog
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import IN_COMMON, SOCKETS, Environment
from tests.helpers.warned import find_warning, release_after, wait_for_release, warned


def refused(action: Any) -> str:
    """Return the text of the error, which must be equal on all ranks."""
    with all_ranks_raise() as raised:
        action()
    return str(raised.value)


@contextmanager
def small_disk(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failures(folder: Path) -> None:
    rank, build = dist.get_rank(), WORLDS["2, on dim 1"][1]
    model = build()
    optimizer = adamw(model)
    fill(model, optimizer)
    good = save(folder, model, optimizer, step=1).path

    def fails_here(step: int, asynchronous: bool) -> None:
        with small_disk(3000 if rank == 1 else 1 << 40):
            save(folder, model, optimizer, step=step, asynchronous=asynchronous).wait()

    for step in (1, 2):
        for asynchronous in (False, True):
            text = refused(lambda s=step, a=asynchronous: fails_here(s, a))
            assert f"saving {folder}/step-0000000{step}: rank 1: OSError: [Errno 27] File too large: '" in text
            assert f"step-0000000{step}.partial/__1_0.distcp'" in text
            dist.barrier()
            assert latest(folder) == good
            assert not list(folder.glob("*.partial"))
            load(folder, zeroed(model), optimizer)
            assert_holds(model, optimizer)

    damaged = folder.parent / "damaged"
    if rank == 0:
        shutil.copytree(good, damaged)
        file = damaged / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    dist.barrier()
    before = zeroed(build())
    text = refused(lambda: load(damaged, before, adamw(before)))
    assert f"loading {damaged}: damaged.\n  rank " in text
    assert f"{damaged}/__1_0.distcp is damaged: its CRC-32 is " in text
    assert not any(local(p).any() for p in before.parameters() if p is not before.temperature)

    other = build()
    other.register_buffer("own", torch.zeros(3 + rank))
    other.register_buffer("mean", torch.zeros(6) if rank == 1 else torch.zeros(5))
    text = refused(lambda: load(good, other))
    assert text.endswith(
        "missing (2):\n    own: float32 (3,) (on rank 0)\n    own: float32 (4,) (on rank 1)\n  of another shape (1):\n"
        "    mean: (5,), expected (6,) (on rank 1)"
    )


@pytest.mark.behaviour("F-12", "H-05")
def test_a_failure_on_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(failures, 2, tmp_path / "run")


@pytest.mark.behaviour("F-12", "H-05")
@on_ranks(2)
def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path: Path) -> None:
    rank, build = dist.get_rank(), WORLDS["2, on dim 1"][1]
    model = build()
    optimizer = adamw(model)
    fill(model, optimizer)
    paths = [save(tmp_path, model, optimizer, {"rank": rank}, step=step).path for step in (1, 2, 3, 4)]
    if rank == 0:
        for path, name in ((paths[3], "__1_0.distcp"), (paths[2], "__0_0.distcp")):
            data = bytearray((path / name).read_bytes())
            data[100] ^= 1
            (path / name).write_bytes(data)
        (paths[1] / ".metadata").unlink()
    dist.barrier()
    text = refused(lambda: load(tmp_path, zeroed(build())))
    assert "damaged. fallback=True loads the newest one that is intact.\n" in text
    assert "/step-00000004/__1_0.distcp is " in text
    assert load(tmp_path, zeroed(model), optimizer, fallback=True) == {"rank": rank}
    assert_holds(model, optimizer)
    if rank == 1:
        (paths[0] / "__1_0.distcp").unlink()
    dist.barrier()
    before = zeroed(build())
    assert "damaged.\n  rank " in refused(lambda: load(tmp_path, before, fallback=True))
    assert not any(local(p).any() for p in before.parameters() if p is not before.temperature)


CALLS: dict[str, Callable[[Path, nn.Module, dict[str, Any]], object]] = {
    "save": lambda folder, model, given: save(folder, model, step=1, **given),
    "load": lambda folder, model, given: load(folder, model, **given),
    "save_safetensors": lambda folder, model, given: save_safetensors(model, folder / "files", **given),
    "load_safetensors": lambda folder, model, given: load_safetensors(model, folder / "files", **given),
}


DIFFERING: list[tuple[str, dict[str, Any]]] = [
    ("save", {"asynchronous": True}),
    ("save", {"keep_last": 2}),
    ("load", {"strict": False}),
    ("load", {"verify": False, "fallback": True}),
    ("save_safetensors", {"dtype": torch.bfloat16}),
    ("load_safetensors", {"convert_dtype": True}),
]


@pytest.mark.behaviour("F-08")
@on_ranks(2)
def test_arguments_that_differ_between_ranks_are_an_error_that_shows_both_calls(tmp_path: Path) -> None:
    rank, model = dist.get_rank(), nn.Linear(3, 3)
    save(tmp_path, model, step=0)
    save_safetensors(model, tmp_path / "files")
    for name, given in DIFFERING:
        text = refused(lambda name=name, given=given: CALLS[name](tmp_path, model, given if rank else {}))
        shown = ", ".join(f"{argument}={value!r}" for argument, value in given.items())
        pattern = rf"the ranks did not make the same call: rank 0 {name}[^=]*(, step=1\))?, rank 1 {name}\(.*{shown}\)"
        assert re.match(pattern, text), text
        CALLS[name](tmp_path, model, {"keep_last": 1} if name == "save" else {})
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def missing(folder: Path) -> None:
    rank, model = dist.get_rank(), nn.Linear(3, 3)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(CheckpointError) as raised:
            save(folder, model, step=1, timeout=0.5)
        assert time.monotonic() - begin < 60
        assert str(raised.value).startswith(
            f"save({str(folder)!r}, step=1): rank 1 did not make this call within 0.5 s. All 2 ranks"
        )
    dist.barrier()
    assert save(folder, model, step=2, timeout=120).step == 2
    text = refused(lambda: save(folder, model, step=3 + rank, timeout=120))
    folder_text = repr(str(folder))
    assert text == (
        f"the ranks did not make the same call: rank 0 save({folder_text}, step=3), rank 1 save({folder_text}, "
        "step=4). All must make it, with equal arguments."
    )
    assert "rank 1 load(" in refused(
        lambda: load(folder, model, timeout=120) if rank else save(folder, model, timeout=120)
    )
    late(folder, model)
    for _ in range(3):
        assert load(folder, model, timeout=120) == {}
    dist.barrier()
    keys = [key for key in ("0/0", "0/1", "0/arrived", "0/verdict", "1/0") if _store().check([f"{PLACE}/{key}"])]
    assert not keys


def only_some(folder: Path) -> None:
    """Save on rank 0 alone. Rank 1 joins late, or waits for rank 0 in the next forward, or exits."""
    rank, task, name = dist.get_rank(), TASKS["mlp"], repr(str(folder))
    model: Any = shard_layers(task.build(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, task, range(1), 2)
    expected = (
        rf"save\({re.escape(name)}, step=1\): waiting for rank 1, for \d+\.\d s so far and up to 1800 s\.\n"
        r"  rank 1 is at work.* \(1 step done\), and executes .*"
        r' in wait_for_release: world_store\(\)\.wait\(\["released"\]\)'
    )
    with pytest.MonkeyPatch.context() as monkeypatch, warned(0.5) as records:
        for seconds in ("_ASK_AFTER", "_ASK_AGAIN"):
            monkeypatch.setattr(watchdog, seconds, 0.5)
        if rank == 1:
            wait_for_release()
        else:
            release_after(records, expected)
        save(folder, model, step=1)
        if rank == 0:
            assert find_warning(records, expected), records
            begin = time.monotonic()
            with pytest.raises(CheckpointError) as raised:
                save(folder, model, step=2)
            assert time.monotonic() - begin < 300  # not the 1800 s of the call
            text = str(raised.value)
            assert text.startswith(
                f"save({name}, step=2): rank 1 did not make this call, and cannot any more.\n  rank 1 waits in "
            )
            assert text.endswith("(1 step done)\nAll 2 ranks of the default process group must make it.")
        train(model, optimizer, task, range(1, 2), 2)
        assert save(folder, model, step=3).path == latest(folder)
        if rank == 1:
            own: Any = known_watchdog()
            own.leave()  # as at the end of its program
            return
        with pytest.raises(CheckpointError, match=r"more\.\n  rank 1 has come to the end of its program \(2 steps d"):
            save(folder, model, step=4)


@pytest.mark.behaviour("F-12", "H-01")
@pytest.mark.parametrize("transport", [IN_COMMON, SOCKETS], ids=["shared", "sockets"])
def test_a_save_on_some_ranks_only_is_an_error_within_seconds(tmp_path: Path, transport: Environment) -> None:
    run_ranks(only_some, 2, tmp_path, environment=transport, lost=[1])  # rank 1 cannot be used by other tests


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_a_rank_that_takes_too_long_is_named_and_the_next_save_works(tmp_path: Path) -> None:
    """Let rank 1 write for longer than the timeout of the others."""
    rank, model = dist.get_rank(), nn.Linear(3, 3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        if rank == 0:
            gate.opened.set()
        pending = save(tmp_path, model, step=1, asynchronous=True, timeout=1)
        while rank == 0 and not pending.done():
            time.sleep(0.01)
        dist.barrier()
        gate.opened.set()
        if rank == 0:
            with pytest.raises(CheckpointError, match="step-00000001: rank 1: gone, or did not answer within 1 s"):
                pending.wait()
    assert latest(tmp_path) is None
    text = refused(lambda: save(tmp_path, model, step=2))  # rank 0 knows of it already, rank 1 does not
    before = f"the save before save({str(tmp_path)!r}, step=2)"
    assert text.startswith(f"{before}: rank 1: saving {tmp_path}/step-00000001: rank 0: gone, or did ")
    assert save(tmp_path, model, step=2).path == latest(tmp_path)


PLACE = "composable_fsdp/checkpoint"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def late(folder: Path, model: nn.Module) -> None:
    """Let rank 1 arrive after the others' timeout; it then joins their next call."""
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="rank 1 did not make this call"):
            load(folder, model, timeout=0.2)
        dist.barrier()
        load(folder, model, timeout=120)
    else:
        dist.barrier()
        load(folder, model, timeout=120)


@pytest.mark.behaviour("F-12")
def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    run_ranks(missing, 2, tmp_path)


@pytest.mark.behaviour("F-12")
@on_ranks(2, timeout=30)
def test_a_second_default_group_over_the_same_store_reads_no_stale_keys(tmp_path: Path) -> None:
    """Destroy the default group, initialize another over the same store, and make calls that do not match."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _store()
    model = nn.Linear(3, 3)
    save(tmp_path, model, step=1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    save(tmp_path, model, step=2)
    with pytest.raises(CheckpointError, match="the ranks did not make the same call"):
        save(tmp_path, model, step=3) if rank == 0 else load(tmp_path, model)
    fully_shard(model)(torch.ones(2, 3)).sum().backward()
