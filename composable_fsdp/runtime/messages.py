"""Payloads of several buckets in one message, whatever their dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_fsdp.comm.protocol import Communicator, Transfer
from composable_fsdp.layout.bucket import aligned_bytes
from composable_fsdp.runtime.bucket import Gather

__all__ = ["pack_messages"]


def pack_messages(gathers: Sequence[Gather], communicator: Communicator, device: torch.device) -> list[Transfer]:
    """The transfer of all payloads, and their places in what it brings, in ``rows`` of each gather.

    A single payload is sent from where it lies. Several are copied, as bytes, into one message, each on an aligned
    boundary: one launch costs more than the copy of what is small enough to be packed.
    """
    filled = [gather for gather in gathers if gather.payloads]
    payloads = [payload for gather in filled for payload in gather.payloads]
    if not payloads:
        return []
    num_shards = communicator.size
    if len(payloads) == 1:
        (payload,) = payloads
        received = communicator.allocate(num_shards * payload.numel(), payload.dtype, device)
        filled[0].rows, filled[0].messages = [received.view(num_shards, payload.numel())], [received]
        return [Transfer(received, payload)]
    ends, end = [], 0
    for payload in payloads:
        end += aligned_bytes(payload.nbytes)
        ends.append(end)
    sent = communicator.allocate(end, torch.uint8, device)
    received = communicator.allocate(num_shards * end, torch.uint8, device)
    rows = received.view(num_shards, end)
    start = 0
    places = []
    for payload, stop in zip(payloads, ends, strict=True):
        sent[start : start + payload.nbytes].view(payload.dtype).copy_(payload)
        places.append(rows[:, start : start + payload.nbytes].view(payload.dtype))
        start = stop
    remaining = iter(places)
    for gather in filled:
        gather.rows = [next(remaining) for _ in gather.payloads]
        gather.messages = [received, sent]
    return [Transfer(received, sent)]
