"""The data of one conversion, and a staging directory for incomplete output."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._tools.sources import Source, Spec

__all__ = ["Conversion", "staging_directory", "staging_path", "sync"]


@dataclass
class Conversion:
    """The tensors and objects to write in one conversion.

    Attributes:
        source: the checkpoint to read.
        tensors: shapes and dtypes to write, by path.
        aliases: further paths of these tensors.
        objects: values that are not tensors.
        done: called with the size in bytes of each block that was written.
    """

    source: Source
    tensors: dict[contents.Path, Spec]
    aliases: dict[contents.Path, contents.Path]
    objects: dict[contents.Path, Any]
    done: Callable[[int], None] = field(default=lambda count: None)

    @property
    def is_model_only(self) -> bool:
        """True if there is nothing but the model."""
        return all(path[0] == "model" for path in (*self.tensors, *self.objects))

    def fill(self, path: contents.Path, out: torch.Tensor) -> None:
        """Copy a full tensor into ``out``."""
        for box in self.source.boxes(path):
            part = out
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            self.source.read(path, box, part)
            self.done(part.nbytes)


def staging_path(target: Path) -> Path:
    """Return the path of incomplete output for ``target``. It exists during a conversion, or after a killed one."""
    return target.parent / f".{target.name}.incomplete"


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """Create a directory on the target's disk for incomplete output. Output of killed conversions is deleted first."""
    staging = staging_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
