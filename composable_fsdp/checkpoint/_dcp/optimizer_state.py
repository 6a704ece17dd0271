"""What each rank has of an optimizer to save, and what that is on all of them together.

Ranks may have other parameters, as the stages of a pipeline do. And what one rank holds does not say whether a plain
tensor is its shard of something larger, or the same on every rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.mismatch import named
from composable_fsdp.checkpoint._state_dict.local_state import has_shards_shape, is_plain
from composable_fsdp.checkpoint._state_dict.rekey import Member, members_of
from composable_fsdp.errors import CheckpointError

__all__ = ["Agreed", "Offer", "agreed", "check_alike", "offer_of", "packed", "state_of"]

StateKey = tuple[str, str]
"""Name of a parameter, and of state for it."""


@dataclass(frozen=True)
class Offer:
    """What one rank has.

    Attributes:
        groups: serialised, by names of their members, which stand for the parameters.
        may_be_shards: whether a plain tensor of the state has the shape of this rank's shard.
    """

    groups: Mapping[tuple[str, ...], bytes] = field(default_factory=dict)
    may_be_shards: Mapping[StateKey, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreed:
    """What all ranks have.

    Attributes:
        groups: of all of them, with names in ``params``.
        shards: state that is a shard on every rank that has it.
    """

    groups: list[dict[str, Any]]
    shards: frozenset[StateKey]


def offer_of(model: nn.Module, optimizer: Optimizer | None) -> Offer:
    """What this rank has.

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's.
    """
    if optimizer is None:
        return Offer()
    groups = {}
    for members, group in zip(members_of(model, optimizer), optimizer.param_groups, strict=True):
        names = [member.name for member in members]
        groups[tuple(names)] = packed({**group, "params": names})
    plain = {
        (member.name, key): has_shards_shape(value, member)
        for member, key, value in state_of(model, optimizer)
        if is_plain(value, member)
    }
    return Offer(groups, plain)


def agreed(offers: Sequence[Offer]) -> Agreed:
    """Out of the offers of all ranks. Of groups with the same members the first counts."""
    groups: dict[tuple[str, ...], bytes] = {}
    may_be_shards: dict[StateKey, bool] = {}
    for offer in offers:
        groups = {**offer.groups, **groups}
        for key, may_be in offer.may_be_shards.items():
            may_be_shards[key] = may_be and may_be_shards.get(key, True)
    unpacked = [torch.load(io.BytesIO(data), map_location="cpu", weights_only=False) for data in groups.values()]
    return Agreed(unpacked, frozenset(key for key, are in may_be_shards.items() if are))


def state_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[Member, str, Any]]:
    """Everything that the optimizer keeps for a parameter."""
    for members in members_of(model, optimizer):
        for member in members:
            for key, value in optimizer.state.get(member.parameter, {}).items():
                yield member, str(key), value


def packed(value: object) -> bytes:
    """As ``torch.save`` serialises it."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def check_alike(checksums: Sequence[Mapping[str, int]]) -> None:
    """That all ranks have the same of what is saved of one of them.

    Args:
        checksums: of each rank, by keys of the checkpoint.

    Raises:
        CheckpointError: some have other values.
    """
    first: dict[str, tuple[int, int]] = {}
    for rank, of_rank in enumerate(checksums):
        for key, found in of_rank.items():
            of, expected = first.setdefault(key, (rank, found))
            if found != expected:
                raise CheckpointError(
                    f"{key} is a plain tensor with other values on {named([rank])} than on {named([of])}, of which one "
                    "would be saved. Have the optimizer keep a DTensor, or a tensor of the local shard's shape."
                )
