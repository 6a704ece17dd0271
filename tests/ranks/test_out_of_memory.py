"""The example that runs out of memory on one rank goes on with smaller microbatches, without a restart."""

from __future__ import annotations

import re

import pytest

from tests.helpers.torchrun import torchrun


def losses_of(*flags: str) -> dict[tuple[int, int], tuple[int, float]]:
    # The C library returns memory of this size when it is freed, so that the limit counts what is in use.
    said = torchrun(
        "examples/out_of_memory.py", "--steps", "3", *flags, environment={"MALLOC_MMAP_THRESHOLD_": "65536"}
    )
    found = re.findall(r"rank (\d) step (\d) microbatches (\d+) loss ([\d.]+)", said)
    assert len(found) == 6, said
    return {(int(rank), int(step)): (int(count), float(loss)) for rank, step, count, loss in found}


@pytest.mark.multiprocess
def test_a_run_that_is_out_of_memory_has_the_losses_of_one_with_small_microbatches() -> None:
    limited = losses_of("--at", "1")
    counts = [limited[0, step][0] for step in range(3)]
    assert counts[0] == 1
    assert 1 < counts[1] <= counts[2] <= 16, "the last rank had no memory for the batch"
    assert counts == [limited[1, step][0] for step in range(3)], "all ranks have the same microbatches"
    small = losses_of("--no-limit", "--microbatches", str(counts[2]))
    for place, (_, loss) in small.items():  # the sum over microbatches has another order
        assert limited[place][1] == pytest.approx(loss, rel=1e-4)
