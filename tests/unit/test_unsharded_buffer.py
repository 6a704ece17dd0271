"""Freeing and reallocation of memory under views that autograd saved."""

from __future__ import annotations

import torch

from tests._internals import OwnedBuffer


def made() -> tuple[OwnedBuffer, torch.Tensor]:
    buffer = OwnedBuffer(1000, torch.float32, torch.device("cpu"))
    return buffer, buffer.parameter_data(100, (30, 30))


def test_existing_memory_is_not_allocated_again() -> None:
    # torch would move the data, which takes the time of a copy and twice the memory.
    buffer, view = made()
    buffer.region(100, 900).copy_(torch.arange(900.0))
    before = view.data_ptr()
    buffer.allocate()
    assert view.data_ptr() == before
    assert torch.equal(view.view(-1), torch.arange(900.0))


def test_views_survive_freeing_of_the_storage() -> None:
    buffer, view = made()
    buffer.free()
    buffer.free()
    assert buffer.nbytes == 0
    buffer.allocate()
    assert buffer.nbytes == 4000
    buffer.region(100, 900).fill_(3.0)
    assert torch.equal(view, torch.full((30, 30), 3.0))
