"""``save_safetensors``: writes shards directly to Hugging Face checkpoints, without gathering tensors.

The safetensors library writes complete files from full tensors. Here the headers are built from shapes and dtypes
alone, rank 0 reserves the files, and every rank writes its shards at their offsets. Ranks exchange no tensors, write
concurrently, and need memory for one block. All ranks must share a file system, which is checked before anything is
written.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp.checkpoint._coordination.arguments import check_arguments
from composable_fsdp.checkpoint._coordination.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._safetensors.atomic_replace import Replacement, has_parts
from composable_fsdp.checkpoint._safetensors.file_layout import FileLayout, TensorFiles, TensorSpec
from composable_fsdp.checkpoint._safetensors.keys import KeyedTensor, KeyMap, keyed_tensors
from composable_fsdp.checkpoint._state_dict.shard_view import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = ["save_safetensors", "write_part"]

BLOCK_BYTES = 16 << 20
"""The most bytes of a file that one block spans: the size of the copy that a rank may need."""


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Write the parameters and persistent buffers of ``model`` as safetensors files.

    All ranks of the default process group must call it. The files contain the tensors of all ranks: a tensor that
    differs between ranks must be a DTensor, or have different names, as in pipeline stages.

    The directory ``path`` is created if needed. It then has ``model.safetensors``, or several files with
    ``model.safetensors.index.json``, as ``save_pretrained`` of transformers writes them. Other files in it, such as
    ``config.json``, are kept. An existing checkpoint is replaced only when the new one is complete and on disk: if a
    save is interrupted, even by a kill, readers find one of the two, complete. Files have no checksums;
    :func:`composable_fsdp.checkpoint.save` makes checkpoints that do.

    Every rank writes its own shards block by block, with about 32 MB of extra memory; of replicas one writes. Tied
    parameters are written once, under the first of their names. The other names are in the metadata, where
    :func:`load_safetensors` finds them; transformers ties parameters itself. Extra state of modules is left out, with a
    warning.

    Args:
        model: a module, sharded or not. For plain tensors the values of the first rank that has them are written.
        path: a directory on storage that all ranks share.
        max_file_bytes: the most bytes of tensors in one file. A larger tensor has a file of its own.
        dtype: the dtype to write floating-point tensors in, such as ``torch.bfloat16``. ``None``: the model's.
        key_map: maps names in the model to names in the files, as in :func:`load_safetensors`.
        timeout: seconds for which ranks wait for each other, at the start and at every exchange.

    Raises:
        CheckpointError: tensors are on the meta device; ranks have different tensors of the same name, or not all
            shards of one; ranks do not share the storage; it is full or fails; a rank did not call in time; or an
            earlier asynchronous save failed. The error is the same on all ranks, and the previous files are unchanged.
        ConfigurationError: an argument is invalid, or two tensors would have the same name in the files.
    """
    what = "save_safetensors"
    check_arguments("save_safetensors(model, path)", path, model)
    ranks = meet(what, timeout)
    save = _Save(Path(path), max_file_bytes)
    try:
        plan = ranks.exchange(what, lambda: save.contributions(model, dtype, key_map), save.begin)
        if save.left_out and ranks.rank == 0:
            names = ", ".join(save.left_out)
            warnings.warn(f"save_safetensors leaves out the extra state of modules: {names}", stacklevel=2)
        ranks.agree(what, lambda: save.check_shared(plan))
        shows = ranks.rank == 0 and wants_progress(None)
        ranks.combine(what, lambda: save.write(plan, show=shows), lambda written: save.commit(plan))
    except BaseException:
        save.abandon()
        raise


@dataclass(frozen=True)
class _Contribution:
    """One rank's description of its shard of a tensor.

    Attributes:
        spec: the full tensor.
        aliases: other names of the tensor.
        extent_digest: a digest of the shard's extent in the tensor.
        numel: the number of elements of the shard.
        is_distributed: True if the tensor is a DTensor.
    """

    spec: TensorSpec
    aliases: Sequence[str]
    extent_digest: bytes
    numel: int
    is_distributed: bool

    @staticmethod
    def of(tensor: KeyedTensor, dtype: torch.dtype) -> _Contribution:
        name, part = tensor.keys[0], tensor.part
        ranges = repr(part.extent.ranges).encode() if part.numel else b""
        return _Contribution(
            TensorSpec(name, dtype, part.shape),
            [key for key in tensor.keys[1:] if key != name],
            hashlib.blake2b(ranges, digest_size=8).digest(),
            part.numel,
            isinstance(part.value, DTensor),
        )


@dataclass(frozen=True)
class _Plan:
    """One rank's share of the work: write the ``own`` tensors to ``files``, which are reserved under ``token``."""

    files: TensorFiles
    token: str
    own: frozenset[str]


