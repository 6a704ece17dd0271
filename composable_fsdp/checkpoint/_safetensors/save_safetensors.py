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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp.checkpoint._coordination.mismatch import named
from composable_fsdp.checkpoint._coordination.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._safetensors.atomic_replace import Replacement, has_parts
from composable_fsdp.checkpoint._safetensors.file_layout import FileLayout, TensorFiles, TensorSpec
from composable_fsdp.checkpoint._safetensors.keys import Keyed, KeyMap, keyed_tensors
from composable_fsdp.checkpoint._state_dict.shard_view import Part
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
    timeout: float = TIMEOUT,
) -> None:
    """Writes parameters and persistent buffers of ``model`` as safetensors files. All ranks of the default process
    group must call it, and what one of them has is in the files: what differs between ranks must be a DTensor, or have
    another name on each, as in the stages of a pipeline.

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
        model: sharded or not. Of plain tensors the values of the first rank that has them count.
        path: a directory on storage that all ranks share.
        max_file_bytes: that the tensors of one file may have; a larger tensor has a file of its own.
        dtype: for tensors with floating-point elements, ``torch.bfloat16`` for instance; that of the model if
            ``None``.
        key_map: from names in the model to those in the files, as in :func:`load_safetensors`.
        timeout: seconds that ranks wait for each other, to come and whenever they exchange what they have.

    Raises:
        CheckpointError: the same on all ranks, and what was there before is untouched: tensors are on the meta device;
            or ranks have different ones of the same name, or not all of one; or they do not share the storage; or it is
            full or fails; or some did not come; or an earlier asynchronous save failed.
        ConfigurationError: an argument makes no sense, or two tensors would have one name in the files.
    """
    what = "save_safetensors"
    ranks = meet(what, timeout)
    save = _Save(Path(path), max_file_bytes)
    try:
        plan = ranks.exchange(what, lambda: save.offers(model, dtype, key_map), save.begin)
        if save.left_out and ranks.rank == 0:
            names = ", ".join(save.left_out)
            warnings.warn(f"save_safetensors leaves out the extra state of modules: {names}", stacklevel=2)
        ranks.agree(what, lambda: save.check_shared(plan))
        shows = ranks.rank == 0 and wants_progress(None)
        ranks.exchange(what, lambda: save.write(plan, show=shows), lambda written: save.commit(plan, written))
    except BaseException:
        save.abandon()
        raise


@dataclass(frozen=True)
class _Offer:
    """What a rank has of one tensor.

    Attributes:
        spec: of the tensor.
        aliases: its other names.
        place: stands for where the part is in the tensor, in few bytes.
        numel: of the part.
        is_distributed: whether it is a DTensor.
    """

    spec: TensorSpec
    aliases: Sequence[str]
    place: bytes
    numel: int
    is_distributed: bool

    @staticmethod
    def of(tensor: Keyed, dtype: torch.dtype) -> _Offer:
        name, part = tensor.keys[0], tensor.part
        ranges = repr(part.extent.ranges).encode() if part.numel else b""
        return _Offer(
            TensorSpec(name, dtype, part.shape),
            [key for key in tensor.keys[1:] if key != name],
            hashlib.blake2b(ranges, digest_size=8).digest(),
            part.numel,
            isinstance(part.value, DTensor),
        )


@dataclass(frozen=True)
class _Plan:
    """What one rank writes: ``own`` tensors, by name, to ``files`` that are reserved under ``token``."""

    files: TensorFiles
    token: str
    own: frozenset[str]


