"""Checkpoints that earlier versions wrote are read, by ``load`` and by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests._internals import MANIFEST, Kind, convert, describe_checkpoint
from tests.helpers.checkpoint_worlds import expected_value
from tests.helpers.run_ranks import run_ranks
from tests.helpers.stored_checkpoints import STORED, extract, read, read_on_the_writers_ranks


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    extract(folder)
    return folder


@pytest.mark.behaviour("F-07", "F-09", "F-11")
def test_checkpoints_of_earlier_versions_are_read(stored: Path) -> None:
    read(stored)
    run_ranks(read, 2, stored)
    run_ranks(read_on_the_writers_ranks, 2, stored)


@pytest.mark.behaviour("F-12")
def test_checkpoints_of_earlier_versions_are_verified_and_converted(stored: Path, tmp_path: Path) -> None:
    found = [path for path in stored.iterdir() if any(path.glob(f"step-*/{MANIFEST}"))]
    assert len(found) == len(STORED) + 3
    for path in found:
        assert not describe_checkpoint(path, verify=True).problems
        target = tmp_path / f"{path.name}.pt"
        convert(path, target, Kind.TORCH)
        model = torch.load(target, weights_only=True)["model"]
        for name in ("embedding.weight", "head.weight") if "embedding.weight" in model else ():
            assert torch.equal(model[name], expected_value("embedding.weight", model[name]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_them(stored: Path) -> None:
    for name in STORED:
        state = {"model": {"embedding.weight": torch.zeros(11, 5)}}
        dcp.load(state, checkpoint_id=stored / name / "step-00000007", no_dist=True)
        value = state["model"]["embedding.weight"]
        assert torch.equal(value, expected_value("embedding.weight", value))
