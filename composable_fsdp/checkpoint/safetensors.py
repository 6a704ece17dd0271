"""``load_safetensors``: from files in the layout of Hugging Face straight into shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from composable_fsdp.checkpoint.agreement import Ranks
from composable_fsdp.checkpoint.held import Held, KeyMap, block, held_tensors
from composable_fsdp.checkpoint.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint.stored import Reader, Stored, StoredTensors
from composable_fsdp.errors import CheckpointError

__all__ = ["load_safetensors"]

_SHOWN = 20


def load_safetensors(
    model: nn.Module,
    path_or_index: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> _IncompatibleKeys:
    """Loads parameters and persistent buffers of ``model`` from safetensors files. All ranks call it together.

    Each rank reads the elements that it holds and no others, however they are cut, and copies them from the mapped
    file to where they rest. Besides that it needs about 32 MB.

    All is checked on all ranks before anything is written, so that after an error the model is what it was; only where
    files can be opened but not read does it say that the model is loaded in part. Files have no checksums: bytes
    that changed within a tensor go unseen.

    Args:
        model: sharded or not, in memory: after ``fully_shard`` on the meta device call
            :func:`composable_fsdp.to_empty` first. Plain tensors are read whole by every rank.
        path_or_index: a ``.safetensors`` file, a ``.safetensors.index.json`` of several, or a directory with either,
            such as ``save_pretrained`` and :func:`save_safetensors` make.
        key_map: from a name in the model to the name in the files, so that with files made for another
            implementation of the model ``lambda name: f"model.{name}"`` or ``{"head.weight": "lm_head.weight"}`` do;
            names that a mapping lacks are the same in both. Names in the model are those before anything wrapped it,
            as in ``composable_fsdp.checkpoint.state_dict``.
        strict: whether a tensor that is only in the model, or only in the files, is an error, and so are tied
            parameters that the files have under several names with different values; else the first name's count.
        convert_dtype: whether files may have other dtypes than the model, which keeps its own: to train fp32
            parameters from a bf16 checkpoint, say so. What has an imaginary or fractional part fits no dtype without.
        process_group: the ranks that make the call, if they are not all. With a pipeline, for instance, those of a
            stage, which holds a part of the tensors (``strict=False``).

    Returns:
        ``missing_keys``, which are only in the model, and ``unexpected_keys``, only in the files, as
        ``nn.Module.load_state_dict`` does. Of tied parameters one name in the files is enough, and only if there is
        none is the first one missing. Extra state of modules is not loaded, and not missing.

    Raises:
        CheckpointError: the same on all ranks: a file is missing or damaged, or the model does not fit, or ranks see
            different files.
    """
    ranks = Ranks(process_group)
    with ranks.agreeing():
        stored = StoredTensors.at(Path(path_or_index))
        tensors, _ = held_tensors(model, key_map)
        match = _matched(tensors, stored, strict=strict, convert_dtype=convert_dtype)
    _check_same_files(stored, ranks)
    jobs = sorted(match.found, key=lambda job: stored.tensors[job[1]].file)  # stable: else in the model's order
    total = sum(held.local_nbytes for held, _ in jobs)
    reader = Reader(stored)
    with ranks.agreeing(), progress_bar(ranks.is_first and wants_progress(None), "loading", total) as advance:
        for held, key in jobs:
            try:
                _read(held, key, reader)
            except Exception as error:
                raise CheckpointError(
                    f"{stored.tensors[key].file} could not be read at {key!r}: {error}. The model is loaded in part."
                ) from error
            advance(held.local_nbytes)
    return _IncompatibleKeys(match.missing, match.unexpected)


@torch.no_grad()
def _read(held: Held, key: str, reader: Reader) -> None:
    with held.plain(write=True) as part:
        for box, values in reader.blocks(key, held.extent.boxes()):
            block(part, box).copy_(values)


# -- what goes where


@dataclass
class _Match:
    """Which tensor of the files goes to which of the model, and what is on one side only."""

    found: list[tuple[Held, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def _matched(tensors: Sequence[Held], stored: StoredTensors, *, strict: bool, convert_dtype: bool) -> _Match:
    match = _Match()
    problems: dict[str, list[str]] = {}
    for held in tensors:
        keys = list(dict.fromkeys(key for k in held.keys if (key := stored.key(k)) is not None))
        if not keys:
            match.missing.append(held.names[0])
            continue
        match.found.append((held, keys[0]))
        for key in keys if strict else keys[:1]:
            for kind, problem in _misfit(held, stored.tensors[key], convert_dtype=convert_dtype).items():
                problems.setdefault(kind, []).append(f"{_both(held.names[0], key)}: {problem}")
    wanted = {key for held in tensors for k in held.keys if (key := stored.key(k)) is not None}
    match.unexpected = [key for key in stored.tensors if key not in wanted]
    if strict:
        of_name = {held.names[0]: held.keys[0] for held in tensors}
        problems |= {
            "missing in the files": [_both(name, of_name[name]) for name in match.missing],
            "not in the model (strict=False passes over them)": match.unexpected,
        }
        if not any(problems.values()):
            problems["tied in the model, but with different values in the files"] = _untied(tensors, stored)
    text = "".join(f"\n  {kind}: {_some(names)}" for kind, names in problems.items() if names)
    if text:
        raise CheckpointError(f"{stored.path} does not fit the model; nothing was loaded:{text}")
    return match


def _misfit(held: Held, found: Stored, *, convert_dtype: bool) -> dict[str, str]:
    """What keeps ``found`` from being loaded into ``held``, by the kind of problem."""
    if found.shape != held.shape:
        return {"shapes": f"{held.shape} in the model, {found.shape} in the files"}
    if found.dtype == held.value.dtype:
        return {}
    both = f"{held.value.dtype} in the model, {found.dtype or found.code} in the files"
    if found.dtype is None or not torch.can_cast(found.dtype, held.value.dtype):
        return {"dtypes that cannot be converted": both}
    return {} if convert_dtype else {"dtypes (convert_dtype=True converts them)": both}


def _untied(tensors: Sequence[Held], stored: StoredTensors) -> list[str]:
    """Tied parameters that the files have several times, with different values in this rank's part."""
    untied = []
    for held in tensors:
        first, *others = list(dict.fromkeys(key for k in held.keys if (key := stored.key(k)) is not None))
        for other in others:
            pairs = zip(*(Reader(stored).blocks(key, held.extent.boxes()) for key in (first, other)), strict=True)
            if not all(_same_bits(one, two) for (_, one), (_, two) in pairs):
                untied.append(f"{first} and {other}")
    return untied


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (t.reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def _both(name: str, key: str) -> str:
    return name if name == key else f"{name} (in the files {key})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_same_files(stored: StoredTensors, ranks: Ranks) -> None:
    """That all ranks see the same tensors: a path may lead elsewhere on another host."""
    described = sorted((name, found.code, found.shape) for name, found in stored.tensors.items())
    digest = hashlib.sha256(repr(described).encode()).hexdigest()
    of_ranks = ranks.gather((digest, str(stored.path)))
    first, path = of_ranks[0]
    others = [str(rank) for rank, (other, _) in enumerate(of_ranks) if other != first]
    if others:
        raise CheckpointError(
            f"{path} is not the same checkpoint on all ranks: rank {', '.join(others)} found other tensors than rank "
            "0. Put it on storage that all ranks share, or the same copy on every host."
        )
