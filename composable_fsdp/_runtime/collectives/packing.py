"""Packing of the payloads of several buckets into one message, whatever their dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from composable_fsdp._comm.communicator import Communicator, Transfer
from composable_fsdp._layout.bucket_layout import aligned_bytes
from composable_fsdp._runtime.collectives.bucket import AllGatherBuffers

__all__ = ["describe_groups", "group_by_key", "pack_messages"]

Key = TypeVar("Key")
Member = TypeVar("Member")


def pack_messages(
    gathers: Sequence[AllGatherBuffers], communicator: Communicator, device: torch.device
) -> list[Transfer]:
    """Pack all payloads into one message and return its transfer. Sets the ``rows`` of each gather.

    A single payload is sent without a copy. Several are copied into one message, each aligned: a copy of packed
    payloads, which are small, is cheaper than one more launch.
    """
    filled = [gather for gather in gathers if gather.payloads]
    payloads = [payload for gather in filled for payload in gather.payloads]
    if not payloads:
        return []
    if len(payloads) == 1:
        sent, rows = payloads[0], _rows_of(payloads[0], communicator, device)
        places: Sequence[torch.Tensor] = (rows,)
    elif _fit_end_to_end(payloads):
        sent = communicator.allocate(sum(p.numel() for p in payloads), payloads[0].dtype, device)
        torch.cat(payloads, out=sent)
        rows = _rows_of(sent, communicator, device)
        places = torch.split_with_sizes(rows, [p.numel() for p in payloads], dim=1)
    else:
        sent, rows, places = _as_bytes(payloads, communicator, device)
    remaining = iter(places)
    for gather in filled:
        gather.rows, gather.messages = [next(remaining) for _ in gather.payloads], [rows, sent]
    return [Transfer(rows.view(-1), sent)]


def _rows_of(sent: torch.Tensor, communicator: Communicator, device: torch.device) -> torch.Tensor:
    """Allocate the memory that receives ``sent`` from all ranks, one row per rank."""
    received = communicator.allocate(communicator.size * sent.numel(), sent.dtype, device)
    return received.view(communicator.size, sent.numel())


def _fit_end_to_end(payloads: Sequence[torch.Tensor]) -> bool:
    """Return True if all payloads have one dtype, and their concatenation leaves each aligned."""
    dtype = payloads[0].dtype
    return all(p.dtype == dtype and p.nbytes == aligned_bytes(p.nbytes) for p in payloads)


def _as_bytes(
    payloads: Sequence[torch.Tensor], communicator: Communicator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the message, the memory for all ranks' messages, and the views of each payload in that."""
    sent = communicator.allocate(sum(aligned_bytes(p.nbytes) for p in payloads), torch.uint8, device)
    rows = _rows_of(sent, communicator, device)
    places, start = [], 0
    for payload in payloads:
        stop = start + payload.nbytes
        sent[start:stop].view(payload.dtype).copy_(payload)
        place = rows[:, start:stop]
        # Empty rows cannot be viewed: their stride is not a multiple of the itemsize.
        places.append(place.view(payload.dtype) if payload.numel() else place.to(payload.dtype))
        start += aligned_bytes(payload.nbytes)
    return sent, rows, places


def describe_groups(names: Sequence[str]) -> str:
    """Return the name in errors of several groups that share a collective."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} groups)"


def group_by_key(keys: Iterable[Key], members: Iterable[Member]) -> list[tuple[Key, list[Member]]]:
    """Group members with equal keys, in the order of the first of each: the same on every rank."""
    keys, members = list(keys), list(members)
    if keys and keys.count(keys[0]) == len(keys) == len(members):  # usually one communicator: skip hashing it
        return [(keys[0], members)]
    found: dict[Key, list[Member]] = {}
    for key, member in zip(keys, members, strict=True):
        found.setdefault(key, []).append(member)
    return list(found.items())
