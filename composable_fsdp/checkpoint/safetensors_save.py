"""``save_safetensors``: from shards into files in the layout of Hugging Face, without assembling anything.

The safetensors library writes whole files out of whole tensors. So the headers, of which shapes and dtypes decide, are
made here; the first rank reserves the files, and every rank writes what it holds to where it belongs. Nothing travels
between ranks, all of them write at the same time, and a rank needs memory for one block. What it takes is a file
system that all ranks share, which is checked before anything is written.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp.checkpoint.agreement import Ranks
from composable_fsdp.checkpoint.held import Held, KeyMap, block, held_tensors
from composable_fsdp.checkpoint.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint.replacing import Replacement, has_parts
from composable_fsdp.checkpoint.tensor_files import FileLayout, TensorFiles, TensorSpec
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = ["save_safetensors"]

BLOCK_BYTES = 16 << 20
"""Of a file that one block spans at most: what a rank may need to copy."""


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes parameters and persistent buffers of ``model`` as safetensors files. All ranks call it together.

    The directory ``path``, made if need be, then has ``model.safetensors``, or several files with
    ``model.safetensors.index.json``, as ``save_pretrained`` of transformers would have written them. Other files in
    it, such as ``config.json``, stay. A checkpoint that is there is replaced only when the new one is complete and on
    disk: whenever a save ends early, even by a kill, readers find the one or the other, whole. Files have no
    checksums; :func:`composable_fsdp.checkpoint.save` makes checkpoints that do.

    Every rank writes its own part, block by block, with about 32 MB of extra memory; of replicas one writes each
    tensor. Tied parameters are written once, under the first of their names. The others are in the metadata, where
    :func:`load_safetensors` finds them; transformers needs none, as it ties them itself. Extra state of modules is left
    out, with a warning.

    Args:
        model: sharded or not. Of plain tensors the first rank's values count.
        path: a directory on storage that all ranks share.
        max_file_bytes: that the tensors of one file may have; a larger tensor has a file of its own.
        dtype: for tensors with floating-point elements, ``torch.bfloat16`` for instance; that of the model if
            ``None``.
        key_map: from names in the model to those in the files, as in :func:`load_safetensors`.
        process_group: the ranks that make the call, if they are not all.

    Raises:
        CheckpointError: the same on all ranks, and what was there before is untouched: tensors are on the meta device;
            or ranks hold different models, or not all of one; or they do not share the storage; or it is full or
            fails.
        ConfigurationError: an argument makes no sense, or two tensors would have one name in the files.
    """
    ranks = Ranks(process_group)
    with ranks.agreeing():
        folder = _folder(path, max_file_bytes)
        tensors, others = held_tensors(model, key_map)
        specs = _specs(tensors, dtype)
        token = secrets.token_hex(4)
        generation = token if has_parts(folder) else ""
        if others and ranks.is_first:
            warnings.warn(f"save_safetensors leaves out the extra state of modules: {', '.join(others)}", stacklevel=2)
    token, generation = ranks.gather((token, generation))[0]
    files = TensorFiles.of(specs.values(), _aliases(tensors), max_file_bytes, generation)
    own = _shares(files, specs, ranks)
    with _replacement(Replacement(folder, token), files, ranks) as replacement, ranks.agreeing():
        _write(files, {specs[held].name: held for held in own}, replacement, shown=ranks.is_first)


def _folder(path: str | os.PathLike[str], max_file_bytes: int) -> Path:
    if max_file_bytes < 1:
        raise ConfigurationError(f"max_file_bytes must be at least 1, not {max_file_bytes}.")
    folder = Path(path)
    if folder.suffix == ".safetensors" or folder.is_file():
        raise ConfigurationError(f"{folder} must be a directory: save_safetensors may write several files.")
    return folder


def _specs(tensors: Sequence[Held], dtype: torch.dtype | None) -> dict[Held, TensorSpec]:
    """How each tensor is written."""
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
    names: dict[str, str] = {}
    specs = {}
    for held in tensors:
        for name, key in zip(held.names, held.keys, strict=True):
            other = names.setdefault(key, held.names[0])
            if other != held.names[0]:
                raise ConfigurationError(f"key_map gives {key!r} to both {other!r} and {name!r}, which are not tied.")
        own = held.value.dtype
        specs[held] = TensorSpec(held.keys[0], dtype if dtype and own.is_floating_point else own, held.shape)
    return specs


