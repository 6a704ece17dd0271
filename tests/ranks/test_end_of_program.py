"""The end of a program and of its process groups while work is in flight, over gloo and the stand-in for NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.destroyed_groups import PROGRAMS, build
from tests.helpers.fresh_process import run_script_on_ranks
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, stands_in


@pytest.mark.parametrize("transport", ["0", "copy", ""], ids=["sockets", "copies", "in common"])
def test_programs_end_well_that_destroy_their_process_group_with_work_in_flight(transport: str, tmp_path: Path) -> None:
    environment = {"COMPOSABLE_FSDP_SHARED_MEMORY": transport} if transport else {}
    said = run_script_on_ranks("tests/helpers/destroyed_groups.py", str(tmp_path), environment=environment)
    assert said == "came to the end\n" * 2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_work_of_a_destroyed_group_is_waited_for_or_asked(name: str, variant: str) -> None:
    with stands_in(variant, alone=True) as contract, simulated_accelerator():
        dist.init_process_group(contract.backend, store=FakeStore(), rank=0, world_size=4)
        running = PROGRAMS[name](build())
        next(running)
        dist.destroy_process_group()
        next(running, None)
