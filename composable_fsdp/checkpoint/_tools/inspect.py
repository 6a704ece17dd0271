"""Summaries of checkpoints and of folders of them, and checks of their files, as the commands print them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composable_fsdp.checkpoint._coordination.mismatch import dtype_name
from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp import directory as folder
from composable_fsdp.checkpoint._dcp.directory import Manifest, problems_of, read_manifest
from composable_fsdp.checkpoint._tools.sources import Kind, Source, kind_of, open_source
from composable_fsdp.errors import CheckpointError

__all__ = [
    "Description",
    "FolderDescription",
    "FolderRow",
    "OptimizerSummary",
    "Tensor",
    "VerifyResult",
    "describe",
    "describe_folder",
    "verify",
]


@dataclass(frozen=True)
class Tensor:
    """Name, shape, dtype without ``torch.``, and bytes of a tensor. ``same_as`` names the tensor that it is tied to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    same_as: str | None = None


@dataclass(frozen=True)
class OptimizerSummary:
    """The parameters with state, the param groups if known, and the number of parameters that have each key."""

    parameters: int
    groups: int | None
    keys: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class Description:
    """A summary of one checkpoint.

    Attributes:
        saved: step, number of ranks and versions from the manifest; empty without one.
        tensors: tensors of the model, including tied names.
        extra: keys of each rank's ``extra``; ``None`` if that has classes that are not admitted.
        others: bytes of tensors by other top-level key.
        problems: a sentence for each file that is missing or damaged, as far as checked.
    """

    path: str
    kind: str
    saved: dict[str, Any]
    tensors: tuple[Tensor, ...]
    optimizer: OptimizerSummary | None
    extra: dict[str, list[str] | None]
    others: dict[str, int]
    nbytes: int
    problems: tuple[str, ...] = ()


def describe(path: Path, *, verify: bool = False) -> Description:
    """Return a summary of the checkpoint at ``path``. Without ``verify`` only sizes of files are compared.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    source = open_source(path)
    manifest = source.manifest
    saved = {} if manifest is None else {k: getattr(manifest, k) for k in ("step", "ranks", "library", "torch")}
    tensors = [_tensor(source, at) for at in (*source.tensors, *source.aliases) if at[0] == "model"]
    others: dict[str, int] = {}
    for at, spec in source.tensors.items():
        if at[0] not in ("model", "optimizer"):
            others[at[0]] = others.get(at[0], 0) + spec.nbytes
    for at in source.object_paths:
        if at[0] not in ("model", "optimizer", "ranks"):
            others.setdefault(at[0], 0)
    return Description(
        path=str(source.path),
        kind=source.kind.value,
        saved=saved,
        tensors=tuple(tensors),
        optimizer=_optimizer(source),
        extra={at[1]: _keys(source, at) for at in source.object_paths if at[0] == "ranks" and at[2:] == ("extra",)},
        others=others,
        nbytes=sum(spec.nbytes for spec in source.tensors.values()),
        problems=() if manifest is None else tuple(problems_of(source.path, contents=verify)),
    )


def _tensor(source: Source, path: contents.Path) -> Tensor:
    of = source.aliases.get(path)
    spec = source.tensors[of or path]
    return Tensor(_name(path), tuple(spec.shape), dtype_name(spec.dtype), spec.nbytes, _name(of) if of else None)


def _name(path: contents.Path) -> str:
    return ".".join(map(str, path[1:]))


def _optimizer(source: Source) -> OptimizerSummary | None:
    tensors = {at: spec for at, spec in source.tensors.items() if at[0] == "optimizer"}
    objects = [at for at in source.object_paths if at[0] == "optimizer"]
    if not tensors and not objects:
        return None
    state = [at for at in (*tensors, *objects) if at[1:2] == ("state",) and len(at) == 4]
    keys = dict(Counter(at[3] for at in state))
    groups = _value(source, ("optimizer", "param_groups")) if ("optimizer", "param_groups") in objects else None
    nbytes = sum(spec.nbytes for spec in tensors.values())
    return OptimizerSummary(len({at[2] for at in state}), None if groups is None else len(groups), keys, nbytes)


def _keys(source: Source, path: tuple[str, ...]) -> list[str] | None:
    value = _value(source, path)
    if value is None:
        return None
    return [str(key) for key in value] if isinstance(value, Mapping) else []


def _value(source: Source, path: tuple[str, ...]) -> Any:
    """Return the value at ``path``, or ``None`` if it has classes that are not admitted."""
    try:
        return source.value(path)
    except CheckpointError:
        return None


# -- folders


@dataclass(frozen=True)
class FolderRow:
    """A checkpoint in a folder. ``problem`` describes its damage. ``ranks`` and ``nbytes`` are 0 without a manifest."""

    step: int
    name: str
    ranks: int = 0
    nbytes: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class FolderDescription:
    """All checkpoints in a folder by ascending step, and ``leftovers`` of killed saves, which the next save removes."""

    path: str
    checkpoints: tuple[FolderRow, ...]
    newest: str
    newest_intact: str | None
    leftovers: tuple[str, ...]
    kind: str = Kind.FOLDER.value


def describe_folder(path: Path, *, verify: bool = False) -> FolderDescription:
    found = folder.candidates(path)[::-1]
    rows = tuple(_folder_row(each, verify) for each in found)
    intact = [each.name for each in rows if each.problem is None]
    names = {each.name for each in found}
    left = [name for name in folder.leftovers(path) if name not in names]
    return FolderDescription(str(path), rows, rows[-1].name, intact[-1] if intact else None, tuple(left))


def _folder_row(path: Path, verify: bool) -> FolderRow:
    step = folder.step_of(path)
    manifest, problems = _examine(path, verify)
    problem = " ".join(problems) or None
    if manifest is None:
        return FolderRow(step, path.name, problem=problem)
    return FolderRow(step, path.name, manifest.ranks, sum(each.bytes for each in manifest.files.values()), problem)


# -- integrity


@dataclass(frozen=True)
class VerifyResult:
    """The number and bytes of the files that manifests list, and a sentence for each that is missing or damaged."""

    problems: tuple[str, ...]
    files: int
    nbytes: int


def verify(path: Path) -> VerifyResult:
    """Compare the checkpoint of ``save`` at ``path``, or all in the folder ``path``, with their manifests.

    Raises:
        CheckpointError: there is no checkpoint, or it is one without a manifest.
    """
    kind = kind_of(path)
    if kind in (Kind.TORCH, Kind.SAFETENSORS):
        raise CheckpointError(
            f"{path} has no manifest of checksums. 'python -m zipfile -t {path}' tests a file of torch.save; "
            "safetensors have no checksums."
        )
    found = [_examine(each, True) for each in (folder.candidates(path)[::-1] if kind is Kind.FOLDER else [path])]
    files = [record for manifest, _ in found if manifest is not None for record in manifest.files.values()]
    problems = tuple(problem for _, of_one in found for problem in of_one)
    return VerifyResult(problems, len(files), sum(record.bytes for record in files))


def _examine(checkpoint: Path, contents: bool) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, and a sentence for each damaged file. A manifest of a newer format is one of them."""
    try:
        return read_manifest(checkpoint)[0], list(problems_of(checkpoint, contents=contents))
    except CheckpointError as error:
        return None, [str(error)]
