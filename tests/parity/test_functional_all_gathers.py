"""Functional all-gathers over gloo: those of torch free memory twice, ours once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.run_ranks import on_ranks

FUNCTIONAL_ALL_GATHERS = """
import sys, time, torch, torch.distributed as dist
if sys.argv[1] == "replaced":
    import composable_fsdp; composable_fsdp.fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ops, group, x = torch.ops._c10d_functional, dist.group.WORLD.group_name, torch.ones(4)
end = time.monotonic() + 5.0
while time.monotonic() < end:
    for result in [ops.all_gather_into_tensor(x, 1, group) for _ in range(64)]:
        assert torch.equal(ops.wait_tensor(result), x)
"""
"""A process without other ranks, with up to 64 all-gathers of functional collectives over gloo at once."""


def end_of_functional_all_gathers(which: str) -> int:
    command = [sys.executable, "-c", FUNCTIONAL_ALL_GATHERS, which]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120.0).returncode


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="looked at in torch 2.13")
def test_functional_all_gathers_of_torch_over_gloo_free_memory_twice() -> None:
    """If this fails, torch has mended it: ``plugins/gloo/functional_all_gather.py`` is not needed with that release."""
    ends = (end_of_functional_all_gathers("torch's own") for _ in range(8))
    assert any(end in (-signal.SIGABRT, -signal.SIGSEGV) for end in ends)


@pytest.mark.behaviour("H-03")
def test_functional_all_gathers_are_replaced_by_ones_that_free_it_once() -> None:
    assert end_of_functional_all_gathers("replaced") == 0


@pytest.mark.behaviour("H-03")
@on_ranks(2)
def test_replaced_functional_all_gathers_return_what_torchs_do() -> None:
    rank, size, ops = dist.get_rank(), dist.get_world_size(), torch.ops._c10d_functional
    group = dist.distributed_c10d._get_default_group().group_name
    for shape in ((1,), (3, 2), (0, 4), (2, 3, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            own = [torch.full(shape, r + 1).to(dtype) for r in range(size)]
            gathered = ops.wait_tensor(ops.all_gather_into_tensor(own[rank], size, group))
            torch.testing.assert_close(gathered, torch.cat(own))
