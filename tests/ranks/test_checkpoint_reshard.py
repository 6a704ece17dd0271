"""A checkpoint loads exactly on any other number of ranks and any other mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from composable_fsdp.checkpoint import load, save
from tests.helpers.checkpoint_worlds import WORLDS, Everything, adamw, assert_holds, fill, zeroed
from tests.helpers.run_ranks import run_ranks


def save_in(kind: str, folder: Path) -> None:
    _, build = WORLDS[kind]
    model = build()
    optimizer = adamw(model)
    optimizer.param_groups[0]["lr"] = 0.125
    fill(model, optimizer)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    saved = save(folder / kind, model, optimizer, {"step": 7, "rank": rank})
    assert saved.path == folder / kind / "step-00000007"
    assert saved.done()


def load_in(kind: str, folder: Path, kinds: list[str]) -> None:
    ranks, build = WORLDS[kind]
    model = build()
    for saved in kinds:
        zeroed(model).counter.calls = 0
        optimizer = adamw(model)
        optimizer.add_param_group({"params": optimizer.param_groups.pop(0)["params"]})  # the other way round
        optimizer.param_groups.reverse()
        before = torch.get_rng_state()
        extra = load(folder / saved, model, optimizer)
        assert_holds(model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        if WORLDS[saved][0] == ranks:
            assert extra == {"step": 7, "rank": dist.get_rank()}
            assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(dist.get_rank()).get_state())
        else:
            assert extra == {"step": 7, "rank": 0}
            assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.behaviour("F-07", "F-13")
def test_worlds_load_what_others_saved(tmp_path: Path) -> None:
    """Small worlds load from all worlds, larger ones, which take longer, from every other."""
    for kind, (ranks, _) in WORLDS.items():
        run_ranks(save_in, ranks, kind, tmp_path)
    for number, (kind, (ranks, _)) in enumerate(WORLDS.items()):
        saved = list(WORLDS)[number % 2 :: 2] if ranks > 3 else list(WORLDS)
        run_ranks(load_in, ranks, kind, tmp_path, saved, timeout=120)
    unsharded_without_process_groups(tmp_path)


def unsharded_without_process_groups(folder: Path) -> None:
    assert not dist.is_initialized()
    model = Everything()
    optimizer = adamw(model)
    for kind in WORLDS:
        zeroed(model)
        load(folder / kind, model, optimizer)
        assert_holds(model, optimizer)
    save(folder / "unsharded", model, optimizer)
    other = zeroed(Everything())
    load(folder / "unsharded", other, None)
    assert_holds(other)
