"""``load_safetensors``: from files in the layout of Hugging Face straight into shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from composable_fsdp.checkpoint._coordination.mismatch import (
    Mismatch,
    differ,
    dtype_name,
    leave_common_unexpected,
    named,
    refuse,
    tensor_text,
)
from composable_fsdp.checkpoint._coordination.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._safetensors.keys import Keyed, KeyMap, keyed_tensors
from composable_fsdp.checkpoint._safetensors.reader import Reader, Stored, StoredTensors
from composable_fsdp.checkpoint._state_dict.shard_view import Part
from composable_fsdp.errors import CheckpointError

__all__ = ["load_safetensors"]


def load_safetensors(
    model: nn.Module,
    path_or_index: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    timeout: float = TIMEOUT,
) -> _IncompatibleKeys:
    """Loads parameters and persistent buffers of ``model`` from safetensors files. All ranks of the default process
    group must call it, also those that hold another part of the model, such as the stages of a pipeline.

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
        strict: whether a tensor that is only in the model, or that the files have and no rank's model, is an error, and
            so are tied parameters that the files have under several names with different values; else the first name's
            count.
        convert_dtype: whether files may have other dtypes than the model, which keeps its own: to train fp32
            parameters from a bf16 checkpoint, say so. What has an imaginary or fractional part fits no dtype without.
        timeout: seconds that ranks wait for each other, to come and whenever they exchange what they have.

    Returns:
        ``missing_keys``, which are only in this rank's model, and ``unexpected_keys``, in no rank's, as
        ``nn.Module.load_state_dict`` does. Of tied parameters one name in the files is enough, and only if there is
        none is the first one missing. Extra state of modules is not loaded, and not missing.

    Raises:
        CheckpointError: the same on all ranks: a file is missing or damaged, or the model does not fit, or ranks see
            different files, or some did not come, or an earlier asynchronous save failed.
    """
    what = "load_safetensors"
    ranks = meet(what, timeout)
    load = _Load(Path(path_or_index))
    unexpected = ranks.exchange(
        what,
        lambda: load.match(model, key_map, strict=strict, convert_dtype=convert_dtype),
        lambda fits: _judged(fits, type(model).__name__, strict=strict),
    )
    ranks.agree(what, lambda: load.read(show=ranks.rank == 0 and wants_progress(None)))
    return _IncompatibleKeys(list(load.mismatch.missing), unexpected)


@dataclass(frozen=True)
class _Fit:
    """How the files at ``path`` fit one rank. They are the same as those with the same ``digest``."""

    mismatch: Mismatch
    path: Path
    digest: str


class _Load:
    """One call of :func:`load_safetensors`, on one rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: list[tuple[Part, str]] = []
        """What is to be read, with its key in the files."""
        self.mismatch = Mismatch()

    def match(self, model: nn.Module, key_map: KeyMap | None, *, strict: bool, convert_dtype: bool) -> _Fit:
        """Finds out which tensor of the files goes to which of the model, and how they differ."""
        self._stored, mismatch = StoredTensors.at(self._path), self.mismatch
        tensors, used = keyed_tensors(model, key_map)[0], set()
        for tensor in tensors:
            found = _found(tensor, self._stored)
            used |= set(found)
            if not found:
                name, text = tensor.names[0], tensor_text(tensor.part.value.dtype, tensor.part.shape)
                mismatch.missing[name] = text + _elsewhere(name, tensor.keys[0])
                continue
            self._jobs.append((tensor.part, next(iter(found))))
            for key, name in list(found.items())[: None if strict else 1]:
                _compare(name, tensor.part, key, self._stored.tensors[key], convert_dtype, mismatch)
        unused = {key: stored for key, stored in self._stored.tensors.items() if key not in used}
        mismatch.unexpected = {key: f"{_dtype_of(stored)} {stored.shape}" for key, stored in unused.items()}
        if strict and not mismatch.shapes and not mismatch.dtypes:
            mismatch.others = [text for tensor in tensors for text in _untied(tensor, self._stored)]
        return _Fit(mismatch, self._stored.path, self._digest())

    def read(self, *, show: bool) -> None:
        """Reads this rank's parts, file by file."""
        jobs = sorted(self._jobs, key=lambda job: self._stored.tensors[job[1]].file)  # stable: in the model's order
        reader = Reader(self._stored)
        with torch.no_grad(), progress_bar(show, "loading", sum(part.nbytes for part, _ in jobs)) as advance:
            for part, key in jobs:
                try:
                    with part.plain(write=True) as local:
                        for box, values in reader.blocks(key, part.extent.boxes()):
                            box.of_part(local).copy_(values)
                except Exception as error:
                    raise CheckpointError(
                        f"{self._stored.tensors[key].file} could not be read at {key!r}: {error}. The model is loaded "
                        "in part."
                    ) from error
                advance(part.nbytes)

    def _digest(self) -> str:
        described = sorted((name, stored.code, stored.shape) for name, stored in self._stored.tensors.items())
        return hashlib.sha256(repr(described).encode()).hexdigest()


