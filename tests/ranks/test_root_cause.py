"""The root cause in torchrun's report is the rank that failed by its own fault."""

from __future__ import annotations

import os
import re

import pytest

from tests.helpers.torchrun import finished

TIMES = int(os.environ.get("ROOT_CAUSE_TIMES", "1"))
"""Runs of each case. Ten take more than half an hour."""


@pytest.mark.behaviour("H-05")
@pytest.mark.parametrize(
    ("fault", "ranks", "recorded"),
    [
        ("raises in forward", 2, True),
        *(
            pytest.param(fault, ranks, recorded, marks=pytest.mark.skipif(TIMES == 1, reason="ROOT_CAUSE_TIMES is 1"))
            for fault in ("raises", "exits", "is killed")
            for ranks in (2, 4)
            for recorded in (False, True)
        ),
    ],
)
@pytest.mark.parametrize("time", range(TIMES))
def test_torchruns_root_cause_is_the_rank_at_fault(time: int, fault: str, ranks: int, recorded: bool) -> None:
    flags = [fault, *["record"] * recorded]
    done = finished("tests/helpers/failing_rank.py", *flags, launcher=("--nproc-per-node", str(ranks)))
    assert done.returncode == 1
    others, cause = done.stdout.split("Root Cause (first observed failure):")
    assert re.search(r"^  rank      : 1 ", cause, re.MULTILINE), done.stdout
    if recorded and fault.startswith("raises"):
        assert re.search(r"ValueError: raised by rank 1|ArithmeticError: test failure", cause)
    if not fault.startswith("is killed"):  # torchrun ends the others before they know
        files = re.findall(r"^  composable_fsdp\.errors\.PeerError: .*rank 1 .*", others, re.MULTILINE)
        assert len(files) >= 1, done.stdout