class _Save:
    """One call of :func:`save_safetensors`, on one rank."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._shards: dict[str, LocalShard] = {}
        self._begun: Replacement | None = None
        """The reserved files. Only rank 0 has them."""
        self.left_out: list[str] = []

    def contributions(self, model: nn.Module, dtype: torch.dtype | None, key_map: KeyMap | None) -> list[_Contribution]:
        """Describe the shards that this rank can write."""
        if self._max_file_bytes < 1:
            raise ConfigurationError(f"max_file_bytes must be at least 1, not {self._max_file_bytes}.")
        if self._folder.suffix == ".safetensors" or self._folder.is_file():
            raise ConfigurationError(f"{self._folder} must be a directory: save_safetensors may write several files.")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
        tensors, self.left_out = keyed_tensors(model, key_map)
        _check_keys(tensors)
        self._shards = {tensor.keys[0]: tensor.part for tensor in tensors}
        own = [tensor.part.value.dtype for tensor in tensors]
        dtypes = [dtype if dtype is not None and each.is_floating_point else each for each in own]
        return [_Contribution.of(tensor, each) for tensor, each in zip(tensors, dtypes, strict=True)]

    def begin(self, contributions: Sequence[Sequence[_Contribution]]) -> list[_Plan]:
        """Decide for all ranks which tensors each writes, and reserve the files."""
        first, own = _assign_writes(contributions)
        specs = [entry.spec for entry in first.values()]
        aliases = {alias: name for name, entry in first.items() for alias in entry.aliases if alias not in first}
        token = secrets.token_hex(4)
        generation = token if has_parts(self._folder) else ""
        files = TensorFiles.of(specs, aliases, self._max_file_bytes, generation)
        self._begun = Replacement(self._folder, token)
        self._begun.begin(files)
        return [_Plan(files, token, frozenset(names)) for names in own]

    def check_shared(self, plan: _Plan) -> None:
        """Check that this rank sees the files that rank 0 has reserved."""
        replacement = Replacement(self._folder, plan.token)
        unseen = [file.name for file in plan.files.files if not replacement.sees(file)]
        if unseen:
            raise CheckpointError(
                f"{self._folder} is not the same directory here as on rank 0, which made {', '.join(unseen)} there. "
                "Save to storage that all ranks share."
            )

    def write(self, plan: _Plan, *, show: bool) -> None:
        """Write this rank's shards, and flush them to disk."""
        aside = Replacement(self._folder, plan.token).aside
        total = sum(self._shards[name].nbytes for name in plan.own)
        with torch.no_grad(), progress_bar(show, "saving", total) as advance:
            for file in plan.files.files:
                opened = os.open(aside / file.name, os.O_WRONLY)
                try:
                    for spec in file.tensors:
                        if spec.name in plan.own:
                            write_part(opened, file, spec, self._shards[spec.name])
                            advance(self._shards[spec.name].nbytes)
                    os.fsync(opened)
                finally:
                    os.close(opened)

    def commit(self, plan: _Plan) -> None:
        """Replace the previous checkpoint, after all ranks have written."""
        assert self._begun is not None
        self._begun.commit(plan.files)

    def abandon(self) -> None:
        """Delete incomplete files."""
        if self._begun is not None:
            self._begun.abandon()


def _check_keys(tensors: Iterable[KeyedTensor]) -> None:
    names: dict[str, str] = {}
    for tensor in tensors:
        for name, key in zip(tensor.names, tensor.keys, strict=True):
            other = names.setdefault(key, tensor.names[0])
            if other != tensor.names[0]:
                raise ConfigurationError(f"key_map gives {key!r} to both {other!r} and {name!r}, which are not tied.")


def _assign_writes(contributions: Sequence[Sequence[_Contribution]]) -> tuple[dict[str, _Contribution], list[set[str]]]:
    """Return the first description of every tensor by name, and the tensors that each rank writes.

    Every element is written once. Several ranks may have the same shard, on a mesh that the tensor knows or, for
    parameters that tensor parallelism replicates, on one that it does not. For DTensors they take turns, to share the
    work.
    """
    by_name: dict[str, dict[int, _Contribution]] = {}
    for rank, of_rank in enumerate(contributions):
        for entry in of_rank:
            by_name.setdefault(entry.spec.name, {})[rank] = entry
    first = {name: next(iter(of_ranks.values())) for name, of_ranks in by_name.items()}
    own: list[set[str]] = [set() for _ in contributions]
    problems = []
    for index, (name, of_ranks) in enumerate(by_name.items()):
        ranks_by_shard: dict[tuple[bytes, int], list[int]] = {}
        for rank, entry in of_ranks.items():
            ranks_by_shard.setdefault((entry.extent_digest, entry.numel), []).append(rank)
        spec, count = first[name].spec, sum(numel for _, numel in ranks_by_shard)
        others = [rank for rank, entry in of_ranks.items() if entry.spec != spec]
        if others:
            problems.append(
                f"{name} has another shape or dtype on {ranks_text(others)} than on rank {next(iter(of_ranks))}"
            )
        elif count != prod(spec.shape):
            problems.append(f"of {name} all ranks together have {count} instead of {prod(spec.shape)} elements")
        for ranks in ranks_by_shard.values():
            own[ranks[index % len(ranks) if first[name].is_distributed else 0]].add(name)
    if problems:
        raise CheckpointError(f"ranks do not hold the parts of one model: {'; '.join(problems)}.")
    return first, own


def write_part(opened: int, file: FileLayout, spec: TensorSpec, part: LocalShard) -> None:
    """Write a shard of the tensor ``spec`` to its place in the open ``file``, block by block."""
    itemsize = spec.dtype.itemsize
    with ExitStack() as stack:
        try:
            local = stack.enter_context(part.plain(write=False))
        except CheckpointError as error:
            raise CheckpointError(f"{spec.name}: {error}") from error
        for box in part.extent.boxes():
            for piece in box.pieces(spec.shape, BLOCK_BYTES // itemsize):
                values = piece.of_part(local).to("cpu", spec.dtype).reshape(-1)
                length, starts = piece.runs(spec.shape)
                data = values.view(torch.uint8).numpy().data
                for i, start in enumerate(starts):
                    run = data[i * length * itemsize : (i + 1) * length * itemsize]
                    _write_at(opened, run, file.offsets[spec.name] + start * itemsize)


def _write_at(opened: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(opened, data, offset)
        data, offset = data[done:], offset + done
