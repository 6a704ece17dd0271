"""The codecs that the ``CommunicationPolicy`` of a parameter has for it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar, cast

from composable_fsdp._core.layout import ALIGNMENT_BYTES, TensorShards
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp.codecs.communication_policy import CommunicationPolicy
from composable_fsdp.codecs.error_feedback import without_feedback
from composable_fsdp.codecs.protocol import CodecPerParameter, resolve_codec

AnyCodec = TypeVar("AnyCodec")


def encodable_among(parameters: Sequence[ShardedParameter]) -> set[ShardedParameter]:
    """Return the numbers that are large enough and sharded over every model-parallel axis that shards any of the group.

    A codec rounds neighbouring values together. Ranks with replicas of one parameter but different shards of its
    neighbours would round the replicas differently, and these would drift apart.
    """
    axes = {p: _model_parallel_axes(p) for p in parameters}
    every = frozenset[str | int]().union(*axes.values())
    numbers = (p for p in parameters if axes[p] == every and p.dtype.is_floating_point and not p.is_packed)
    return {p for p in numbers if prod(p.shape) >= policy_of(p).min_numel}


def _model_parallel_axes(parameter: ShardedParameter) -> frozenset[str | int]:
    """Return the model-parallel mesh axes that shard the parameter too. On the other axes ranks hold replicas."""
    inner = parameter.sharding.inner
    if inner is None:
        return frozenset()
    names: Sequence[str | int] = inner.mesh.mesh_dim_names or range(inner.mesh.ndim)
    axes = zip(names, inner.mesh.shape, inner.placements, strict=True)
    return frozenset(name for name, size, placement in axes if size > 1 and not placement.is_replicate())


def policy_of(parameter: ShardedParameter) -> CommunicationPolicy:
    return cast("CommunicationPolicy | None", parameter.communication) or CommunicationPolicy()


def resolved(codec: AnyCodec, parameter: ShardedParameter) -> AnyCodec:
    """Return ``codec`` for the shape of the shards of ``parameter``."""
    return resolve_codec(codec, _padded_shape(parameter))


def name_of_own_bucket(parameter: ShardedParameter) -> str:
    """Return the name if padding in a shared message would shift the rows that a row-wise codec counts."""
    chosen = policy_of(parameter)
    codecs = chosen.all_gather, without_feedback(chosen.reduce_scatter)
    shifts = prod(_padded_shape(parameter)) % ALIGNMENT_BYTES != 0
    return parameter.name if shifts and any(isinstance(codec, CodecPerParameter) for codec in codecs) else ""


def _padded_shape(parameter: ShardedParameter) -> tuple[int, ...]:
    return TensorShards(parameter.shape, parameter.dim, parameter.sharding.axes.shard.size).padded_shape
