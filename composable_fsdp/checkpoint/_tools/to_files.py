"""The targets of a conversion that are files: of ``torch.save``, and safetensors."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from composable_fsdp.checkpoint._safetensors.atomic_replace import Replacement, has_parts
from composable_fsdp.checkpoint._safetensors.file_layout import TensorFiles, TensorSpec
from composable_fsdp.checkpoint._tools.convert_staging import Work, aside_of, sync
from composable_fsdp.checkpoint._tools.mmap_tensor import Mapped
from composable_fsdp.checkpoint._tools.paths import nested
from composable_fsdp.checkpoint._tools.sources import Spec

__all__ = ["write_safetensors", "write_torch"]

_ALIGNMENT = 64


def write_safetensors(work: Work, target: Path, max_file_bytes: int) -> None:
    specs = [TensorSpec(path[1], spec.dtype, spec.shape) for path, spec in work.tensors.items()]
    aliases = {alias[1]: of[1] for alias, of in work.aliases.items()}
    token = secrets.token_hex(4)
    files = TensorFiles.of(specs, aliases, max_file_bytes, token if has_parts(target) else "")
    replacement = Replacement(target, token)
    try:
        replacement.begin(files)
        for file in files.files:
            with Mapped(replacement.aside / file.name, file.nbytes) as mapped:
                for each in file.tensors:
                    with mapped.tensor(file.offsets[each.name], Spec(each.shape, each.dtype)) as out:
                        work.fill(("model", each.name), out)
        replacement.commit(files)
    except BaseException:
        replacement.abandon()
        raise


def write_torch(work: Work, target: Path, max_file_bytes: int) -> None:
    """``torch.save`` wants all tensors, so these are in a mapped file first."""
    with aside_of(target) as aside:
        offsets, end = {}, 0
        for path, spec in work.tensors.items():
            offsets[path] = end
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        with Mapped(aside / "tensors", end) as mapped:
            for path, spec in work.tensors.items():
                with mapped.tensor(offsets[path], spec) as out:
                    work.fill(path, out)
            values = {path: mapped.view(offsets[path], spec) for path, spec in work.tensors.items()}
            values |= {alias: values[of] for alias, of in work.aliases.items()}
            tree = nested([*values.items(), *work.objects.items()])
            manifest = work.source.manifest
            if manifest is not None:
                tree["step"] = manifest.step
            torch.save(tree["model"] if work.is_model else tree, aside / "file")
            del values, tree
        sync(aside / "file")
        os.replace(aside / "file", target)
        sync(target.parent)
