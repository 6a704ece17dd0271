"""The example that runs out of memory on one rank goes on with smaller microbatches, without a restart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.forked_python import forked_python
from tests.helpers.torchrun import torchrun


def losses_of(environment: Mapping[str, str], *flags: str) -> dict[tuple[int, int], tuple[int, float]]:
    said = torchrun("examples/out_of_memory.py", "--steps", "3", *flags, environment=environment)
    found = re.findall(r"rank (\d) step (\d) microbatches (\d+) loss ([\d.]+)", said)
    assert len(found) == 6, said
    return {(int(rank), int(step)): (int(count), float(loss)) for rank, step, count, loss in found}


@pytest.mark.multiprocess
def test_a_run_that_is_out_of_memory_has_the_losses_of_one_with_small_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The C library returns memory of this size when it is freed, so that the limit counts what is in use.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    with forked_python(tmp_path) as environment:
        limited = losses_of(environment, "--at", "1")
        counts = [limited[0, step][0] for step in range(3)]
        small = losses_of(environment, "--no-limit", "--microbatches", str(counts[2]))
    assert counts[0] == 1
    assert 1 < counts[1] <= counts[2] <= 16, "the last rank had no memory for the batch"
    assert counts == [limited[1, step][0] for step in range(3)], "all ranks have the same microbatches"
    for place, (_, loss) in small.items():  # the sum over microbatches has another order
        assert limited[place][1] == pytest.approx(loss, rel=1e-4)
