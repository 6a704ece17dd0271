"""Conversion to a directory of ``torch.distributed.checkpoint``, in the format of ``save``."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from composable_fsdp._layout.block import Box
from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp.filesystem import ChecksummingWriter
from composable_fsdp.checkpoint._dcp.manifest import Manifest
from composable_fsdp.checkpoint._dcp.planner import add_aliases, write_item
from composable_fsdp.checkpoint._safetensors.atomic_replace import sync
from composable_fsdp.checkpoint._tools.convert_staging import Conversion, staging_directory, staging_path, view_of
from composable_fsdp.checkpoint._tools.paths import unflatten
from composable_fsdp.checkpoint._tools.sources import Spec
from composable_fsdp.errors import CheckpointError

__all__ = ["recover_interrupted", "write_dcp"]


def write_dcp(conversion: Conversion, target: Path, max_file_bytes: int) -> None:
    step, objects = _with_extra(conversion)
    ranks = {path[1] for path in objects if path[0] == "ranks"}
    with staging_directory(target) as staging:
        folder = staging / target.name
        folder.mkdir()
        planner = _Planner(conversion, objects)
        plans, metadata = planner.create_global_plan(planner.plans(max_file_bytes))
        writer = ChecksummingWriter(folder)
        writer.per_thread_copy_ahead = 0  # write each block before the next one is read, also with CUDA
        writer.set_up_storage_writer(is_coordinator=True)
        results = []
        for each in writer.prepare_global_plan(plans):
            written = writer.write_data(each, planner)
            written.wait()
            results.append(written.value())
        add_aliases(metadata, results, {_key(alias): _key(of) for alias, of in conversion.aliases.items()})
        writer.finish(metadata, results)
        Manifest.of(step, max(len(ranks), 1), writer.records, metadata).write(folder)
        sync(folder)
        _replace_directory(target, folder)


def _key(path: contents.Path) -> str:
    return ".".join(map(str, path))


def _with_extra(conversion: Conversion) -> tuple[int, dict[contents.Path, Any]]:
    """Return the step and the objects. Objects without a key in our format become ``extra``, as ``load`` returns it."""
    kinds = ("model", "optimizer", "averages", "classes", "communication", "ranks")
    ours = {path: value for path, value in conversion.objects.items() if path[0] in kinds}
    others = unflatten((path, value) for path, value in conversion.objects.items() if path not in ours)
    extra = ours.get(("ranks", "0", "extra"))
    if extra is None and others:
        ours["ranks", "0", "extra"] = extra = others
    if conversion.source.manifest is not None:
        return conversion.source.manifest.step, ours
    step = others.get("step", (extra or {}).get("step"))
    return step if type(step) is int else 0, ours


def recover_interrupted(target: Path) -> None:
    """Restore or delete the old ``target`` that a conversion renamed before it was killed.

    Raises:
        CheckpointError: another file has the name that the old target is renamed to.
    """
    old = _old(target)
    if not old.exists():
        return
    if not staging_path(target).exists():
        raise CheckpointError(f"{old} is in the way of a conversion to {target}. Rename or delete it.")
    if target.exists():
        shutil.rmtree(old)
    else:
        old.rename(target)


def _old(target: Path) -> Path:
    return target.with_name(f"{target.name}.old")


def _replace_directory(target: Path, new: Path) -> None:
    """Move ``new`` to ``target``. An old target is first renamed to ``….old``, which stays valid in a folder."""
    old = _old(target)
    replaces = target.exists() and any(target.iterdir())
    if replaces:
        target.rename(old)
    new.rename(target)
    sync(target.parent)
    if replaces:
        shutil.rmtree(old)


class _Planner(DefaultSavePlanner):
    """Plans all blocks in one process, and reads each block when it is to be written.

    All blocks share one buffer, because DCP keeps references to the tensors it wrote until their file is complete.
    """

    def __init__(self, conversion: Conversion, objects: Mapping[contents.Path, Any]) -> None:
        super().__init__()
        self._conversion = conversion
        self._objects = {_key(path): value for path, value in objects.items()}
        self._paths = {_key(path): path for path in (*conversion.tensors, *conversion.aliases, *objects)}
        self._blocks: dict[MetadataIndex, Box] = {}
        self._buffer = bytearray()

    def plans(self, max_file_bytes: int) -> list[SavePlan]:
        """Return one plan for each file. DCP writes one file per rank, so each plan takes the place of a rank."""
        items: list[list[WriteItem]] = [[WriteItem(MetadataIndex(k), WriteItemType.BYTE_IO) for k in self._objects]]
        size = largest = 0
        for path, spec in self._conversion.tensors.items():
            for box in self._conversion.source.boxes(path):
                block = Spec(box.sizes, spec.dtype)
                if size and size + block.nbytes > max_file_bytes:
                    items.append([])
                    size = 0
                size += block.nbytes
                largest = max(largest, block.nbytes)
                index = MetadataIndex(_key(path), box.offsets)
                self._blocks[index] = box
                items[-1].append(write_item(index, box.sizes, spec.shape, spec.dtype))
        self._buffer = bytearray(largest)
        return [SavePlan(each, planner_data=self._paths) for each in items]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._objects[key], data)
            return data
        path, box = self._paths[key], self._blocks[write_item.index]
        block = view_of(self._buffer, 0, Spec(box.sizes, self._conversion.tensors[path].dtype))
        self._conversion.source.read(path, box, block)
        self._conversion.done(block.nbytes)
        return block
