"""Test that reductions over gloo add gradients in fp32 in rank order with every algorithm."""

from __future__ import annotations

import gc
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist

from composable_fsdp.errors import PeerError
from tests._internals import Collective, Transfer, is_over_group
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import over_gloo


def own(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.behaviour("C-01")
@on_ranks(1, 4)
def test_sums_are_made_in_fp32_in_the_order_of_ranks() -> None:
    group = dist.group.WORLD
    assert group is not None
    communicator = over_gloo(group)
    rank, size = communicator.rank, communicator.size
    numels = (0, 1, 1000, 40_000, 600_000)  # empty; packed with others; sent alone in several pieces
    for numel, dtype in product(numels, (torch.float32, torch.bfloat16, torch.float16)):
        output = torch.empty(numel, dtype=dtype)
        communicator.launch(Collective.REDUCE_SCATTER, [Transfer(output, own(rank, size * numel, dtype))]).wait()
        expected = torch.zeros(numel)
        for peer in range(size):
            part = own(peer, size * numel, dtype).view(size, numel)[rank].float()
            expected = part if peer == 0 else expected + part
        assert torch.equal(output, expected.to(dtype)), (numel, dtype)


@pytest.mark.behaviour("C-01")
@on_ranks(2, 4, timeout=30.0)
def test_work_that_is_not_waited_for_does_not_block_later_work() -> None:
    group = dist.group.WORLD
    assert group is not None
    communicator = over_gloo(group)
    rank, size = communicator.rank, communicator.size
    if rank:
        time.sleep(0.5)  # so that the works that the first rank drops have not finished
    for k in range(2):
        communicator.launch(
            Collective.ALL_GATHER, [Transfer(torch.empty(size * 1000), own(rank + 10 * k, 1000, torch.float32))]
        )
        gc.collect()
    output = torch.empty(size * 1000)
    communicator.launch(Collective.ALL_GATHER, [Transfer(output, own(rank, 1000, torch.float32))]).wait()
    assert torch.equal(output, torch.cat([own(peer, 1000, torch.float32) for peer in range(size)]))


@pytest.mark.behaviour("H-01")
@on_ranks(2, timeout=20.0)
def test_failed_work_raises_again_after_ranks_reconnect() -> None:
    group = dist.group.WORLD
    assert group is not None
    communicator = over_gloo(group)
    assert is_over_group(communicator)
    transfer = Transfer(torch.empty(communicator.size * 10), torch.ones(10))
    works = [communicator.launch(Collective.ALL_GATHER, [transfer])] if communicator.rank == 0 else []
    for work in works:
        communicator.give_up("rank 1 is gone.")
        for _ in range(2):
            with pytest.raises(PeerError, match=r"all-gather \(operation 1 .* cannot be done, since rank 1 is gone"):
                work.wait()
    communicator.abandon()
    communicator.reopen()
    for work in works:
        with pytest.raises(PeerError, match=r"\(operation 1 .* given up when the ranks connected anew. Begin the step"):
            work.wait()
    communicator.launch(Collective.ALL_GATHER, [transfer]).wait()
    assert torch.equal(transfer.output, torch.ones(communicator.size * 10))
