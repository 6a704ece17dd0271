"""Advice: which change of the settings would save how many bytes of the peak, and how many seconds.

The figures are estimates from one rehearsal. ``sweep`` makes a plan for each setting, which is closer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from composable_fsdp.plan.known_accelerators import Accelerator
from composable_fsdp.plan.rehearsal import Rehearsal
from composable_fsdp.plan.simulated_job import mesh_shape
from composable_fsdp.plugins.tuning.group_spec import GroupSpec
from composable_fsdp.policies import CPUOffloadPolicy, Reshard

__all__ = ["CHANGES", "PERSISTENT", "Advice", "advise", "offload_seconds"]

PERSISTENT = ("parameters", "gradients", "optimizer state")
"""The kinds of memory that are offloaded."""

_FREE, _KEEP = "reshard_after_forward=True", "reshard_after_forward=False"
_INT8 = "codecs"
_LEAST = 0.01
"""The share of the memory or of the time below which a saving is not worth a line."""


@dataclass(frozen=True)
class Advice:
    """A change of the settings.

    Args:
        setting: the keywords for ``plan`` and ``fully_shard``, or a call, as text.
        saved_bytes: the bytes by which it lowers the peak of memory, about. Negative if it needs more.
        saved_seconds: the seconds by which it shortens a step, about. Negative if the step takes longer.
        why: the reason in words.
    """

    setting: str
    saved_bytes: int
    saved_seconds: float
    why: str


def _with_reshard(value: bool) -> Callable[[GroupSpec], GroupSpec]:
    return lambda spec: replace(spec, reshard=Reshard.parse(value, spec.ranks))


def _encoded(spec: GroupSpec) -> GroupSpec:
    """Return ``spec`` with half of the bytes that are sent, as int8 has beside 16 bits."""
    return replace(spec, full_bytes=spec.full_bytes // 2, gradient_bytes=tuple(n // 2 for n in spec.gradient_bytes))


CHANGES: Mapping[str, Callable[[GroupSpec], GroupSpec]] = {
    _FREE: _with_reshard(True),
    _KEEP: _with_reshard(False),
    _INT8: _encoded,
}
"""The changes of groups that are predicted by the simulation of the schedule."""


def offload_seconds(rehearsal: Rehearsal, accelerator: Accelerator) -> float:
    """Return the time in which shards and gradients cross between device and host, not overlapped."""
    moved = 2 * rehearsal.peak.largest["parameters"]
    return moved / (accelerator.host_gbit * 1e9 / 8)


def advise(
    rehearsal: Rehearsal,
    uncached: Rehearsal | None,
    accelerator: Accelerator,
    mesh: str,
    settings: Mapping[str, Any],
    *,
    recompute: bool,
) -> tuple[Advice, ...]:
    """Return the changes that would save memory, or time in memory that is there: the most bytes first.

    Before them comes the key/value cache, if ``uncached``, the rehearsal without it, is not ``None``.
    """
    found = [*_of_groups(rehearsal, settings), *_of_shards(rehearsal, accelerator, mesh, settings)]
    if not recompute and rehearsal.activations:
        found.append(_recomputation(rehearsal))
    total = sum(rehearsal.peak.nbytes.values())
    seconds, spare = rehearsal.timeline.seconds, accelerator.bytes - rehearsal.peak.fragmentation - total
    faster = [each for each in found if each.saved_seconds > _LEAST * seconds and each.saved_bytes >= min(0, -spare)]
    useful = {each for each in found if each.saved_bytes > _LEAST * total}.union(faster)
    first = [] if uncached is None else [_without_cache(rehearsal, uncached)]
    return (*first, *sorted(useful, key=lambda each: (-each.saved_bytes, -each.saved_seconds)))


def _without_cache(rehearsal: Rehearsal, uncached: Rehearsal) -> Advice:
    why = "the key/value cache is for generation, and recomputation adds to it again"
    # Without a cache transformers makes a mask for each layer of fake tensors that a run does not have.
    saved = max(0, sum(rehearsal.peak.nbytes.values()) - sum(uncached.peak.nbytes.values()))
    return Advice("model.config.use_cache = False", saved, rehearsal.timeline.seconds - uncached.timeline.seconds, why)


def _of_groups(rehearsal: Rehearsal, settings: Mapping[str, Any]) -> Iterator[Advice]:
    """Yield the changes of groups, and of what is sent and kept of them."""
    now, held, variants = rehearsal.timeline, rehearsal.peak.nbytes, rehearsal.variants
    if settings.get("policy") is None and rehearsal.groups == 1:
        why = "the model is one group, so all of it is unsharded at once and nothing overlaps"
        saved = int(0.9 * (held["unsharded"] + held["messages"]))
        yield Advice("policy=transformer_blocks()", saved, now.exposed / 2, why)
    whys = {
        _FREE: "frees parameters after forward, and gathers them again in backward",
        _KEEP: "keeps parameters from forward to backward, which gathers nothing then",
    }
    for setting, why in whys.items():
        if str(settings.get("reshard_after_forward")) not in setting:
            other = variants[setting]
            yield Advice(setting, now.peak_bytes - other.peak_bytes, now.seconds - other.seconds, why)
    if settings.get("comm_policy") is None:
        why = "sends about half of the bytes of 16-bit parameters and gradients; changes numbers"
        setting = "comm_policy=CommunicationPolicy(...) with Int8 codecs"
        yield Advice(setting, 0, now.seconds - variants[_INT8].seconds, why)
    policy = settings.get("mp_policy")
    if not isinstance(policy, Mapping) and getattr(policy, "param_dtype", None) in (None, torch.float32):
        saved = (held["unsharded"] + held["activations"] + held["messages"]) // 2
        why = "computes and gathers in 16 bits, if parameters are in fp32 now"
        yield Advice("mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)", saved, 0.4 * now.seconds, why)


def _of_shards(
    rehearsal: Rehearsal, accelerator: Accelerator, mesh: str, settings: Mapping[str, Any]
) -> Iterator[Advice]:
    """Yield the changes of where shards are, and between how many ranks."""
    shape, exposed = mesh_shape(mesh), rehearsal.timeline.exposed
    shards, ranks, per_host = shape[-1], prod(shape), accelerator.ranks_per_host
    held = sum(rehearsal.peak.nbytes[kind] for kind in PERSISTENT)
    if accelerator.has_streams and not isinstance(settings.get("offload_policy"), CPUOffloadPolicy):
        why = "keeps shards, gradients and optimizer state in host memory; without the time of the optimizer there"
        yield Advice("offload_policy=CPUOffloadPolicy()", held, -offload_seconds(rehearsal, accelerator), why)
    if shards < ranks:
        why = "shards over all ranks instead of replicating"
        yield Advice(f"mesh={ranks}", held - held * shards // ranks, 0.0, why)
    elif shards > per_host and ranks % per_host == 0:
        saved = exposed * (1 - accelerator.gbit / (accelerator.link_gbit or accelerator.gbit))
        why = "gathers within hosts, and reduces gradients between them too (hybrid)"
        yield Advice(f"mesh={ranks // per_host}x{per_host}", held - held * ranks // per_host, saved, why)


def _recomputation(rehearsal: Rehearsal) -> Advice:
    kept = rehearsal.activations
    saved = sum(each.kept - each.inputs for each in kept.values())
    if rehearsal.peak.place.partition(" of ")[2] in kept:  # then what one of them keeps is made again there
        saved -= max(each.kept for each in kept.values())
    seconds = sum(rehearsal.forward.get(name, 0.0) for name in kept)
    why = "keeps only the inputs of groups, and runs their forward again in backward (activation checkpointing)"
    return Advice("recompute=True", min(saved, rehearsal.peak.nbytes["activations"]), -seconds, why)
