"""What is to be converted, and a place for it until it is complete."""

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

__all__ = ["Work", "aside_of", "aside_path", "sync"]


@dataclass
class Work:
    """What is to be written.

    Attributes:
        source: has it.
        tensors: as they are to be.
        aliases: further paths of these.
        objects: what else.
        done: is told the bytes of each block.
    """

    source: Source
    tensors: dict[contents.Path, Spec]
    aliases: dict[contents.Path, contents.Path]
    objects: dict[contents.Path, Any]
    done: Callable[[int], None] = field(default=lambda count: None)

    @property
    def is_model(self) -> bool:
        """Whether there is nothing else."""
        return all(path[0] == "model" for path in (*self.tensors, *self.objects))

    def fill(self, path: contents.Path, out: torch.Tensor) -> None:
        """Copies a whole tensor to ``out``."""
        for box in self.source.boxes(path):
            part = out
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            self.source.read(path, box, part)
            self.done(part.nbytes)


def aside_path(target: Path) -> Path:
    """Where what is to be at ``target`` is while it is not complete. It is there only during a conversion, or after one
    that was killed.
    """
    return target.parent / f".{target.name}.incomplete"


@contextmanager
def aside_of(target: Path) -> Iterator[Path]:
    """A directory on the same disk, for what is not complete yet. What killed conversions left in it goes."""
    aside = aside_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
