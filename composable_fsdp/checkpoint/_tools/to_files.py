"""Conversion to a ``torch.save`` file, and to safetensors files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from composable_fsdp.checkpoint._safetensors.atomic_replace import Replacement, has_parts, sync
from composable_fsdp.checkpoint._safetensors.file_layout import TensorFiles, TensorSpec
from composable_fsdp.checkpoint._tools.convert_staging import Conversion, MappedFile, staging_directory
from composable_fsdp.checkpoint._tools.paths import unflatten
from composable_fsdp.checkpoint._tools.sources import Spec

__all__ = ["write_safetensors", "write_torch"]

_ALIGNMENT = 64


def write_safetensors(conversion: Conversion, target: Path, max_file_bytes: int) -> None:
    specs = [TensorSpec(path[1], spec.dtype, spec.shape) for path, spec in conversion.tensors.items()]
    aliases = {alias[1]: of[1] for alias, of in conversion.aliases.items()}
    token = secrets.token_hex(4)
    files = TensorFiles.of(specs, aliases, max_file_bytes, token if has_parts(target) else "")
    replacement = Replacement(target, token)
    try:
        replacement.begin(files)
        for file in files.files:
            with MappedFile(replacement.aside / file.name, file.nbytes) as mapped:
                for each in file.tensors:
                    with mapped.tensor(file.offsets[each.name], Spec(each.shape, each.dtype)) as out:
                        conversion.fill(("model", each.name), out)
        replacement.commit(files)
    except BaseException:
        replacement.abandon()
        raise


def write_torch(conversion: Conversion, target: Path, max_file_bytes: int) -> None:
    """Write a ``torch.save`` file. It needs all tensors at once, so they are first assembled in a mapped file."""
    with staging_directory(target) as staging:
        offsets, end = {}, 0
        for path, spec in conversion.tensors.items():
            offsets[path] = end
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        with MappedFile(staging / "tensors", end) as mapped:
            for path, spec in conversion.tensors.items():
                with mapped.tensor(offsets[path], spec) as out:
                    conversion.fill(path, out)
            values = {path: mapped.view(offsets[path], spec) for path, spec in conversion.tensors.items()}
            values |= {alias: values[of] for alias, of in conversion.aliases.items()}
            tree = unflatten([*values.items(), *conversion.objects.items()])
            manifest = conversion.source.manifest
            if manifest is not None:
                tree["step"] = manifest.step
            torch.save(tree["model"] if conversion.is_model_only else tree, staging / "file")
            del values, tree
        sync(staging / "file")
        os.replace(staging / "file", target)
        sync(target.parent)
