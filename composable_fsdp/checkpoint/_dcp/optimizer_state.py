"""Each rank's optimizer state, and how it is merged over all ranks for a save.

Ranks may hold different parameters, as pipeline stages do. Also, one rank alone cannot tell whether a plain tensor in
the state is its shard of a larger tensor or a copy that is equal on every rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint._state_dict.optimizer_params import (
    OptimizerParam,
    OptimizerParams,
    has_shards_shape,
    is_plain,
)
from composable_fsdp.errors import CheckpointError

__all__ = ["Contribution", "MergedState", "check_replicated", "contribution_of", "merge", "serialize", "state_of"]

StateKey = tuple[str, str]
"""The name of a parameter and the key of a state entry."""


@dataclass(frozen=True)
class Contribution:
    """One rank's contribution to the saved optimizer state.

    Attributes:
        groups: serialized param groups by the names of their parameters.
        may_be_shards: for each plain tensor of the state, True if it has the shape of this rank's shard.
    """

    groups: Mapping[tuple[str, ...], bytes] = field(default_factory=dict)
    may_be_shards: Mapping[StateKey, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class MergedState:
    """The merged contributions of all ranks.

    Attributes:
        groups: all param groups, with parameter names in ``params``.
        shards: state entries that are a shard on every rank that has them.
    """

    groups: list[dict[str, Any]]
    shards: frozenset[StateKey]


def contribution_of(model: nn.Module, optimizer: Optimizer | None) -> Contribution:
    """Return this rank's contribution.

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's.
    """
    if optimizer is None:
        return Contribution()
    groups = {}
    params = OptimizerParams(model, optimizer)
    for members, group in zip(params.groups, optimizer.param_groups, strict=True):
        names = [member.name for member in members]
        groups[tuple(names)] = serialize({**group, "params": names})
    plain = {
        (member.name, key): has_shards_shape(value, member)
        for member, key, value in state_of(params)
        if is_plain(value, member)
    }
    return Contribution(groups, plain)


def merge(contributions: Sequence[Contribution]) -> MergedState:
    """Merge the contributions of all ranks. If ranks have a group of the same parameters, the first rank's is used."""
    groups: dict[tuple[str, ...], bytes] = {}
    may_be_shards: dict[StateKey, bool] = {}
    for contribution in contributions:
        groups = {**contribution.groups, **groups}
        for key, may_be in contribution.may_be_shards.items():
            may_be_shards[key] = may_be and may_be_shards.get(key, True)
    deserialized = [torch.load(io.BytesIO(data), map_location="cpu", weights_only=False) for data in groups.values()]
    return MergedState(deserialized, frozenset(key for key, are in may_be_shards.items() if are))


def state_of(params: OptimizerParams) -> Iterator[tuple[OptimizerParam, str, Any]]:
    """Yield each parameter with each key and value of its optimizer state."""
    for member in params.members.values():
        for key, value in params.state_of(member).items():
            yield member, str(key), value


def serialize(value: object) -> bytes:
    """Return ``value`` as serialized by ``torch.save``."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def check_replicated(checksums: Sequence[Mapping[str, int]]) -> None:
    """Raise unless the tensors that are saved once are equal on all ranks.

    Args:
        checksums: for each rank, checksums by checkpoint key.

    Raises:
        CheckpointError: the values differ between ranks.
    """
    first: dict[str, tuple[int, int]] = {}
    for rank, on_rank in enumerate(checksums):
        for key, found in on_rank.items():
            first_rank, expected = first.setdefault(key, (rank, found))
            if found != expected:
                raise CheckpointError(
                    f"{key} is a plain tensor with other values on rank {rank} than on rank {first_rank}, but "
                    "only one is saved. Have the optimizer keep a DTensor, or a tensor of the local shard's shape."
                )