def _judged(fits: list[_Fit], model: str, *, strict: bool) -> list[list[str]]:
    """For every rank, what no rank expects. Raises if anything does not fit."""
    mismatches = [fit.mismatch for fit in fits]
    leave_common_unexpected(mismatches)
    unexpected = list(mismatches[0].unexpected)
    if not strict:
        mismatches = [replace(mismatch, missing={}, unexpected={}) for mismatch in mismatches]
    refuse(f"{fits[0].path} does not fit {model}", dict(enumerate(mismatches)))
    others = [rank for rank, fit in enumerate(fits) if fit.digest != fits[0].digest]
    if others:  # a path may lead elsewhere on another host
        raise CheckpointError(
            f"{fits[0].path} is not the same checkpoint on all ranks: {named(others)} found other tensors than rank 0. "
            "Put it on storage that all ranks share, or the same copy on every host."
        )
    return [unexpected] * len(fits)


def _found(tensor: Keyed, stored: StoredTensors) -> dict[str, str]:
    """The keys under which the files have ``tensor``, several if it is tied here and not there, with its names."""
    found: dict[str, str] = {}
    for name, wanted in zip(tensor.names, tensor.keys, strict=True):
        if (key := stored.key(wanted)) is not None:
            found.setdefault(key, name)
    return found


def _compare(name: str, part: Part, key: str, stored: Stored, convert_dtype: bool, mismatch: Mismatch) -> None:
    """Adds to ``mismatch`` what keeps ``stored`` from being loaded into ``part``."""
    dtype = part.value.dtype
    if stored.shape != part.shape:
        mismatch.shapes[name] = differ(stored.shape, part.shape) + _elsewhere(name, key)
    elif stored.dtype is None or not torch.can_cast(stored.dtype, dtype):
        mismatch.dtypes[name] = differ(_dtype_of(stored), dtype_name(dtype)) + _elsewhere(name, key)
    elif stored.dtype != dtype and not convert_dtype:
        advice = " (convert_dtype=True converts it)"
        mismatch.dtypes[name] = differ(_dtype_of(stored), dtype_name(dtype)) + _elsewhere(name, key) + advice


def _untied(tensor: Keyed, stored: StoredTensors) -> Iterator[str]:
    """What the files have of ``tensor`` several times, with different values in this rank's part."""
    first, *others = list(_found(tensor, stored)) or [""]
    for other in others:
        pairs = zip(*(Reader(stored).blocks(key, tensor.part.extent.boxes()) for key in (first, other)), strict=True)
        if not all(_same_bits(one, two) for (_, one), (_, two) in pairs):
            yield f"tied in the model, but with different values in the files: {first} and {other}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (t.reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def _elsewhere(name: str, key: str) -> str:
    return "" if name == key else f" (in the files {key})"


def _dtype_of(stored: Stored) -> str:
    return stored.code if stored.dtype is None else dtype_name(stored.dtype)