def _aliases(tensors: Sequence[Held]) -> dict[str, str]:
    return {key: held.keys[0] for held in tensors for key in held.keys[1:] if key != held.keys[0]}


def _shares(files: TensorFiles, specs: Mapping[Held, TensorSpec], ranks: Ranks) -> list[Held]:
    """What this rank is to write, so that all ranks together write every element once.

    Several ranks may hold the same part, on a mesh that the tensor knows or, as with parameters that tensor parallelism
    leaves alone, on one that it does not. Of a DTensor they take turns, so that all have work.
    """
    with ranks.agreeing():
        digest = hashlib.sha256(b"".join(file.header for file in files.files)).hexdigest()
        parts = [_Part.of(held) for held in specs]
    of_ranks = ranks.gather((digest, parts))
    advice = "Pass process_group= with the ranks that hold one model, and another path for every such group."
    different = [str(rank) for rank, (other, _) in enumerate(of_ranks) if other != of_ranks[0][0]]
    if different:
        raise CheckpointError(
            "save_safetensors: the ranks of this call have tensors of other names, shapes or dtypes than the first, "
            f"namely rank {', '.join(different)}. {advice}"
        )
    own, wrong = [], []
    for turn, (held, spec) in enumerate(specs.items()):
        holders: dict[_Part, list[int]] = {}
        for rank, (_, of_rank) in enumerate(of_ranks):
            holders.setdefault(of_rank[turn], []).append(rank)
        count, numel = sum(part.numel for part in holders), prod(spec.shape)
        if count != numel:
            wrong.append(f"{spec.name} ({count} of {numel} elements)")
        same = holders[parts[turn]]
        if ranks.rank == same[turn % len(same) if isinstance(held.value, DTensor) else 0]:
            own.append(held)
    if wrong:
        raise CheckpointError(
            f"save_safetensors: the ranks of this call do not hold each element once: {', '.join(wrong)}. {advice}"
        )
    return own


class _Part(NamedTuple):
    """Stands for the part of a tensor that a rank holds, in a message of few bytes."""

    digest: bytes
    numel: int

    @staticmethod
    def of(held: Held) -> _Part:
        numel = held.local_numel
        ranges = repr(held.extent.ranges).encode() if numel else b""
        return _Part(hashlib.blake2b(ranges, digest_size=8).digest(), numel)


@contextmanager
def _replacement(replacement: Replacement, files: TensorFiles, ranks: Ranks) -> Iterator[Replacement]:
    """Reserved files for the body to write, which become the checkpoint after it. All ranks leave alike."""
    try:
        with ranks.agreeing():
            if ranks.is_first:
                replacement.begin(files)
        with ranks.agreeing():
            unseen = [file.name for file in files.files if not replacement.sees(file)]
            if unseen:
                raise CheckpointError(
                    f"{replacement.folder} is not the same directory here as on the first rank, which made "
                    f"{', '.join(unseen)} there. Save to storage that all ranks share."
                )
        yield replacement
        with ranks.agreeing():
            if ranks.is_first:
                replacement.commit(files)
    except BaseException:
        if ranks.is_first:
            replacement.abandon()
        raise


@torch.no_grad()
def _write(files: TensorFiles, own: Mapping[str, Held], replacement: Replacement, *, shown: bool) -> None:
    """Writes this rank's parts, and has them on disk."""
    with progress_bar(
        shown and wants_progress(None), "saving", sum(held.local_nbytes for held in own.values())
    ) as advance:
        for file in files.files:
            opened = os.open(replacement.aside / file.name, os.O_WRONLY)
            try:
                for spec in file.tensors:
                    if spec.name in own:
                        _write_part(opened, file, spec, own[spec.name])
                        advance(own[spec.name].local_nbytes)
                os.fsync(opened)
            finally:
                os.close(opened)


def _write_part(opened: int, file: FileLayout, spec: TensorSpec, held: Held) -> None:
    itemsize = spec.dtype.itemsize
    with held.plain(write=False) as part:
        for box in held.extent.boxes():
            for piece in box.pieces(spec.shape, BLOCK_BYTES // itemsize):
                values = block(part, piece).to("cpu", spec.dtype).reshape(-1)
                length, starts = piece.runs(spec.shape)
                data = values.view(torch.uint8).numpy().data
                for i, start in enumerate(starts):
                    run = data[i * length * itemsize : (i + 1) * length * itemsize]
                    _write_at(opened, run, file.offsets[spec.name] + start * itemsize)


def _write_at(opened: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(opened, data, offset)
        data, offset = data[done:], offset + done