class _Save:
    """One call of :func:`save_safetensors`, on one rank."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._parts: dict[str, Part] = {}
        self._begun: Replacement | None = None
        """On rank 0."""
        self.left_out: list[str] = []

    def offers(self, model: nn.Module, dtype: torch.dtype | None, key_map: KeyMap | None) -> list[_Offer]:
        """What this rank can write."""
        if self._max_file_bytes < 1:
            raise ConfigurationError(f"max_file_bytes must be at least 1, not {self._max_file_bytes}.")
        if self._folder.suffix == ".safetensors" or self._folder.is_file():
            raise ConfigurationError(f"{self._folder} must be a directory: save_safetensors may write several files.")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
        tensors, self.left_out = keyed_tensors(model, key_map)
        _check_keys(tensors)
        self._parts = {tensor.keys[0]: tensor.part for tensor in tensors}
        own = [tensor.part.value.dtype for tensor in tensors]
        dtypes = [dtype if dtype is not None and each.is_floating_point else each for each in own]
        return [_Offer.of(tensor, each) for tensor, each in zip(tensors, dtypes, strict=True)]

    def begin(self, offers: Sequence[Sequence[_Offer]]) -> list[_Plan]:
        """Decides for all ranks who writes what, and reserves the files."""
        first, own = _shares(offers)
        specs = [offer.spec for offer in first.values()]
        aliases = {alias: name for name, offer in first.items() for alias in offer.aliases if alias not in first}
        token = secrets.token_hex(4)
        generation = token if has_parts(self._folder) else ""
        files = TensorFiles.of(specs, aliases, self._max_file_bytes, generation)
        self._begun = Replacement(self._folder, token)
        self._begun.begin(files)
        return [_Plan(files, token, frozenset(names)) for names in own]

    def check_shared(self, plan: _Plan) -> None:
        """That what rank 0 has reserved is seen here."""
        replacement = Replacement(self._folder, plan.token)
        unseen = [file.name for file in plan.files.files if not replacement.sees(file)]
        if unseen:
            raise CheckpointError(
                f"{self._folder} is not the same directory here as on rank 0, which made {', '.join(unseen)} there. "
                "Save to storage that all ranks share."
            )

    def write(self, plan: _Plan, *, show: bool) -> None:
        """Writes this rank's parts, and has them on disk."""
        aside = Replacement(self._folder, plan.token).aside
        total = sum(self._parts[name].nbytes for name in plan.own)
        with torch.no_grad(), progress_bar(show, "saving", total) as advance:
            for file in plan.files.files:
                opened = os.open(aside / file.name, os.O_WRONLY)
                try:
                    for spec in file.tensors:
                        if spec.name in plan.own:
                            _write_part(opened, file, spec, self._parts[spec.name])
                            advance(self._parts[spec.name].nbytes)
                    os.fsync(opened)
                finally:
                    os.close(opened)

    def commit(self, plan: _Plan, written: Sequence[None]) -> Sequence[None]:
        """Makes what all have written the checkpoint."""
        assert self._begun is not None
        self._begun.commit(plan.files)
        return written

    def abandon(self) -> None:
        """Removes what is not complete."""
        if self._begun is not None:
            self._begun.abandon()


def _check_keys(tensors: Iterable[Keyed]) -> None:
    names: dict[str, str] = {}
    for tensor in tensors:
        for name, key in zip(tensor.names, tensor.keys, strict=True):
            other = names.setdefault(key, tensor.names[0])
            if other != tensor.names[0]:
                raise ConfigurationError(f"key_map gives {key!r} to both {other!r} and {name!r}, which are not tied.")


def _shares(offers: Sequence[Sequence[_Offer]]) -> tuple[dict[str, _Offer], list[set[str]]]:
    """The first offer of every tensor, by name, and what each rank is to write so that every element is written once.

    Several ranks may hold the same part, on a mesh that the tensor knows or, as with parameters that tensor parallelism
    leaves alone, on one that it does not. Of a DTensor they take turns, so that all have work.
    """
    by_name: dict[str, dict[int, _Offer]] = {}
    for rank, of_rank in enumerate(offers):
        for offer in of_rank:
            by_name.setdefault(offer.spec.name, {})[rank] = offer
    first = {name: next(iter(of_ranks.values())) for name, of_ranks in by_name.items()}
    own: list[set[str]] = [set() for _ in offers]
    problems = []
    for turn, (name, of_ranks) in enumerate(by_name.items()):
        holders: dict[tuple[bytes, int], list[int]] = {}
        for rank, offer in of_ranks.items():
            holders.setdefault((offer.place, offer.numel), []).append(rank)
        spec, count = first[name].spec, sum(numel for _, numel in holders)
        others = [rank for rank, offer in of_ranks.items() if offer.spec != spec]
        if others:
            problems.append(f"{name} has another shape or dtype on {named(others)} than on rank {next(iter(of_ranks))}")
        elif count != prod(spec.shape):
            problems.append(f"of {name} all ranks together have {count} instead of {prod(spec.shape)} elements")
        for ranks in holders.values():
            own[ranks[turn % len(ranks) if first[name].is_distributed else 0]].add(name)
    if problems:
        raise CheckpointError(f"ranks do not hold the parts of one model: {'; '.join(problems)}.")
    return first, own


def _write_part(opened: int, file: FileLayout, spec: TensorSpec, part: Part) -> None:
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
