"""The target of a conversion that is a directory of ``torch.distributed.checkpoint``, as ``save`` makes it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from composable_fsdp._layout.block import Box
from composable_fsdp.checkpoint._coordination.mismatch import dtype_name
from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp.filesystem import ChecksummingWriter
from composable_fsdp.checkpoint._dcp.manifest import Manifest, TensorRecord, library_version
from composable_fsdp.checkpoint._dcp.planner import add_aliases
from composable_fsdp.checkpoint._tools.convert_staging import Work, aside_of, aside_path, sync
from composable_fsdp.checkpoint._tools.mmap_tensor import view_of
from composable_fsdp.checkpoint._tools.paths import nested
from composable_fsdp.checkpoint._tools.sources import Spec
from composable_fsdp.errors import CheckpointError

__all__ = ["tidy", "write_dcp"]


def write_dcp(work: Work, target: Path, max_file_bytes: int) -> None:
    step, objects = _with_extra(work)
    ranks = {path[1] for path in objects if path[0] == "ranks"}
    with aside_of(target) as aside:
        folder = aside / target.name
        folder.mkdir()
        planner = _Planner(work, objects)
        plans, metadata = planner.create_global_plan(planner.plans(max_file_bytes))
        writer = ChecksummingWriter(folder)
        writer.per_thread_copy_ahead = 0  # each block is written before the next one is asked for, also with CUDA
        writer.set_up_storage_writer(is_coordinator=True)
        results = []
        for each in writer.prepare_global_plan(plans):
            written = writer.write_data(each, planner)
            written.wait()
            results.append(written.value())
        aliases = {_key(alias): _key(of) for alias, of in work.aliases.items()}
        add_aliases(metadata, results, aliases)
        writer.finish(metadata, results)
        tensors = {_key(path): TensorRecord(spec.shape, dtype_name(spec.dtype)) for path, spec in work.tensors.items()}
        tensors |= {alias: tensors[of] for alias, of in aliases.items()}
        manifest = Manifest(step, max(len(ranks), 1), writer.records, tensors, library_version(), torch.__version__)
        manifest.write(folder)
        sync(folder)
        _replace_directory(target, folder)


def _key(path: contents.Path) -> str:
    return ".".join(map(str, path))


def _with_extra(work: Work) -> tuple[int, dict[contents.Path, Any]]:
    """The step, and objects in which what has no place in our checkpoints is ``extra``, as ``load`` returns it."""
    kinds = ("model", "optimizer", "averages", "classes", "communication", "ranks")
    ours = {path: value for path, value in work.objects.items() if path[0] in kinds}
    others = nested((path, value) for path, value in work.objects.items() if path not in ours)
    extra = ours.get(("ranks", "0", "extra"))
    if extra is None and others:
        ours["ranks", "0", "extra"] = extra = others
    if work.source.manifest is not None:
        return work.source.manifest.step, ours
    step = others.get("step", (extra or {}).get("step"))
    return step if type(step) is int else 0, ours


def tidy(target: Path) -> None:
    """Puts in order what a conversion left that was killed while it replaced ``target``.

    Raises:
        CheckpointError: something else has the name that the old one is to have meanwhile.
    """
    old = _old(target)
    if not old.exists():
        return
    if not aside_path(target).exists():
        raise CheckpointError(f"{old} is in the way of a conversion to {target}. Rename or delete it.")
    if target.exists():
        shutil.rmtree(old)
    else:
        old.rename(target)


def _old(target: Path) -> Path:
    return target.with_name(f"{target.name}.old")


def _replace_directory(target: Path, new: Path) -> None:
    """An old one is ``….old`` for the moment between two renames; in a folder of checkpoints that counts."""
    old = _old(target)
    replaces = target.exists() and any(target.iterdir())
    if replaces:
        target.rename(old)
    new.rename(target)
    sync(target.parent)
    if replaces:
        shutil.rmtree(old)


class _Planner(DefaultSavePlanner):
    """Plans all blocks in one process, and reads each one when it is to be written.

    All into one buffer: DCP holds on to the tensors that it wrote until their file is complete.
    """

    def __init__(self, work: Work, objects: Mapping[contents.Path, Any]) -> None:
        super().__init__()
        self._work = work
        self._objects = {_key(path): value for path, value in objects.items()}
        self._paths = {_key(path): path for path in (*work.tensors, *work.aliases, *objects)}
        self._blocks: dict[MetadataIndex, Box] = {}
        self._buffer = bytearray()

    def plans(self, max_file_bytes: int) -> list[SavePlan]:
        """One for each file: DCP gives every rank its own, so these are as if of so many ranks."""
        items: list[list[WriteItem]] = [[WriteItem(MetadataIndex(k), WriteItemType.BYTE_IO) for k in self._objects]]
        size = largest = 0
        for path, spec in self._work.tensors.items():
            for box in self._work.source.boxes(path):
                block = Spec(box.sizes, spec.dtype)
                if size and size + block.nbytes > max_file_bytes:
                    items.append([])
                    size = 0
                size += block.nbytes
                largest = max(largest, block.nbytes)
                index = MetadataIndex(_key(path), box.offsets)
                self._blocks[index] = box
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=spec.dtype), torch.Size(spec.shape))
                items[-1].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._buffer = bytearray(largest)
        return [SavePlan(each, planner_data=self._paths) for each in items]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._objects[key], data)
            return data
        path, box = self._paths[key], self._blocks[write_item.index]
        block = view_of(self._buffer, 0, Spec(box.sizes, self._work.tensors[path].dtype))
        self._work.source.read(path, box, block)
        self._work.done(block.nbytes)
        return block
