"""What is in a checkpoint, in words and numbers: the work of ``inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composable_fsdp.checkpoint._coordination.mismatch import dtype_name
from composable_fsdp.checkpoint._dcp import directory as folder
from composable_fsdp.checkpoint._dcp.intact import problems_of, read_manifest
from composable_fsdp.checkpoint._tools.sources import Kind, Source, Spec, open_source
from composable_fsdp.errors import CheckpointError

__all__ = ["Description", "FolderDescription", "Listed", "OptimizerSummary", "Tensor", "describe", "describe_folder"]


@dataclass(frozen=True)
class Tensor:
    """Name, dtype without ``torch.``, and size of a tensor. ``same_as`` names the tensor that it is tied to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    same_as: str | None = None


@dataclass(frozen=True)
class OptimizerSummary:
    """Attributes:
    parameters: that have state.
    groups: of parameters; ``None`` if it does not say.
    keys: of the state, with how many parameters have each.
    nbytes: of all tensors.
    """

    parameters: int
    groups: int | None
    keys: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class Description:
    """Attributes:
    path: of the checkpoint.
    kind: ``dcp``, ``torch`` or ``safetensors``.
    saved: step, number of ranks and versions, as the manifest has them; empty without one.
    tensors: of the model, under each of their names.
    optimizer: in short.
    extra: the keys of what each rank gave as ``extra``; ``None`` where that has classes that are not admitted.
    others: what else there is, with its bytes.
    nbytes: of all tensors.
    problems: a sentence for each file that is missing or damaged, as far as was looked.
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: Path, *, verify: bool = False) -> Description:
    """The checkpoint at ``path``, of any kind.

    Args:
        path: of the checkpoint.
        verify: compare the checksums of the manifest, where there is one; otherwise only sizes of files.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = open_source(path)
    manifest = source.manifest
    saved = {} if manifest is None else {k: getattr(manifest, k) for k in ("step", "ranks", "library", "torch")}
    tensors = [_tensor(at[1:], spec) for at, spec in source.tensors.items() if at[0] == "model"]
    tensors += [
        _tensor(alias[1:], source.tensors[of], same_as=_name(of[1:]))
        for alias, of in source.aliases.items()
        if alias[0] == "model"
    ]
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


def _name(path: tuple[str, ...]) -> str:
    return ".".join(map(str, path))


def _tensor(path: tuple[str, ...], spec: Spec, same_as: str | None = None) -> Tensor:
    return Tensor(_name(path), spec.shape, dtype_name(spec.dtype), spec.nbytes, same_as)


def _optimizer(source: Source) -> OptimizerSummary | None:
    tensors = {at: spec for at, spec in source.tensors.items() if at[0] == "optimizer"}
    objects = [at for at in source.object_paths if at[0] == "optimizer"]
    if not tensors and not objects:
        return None
    state = [at for at in (*tensors, *objects) if at[1:2] == ("state",) and len(at) == 4]
    keys: dict[str, int] = {}
    for at in state:
        keys[at[3]] = keys.get(at[3], 0) + 1
    groups = None
    if ("optimizer", "param_groups") in objects:
        groups = _length(source, ("optimizer", "param_groups"))
    nbytes = sum(spec.nbytes for spec in tensors.values())
    return OptimizerSummary(len({at[2] for at in state}), groups, keys, nbytes)


def _length(source: Source, path: tuple[str, ...]) -> int | None:
    try:
        return len(source.value(path))
    except CheckpointError:
        return None


def _keys(source: Source, path: tuple[str, ...]) -> list[str] | None:
    try:
        value = source.value(path)
    except CheckpointError:
        return None
    return [str(key) for key in value] if isinstance(value, Mapping) else []


# -- folders


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a folder. ``problem`` says what is damaged; without its manifest there are no numbers."""

    step: int
    name: str
    ranks: int = 0
    nbytes: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class FolderDescription:
    """Attributes:
    path: of the folder.
    checkpoints: all, by step, damaged ones too.
    newest: the name of the newest one.
    newest_intact: the name of the newest one of which nothing is known to be damaged.
    leftovers: names of what killed saves left, which the next save removes.
    """

    path: str
    checkpoints: tuple[Listed, ...]
    newest: str
    newest_intact: str | None
    leftovers: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"kind": Kind.FOLDER.value, **asdict(self)}


def describe_folder(path: Path, *, verify: bool = False) -> FolderDescription:
    """The folder of checkpoints at ``path``. Arguments are those of :func:`describe`."""
    found = folder.candidates(path)[::-1]
    listed = tuple(_listed(each, verify) for each in found)
    intact = [each.name for each in listed if each.problem is None]
    names = {each.name for each in found}
    left = [name for name in folder.leftovers(path) if name not in names]
    return FolderDescription(str(path), listed, listed[-1].name, intact[-1] if intact else None, tuple(left))


def _listed(path: Path, verify: bool) -> Listed:
    step = folder.step_of(path)
    try:
        manifest, _ = read_manifest(path)
        problem = " ".join(problems_of(path, contents=verify)) or None
    except CheckpointError as error:  # of a newer format
        return Listed(step, path.name, problem=str(error))
    if manifest is None:
        return Listed(step, path.name, problem=problem)
    return Listed(step, path.name, manifest.ranks, sum(each.bytes for each in manifest.files.values()), problem)
