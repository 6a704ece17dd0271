"""``load``: choose and verify the checkpoint, compare it with the model, read it.

DCP's default planner raises at the first key that is missing or of another shape, on one rank. Here all differences of
all ranks are found first, and nothing is loaded if there are any. Its reader unpickles objects with
``weights_only=False``.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.optim import Optimizer

from composable_fsdp._core.params import local_part
from composable_fsdp._extents import like, plain_name
from composable_fsdp._files import open_regular
from composable_fsdp.checkpoint._archive import ArchiveReader
from composable_fsdp.checkpoint._coordination import (
    TIMEOUT,
    Mismatch,
    RankGroup,
    check_arguments,
    differ,
    dtype_name,
    join_rank_texts,
    leave_common_unexpected,
    meet,
    mismatch_text,
    refuse,
    said,
    tensor_text,
)
from composable_fsdp.checkpoint._dcp import directory
from composable_fsdp.checkpoint._dcp.directory import Manifest
from composable_fsdp.checkpoint._dcp.metadata import read_metadata
from composable_fsdp.checkpoint._dcp.save import (
    Contents,
    ContentsPath,
    contents_of,
    decoded,
    key_of,
    set_random_state,
)
from composable_fsdp.checkpoint._state_dict import pickled_shards
from composable_fsdp.checkpoint._state_dict.optimizer import OptimizerParam, OptimizerParams
from composable_fsdp.checkpoint._state_dict.state_tree import (
    OBJECT,
    UNKNOWN,
    Layout,
    TreePath,
    built,
    layout_of_paths,
    new_state,
)
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, prepare_for_access
from composable_fsdp.errors import CheckpointError, printable
from composable_fsdp.policies import checks_keywords

logger = logging.getLogger(__name__)


@checks_keywords
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
    fallback: bool = False,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Load a checkpoint into ``model`` and ``optimizer``, on any mesh and any number of ranks.

    Each rank reads directly into its shards. Optimizer state is allocated as the checkpoint describes it and passed to
    ``optimizer.load_state_dict``; the optimizer needs no step first.

    Everything is checked before anything is changed. Only if no checksums were compared, with ``verify=False`` or
    without a manifest, damage may be found during reading; the error then says that the model may be loaded in part.

    Random number generators of torch are restored only on the number of ranks that saved.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is loaded. Also one of
            ``torch.distributed.checkpoint`` of ``{"model": ..., "optimizer": ...}``, which cannot be verified.
        model: sharded or not.
        optimizer: over parameters of ``model``. Its groups may be in another order than when they were saved.
        strict: raise on any difference between the checkpoint and the state to load, including optimizer settings that
            have defaults and are missing in the checkpoint. Otherwise what both have is loaded, converted to the
            model's dtypes, and the differences are logged; a different shape or tensor class is always an error.
        verify: compare checksums; otherwise only the presence and sizes of files. Each file is read by one rank.
        fallback: if checkpoints in the folder ``path`` are damaged, load the newest intact one and log the damage.
            Without it, a damaged newest checkpoint is an error.
        timeout: seconds that ranks wait for each other, here and in each exchange.

    Returns:
        The ``extra`` that this rank passed to ``save``, or that of rank 0 if the number of ranks has changed.

    Raises:
        CheckpointError: there is no checkpoint; it is damaged, of another format, or of another model; ranks are
            missing or pass other arguments; or an earlier asynchronous save failed. All ranks raise the same error,
            which names the file or lists the differences.
    """

    def check() -> tuple[Sequence[object], Mapping[str, object]]:
        check_arguments("load(path, model, optimizer)", path, model)
        switches = {"strict": strict, "verify": verify, "fallback": fallback}
        return [os.fspath(path)], {name: bool(value) for name, value in switches.items()}

    ranks = meet(load, check, timeout)
    what = f"loading {path}"
    folder, manifest = _choose(ranks, what, Path(path), verify, fallback)
    same_ranks = manifest is not None and manifest.ranks == ranks.size
    own = f"ranks.{ranks.rank if same_ranks else 0}."
    restore = _Restore(folder, model, optimizer)

    def match() -> Mismatch:
        metadata = with_plain_names(read_metadata(folder, manifest))
        kinds = ("model.", "classes.", own, *(() if optimizer is None else ("optimizer.",)))
        keys = [key for key in metadata.state_dict_metadata if key.startswith(kinds)]
        return restore.match(metadata, read_objects(folder, metadata, keys))

    def read_all() -> list[str]:
        try:
            restore.run()
            if same_ranks and (state := restore.objects.get(f"{own}random")) is not None:
                set_random_state(state)
        except Exception as error:
            advice = "" if verify or manifest is None else " verify=True finds damage before anything is loaded."
            text = f"{folder} could not be loaded: {said(error)}. The model may be loaded in part.{advice}"
            raise CheckpointError(text) from error
        return restore.quantized

    def decide(found: list[Mismatch]) -> None:
        mismatches = dict(enumerate(found))
        leave_common_unexpected(found)
        problem = f"{folder} does not fit {type(model).__name__}"
        refuse(problem, mismatches, () if strict else ("missing", "unexpected", "dtypes", "others"))
        if differences := mismatch_text(mismatches):
            logger.warning("%s. It is loaded in part.\n%s", problem, printable(differences))

    ranks.combine(what, match, decide)
    quantized = ranks.combine(what, read_all, lambda keys: list(dict.fromkeys(key for each in keys for key in each)))
    if quantized and ranks.rank == 0:
        logger.warning("%s: %s", what, pickled_shards.quantized_text(quantized))
    return cast(dict[str, Any], restore.objects.get(f"{own}extra") or {})


def _choose(ranks: RankGroup, what: str, path: Path, contents: bool, fallback: bool) -> tuple[Path, Manifest | None]:
    """Return the checkpoint to load and its manifest, if any; equal on all ranks. Each rank checks some files."""
    checkpoints = ranks.from_rank0(what, lambda: directory.checkpoints_at(path))
    if checkpoints == [path] and not ranks.from_rank0(what, lambda: directory.has_file(path / directory.MANIFEST)):
        if ranks.rank == 0:
            logger.warning("%s has no %s: whether it is intact cannot be verified", path, directory.MANIFEST)
        return path, None
    damaged = ""
    for checkpoint in checkpoints:
        manifest, problem = ranks.from_rank0(what, partial(directory.read_manifest, checkpoint))
        if manifest is not None:
            problem = ranks.combine(what, partial(_first_problem, ranks, checkpoint, manifest, contents), _joined)
        if manifest is not None and not problem:
            if damaged and ranks.rank == 0:
                text = "%s: %s is loaded, the newest checkpoint that is intact. Damaged:%s"
                logger.warning(text, what, checkpoint.name, printable(damaged))
            return checkpoint, manifest
        damaged += f"\n  {problem}"
        if not fallback:
            break
    advice = "" if fallback or len(checkpoints) == 1 else " fallback=True loads the newest one that is intact."
    raise CheckpointError(f"{what}: damaged.{advice}{damaged}")


def _first_problem(ranks: RankGroup, checkpoint: Path, manifest: Manifest, contents: bool) -> str:
    share = manifest.share(ranks.rank, ranks.size)
    return next(directory.check_files(checkpoint, share, contents=contents), "")


def _joined(texts: list[str]) -> str:
    return join_rank_texts({rank: text for rank, text in enumerate(texts) if text}, len(texts))


def read_objects(folder: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Read and deserialize the values of ``keys`` that are no tensors, or settings of an optimizer.

    They have only classes that ``torch.load(weights_only=True)`` admits, so that no code in the checkpoint can run.
    """
    objects: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key in keys:
        saved = metadata.state_dict_metadata[key]
        if isinstance(saved, BytesStorageMetadata):
            try:
                place = metadata.storage_data[MetadataIndex(key)]
                with io.BufferedReader(open_regular(folder, place.relative_path)) as file:
                    file.seek(place.offset)
                    objects[key] = decoded(file.read(place.length))
            except Exception as error:  # damaged bytes may raise anything
                raise CheckpointError(f"{key!r} cannot be read: {said(error)}.") from error
        elif key.startswith(_SETTINGS):
            tensors[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    read(folder, metadata, {key: LocalShard(tensor) for key, tensor in tensors.items()})
    return objects | tensors


_SETTINGS = "optimizer.param_groups."


@dataclass
class _Restore:
    """The state that ``model`` and ``optimizer`` load from a checkpoint. Only :meth:`run` changes them.

    Attributes:
        objects: the values in the checkpoint that are no tensors, by key.
        quantized: keys of tensors to which their class has given other values than the saved ones.
        _state: the optimizer's state by parameter name. Its new tensors are empty until they are read.
        _by_module: values that modules load through ``load_state_dict``, by plain name.
    """

    _folder: Path
    _model: nn.Module
    _optimizer: Optimizer | None
    objects: Mapping[str, Any] = field(default_factory=dict)
    quantized: list[str] = field(default_factory=list)
    _mismatch: Mismatch = field(default_factory=Mismatch)
    _parts: dict[str, LocalShard] = field(default_factory=dict)
    _by_class: dict[str, tuple[LocalShard, set[type]]] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)
    _by_module: dict[str, Any] = field(default_factory=dict)
    _params: OptimizerParams | None = None
    _groups: list[Mapping[str, Any] | None] = field(default_factory=list)

    def match(self, metadata: Metadata, objects: Mapping[str, Any]) -> Mismatch:
        """Compare the checkpoint with the state to load."""
        self._metadata, self._saved, self.objects = metadata, metadata.state_dict_metadata, objects
        classes = (key for key in objects if key.startswith("classes."))
        self._classes = {key.removeprefix("classes."): objects[key] for key in classes}
        prepare_for_access(self._model)
        self._match_contents(contents_of(self._model))
        if self._optimizer is not None:
            self._match_optimizer(self._optimizer)
        return self._mismatch

    def run(self) -> None:
        """Read this rank's shards of everything. If it raises, the model may be loaded in part."""
        with torch.no_grad():
            with ExitStack() as memory:  # parts that cannot be written to, such as expanded buffers, get their own
                plain = {key: memory.enter_context(part.plain(write=True)) for key, part in self._parts.items()}
                blocks = {key: LocalShard(plain[key], extent=part.extent) for key, part in self._parts.items()}
                read(self._folder, self._metadata, blocks)
            for key, (part, classes) in self._by_class.items():
                pieces = pickled_shards.read_pieces(self._folder, self._metadata, key, part.extent, classes)
                if pickled_shards.fill_by_class(key, part, pieces):
                    self.quantized.append(key)
            if self._by_module:
                names = {plain_name(name): name for name in self._model.state_dict(keep_vars=True)}
                self._model.load_state_dict({names[n]: v for n, v in self._by_module.items()}, strict=False)
        if self._params is not None:
            self._params.load(self._groups, self._state)

    def _match_contents(self, contents: Contents) -> None:
        registered = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        names: dict[ContentsPath, list[ContentsPath]] = {path: [path] for path in contents.parts}
        for alias, path in contents.aliases.items():
            names[path].append(alias)
        for path, part in contents.parts.items():
            key = next((k for k in map(key_of, names[path]) if k in self._saved), key_of(path))
            is_made = id(part.value) not in registered  # created by a state dict hook
            if is_made:
                part = LocalShard(part.value.detach().clone())
            if self._match_tensor(key, key.removeprefix("model."), part) and is_made:
                self._by_module[key.removeprefix("model.")] = part.value
        for path in contents.objects:
            if key_of(path) in self.objects:
                self._by_module[path[1]] = self.objects[key_of(path)]
            else:
                self._mismatch.missing[path[1]] = "an object"
        known = {key_of(path) for path in (*contents.parts, *contents.aliases, *contents.objects)}
        for key, saved in self._saved.items():
            if key.startswith("model.") and key not in known:
                self._mismatch.unexpected[key.removeprefix("model.")] = _describe(saved)

    def _match_tensor(self, key: str, name: str, part: LocalShard) -> bool:
        """Plan to load ``key`` into ``part``. Return False, and note it, if ``key`` is missing or has another shape."""
        saved, mismatch, wanted = self._saved.get(key), self._mismatch, part.value
        if saved is None:
            mismatch.missing[name] = tensor_text(wanted.dtype, wanted.shape)
        elif not _fits(saved, wanted):
            found = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else "an object"
            mismatch.shapes[name] = differ(found, tuple(wanted.shape))
        else:
            if saved.properties.dtype != wanted.dtype:
                mismatch.dtypes[name] = differ(dtype_name(saved.properties.dtype), dtype_name(wanted.dtype))
            kind, own = self._classes.get(key), pickled_shards.class_name(part.local)
            if kind is None:
                self._parts[key] = part
            elif kind == own:
                self._by_class[key] = part, pickled_shards.classes_of(part.local)
            else:
                mismatch.classes[name] = differ(f"a {kind}", f"a {own}")
            return True
        return False

    def _match_optimizer(self, optimizer: Optimizer) -> None:
        self._params = params = OptimizerParams(self._model, optimizer)
        layouts = self.objects.get("optimizer.layouts") or {"state": self._layouts_of_torch()}
        own = [[member.name for member in group] for group in params.groups]
        saved_groups = layouts["groups"] if "groups" in layouts else self._saved_groups(own)
        if saved_groups:
            self._groups = params.match_groups(saved_groups, self._mismatch)
        else:
            self._groups = [None] * len(params.groups)
            self._mismatch.others.append("the checkpoint has no param_groups of an optimizer.")
        states = layouts["state"]
        strays = (name for name in states if name not in params.members)
        self._mismatch.unexpected |= {f"optimizer state of {name}": "of no parameter" for name in strays}
        for name, member in params.members.items():
            if name in states:
                self._state[name] = built(states[name], partial(self._match_state, params, member))

    def _saved_groups(self, own: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return the saved param groups. Settings by parameter, of a flattened state dict, become ``own`` groups."""
        values = [(path[2:], key) for key, path in _paths(self._metadata) if key.startswith(_SETTINGS)]
        settings = {tuple(path): self.objects[key] for path, key in values if path and key in self.objects}
        found = built(layout_of_paths(dict.fromkeys(settings, OBJECT), None), lambda path, _: settings[path])
        items = dict(enumerate(found) if isinstance(found, list) else found)
        groups = [items[index] for index in sorted(key for key in items if isinstance(key, int))]
        by_name = {name: group for name, group in items.items() if isinstance(name, str)}
        for names in own:
            if names and all(name in by_name for name in names):
                first, *others = (by_name.pop(name) for name in names)
                groups.append({**first, "params": list(names)})
                if any(repr(each) != repr(first) for each in others):
                    self._mismatch.others.append(f"saved settings differ within one group: {', '.join(names)}")
        return [*groups, *({**group, "params": [name]} for name, group in by_name.items())]

    def _match_state(self, params: OptimizerParams, member: OptimizerParam, path: TreePath, kind: str) -> Any:
        """Return the value to load: the optimizer's own tensor where it fits, else a new one."""
        full_key = key_of(("optimizer", "state", member.name, *path))
        name = f"optimizer state {key_of(path)} of {member.name}"
        saved, existing = self._saved.get(full_key), params.existing(member, path)
        if isinstance(saved, TensorStorageMetadata):
            if full_key in self._classes or pickled_shards.is_pickled(self._metadata, full_key):
                return self._match_pickled(params, member, path, full_key, name)
            if existing is None or existing.shape != saved.size:
                key, shape = path[-1] if path else None, tuple(saved.size)
                existing = new_state(kind, key, shape, saved.properties.dtype, member.parameter)
            self._parts[full_key] = LocalShard(existing, member.sharding)
            return existing
        if full_key not in self.objects:
            self._mismatch.missing[name] = "optimizer state"
        return self.objects.get(full_key)

    def _match_pickled(
        self, params: OptimizerParams, member: OptimizerParam, path: TreePath, key: str, name: str
    ) -> torch.Tensor | None:
        """Return the tensor to load that was saved as pickles: the optimizer's own, or one that a first step makes."""
        parameter, saved = member.parameter, cast(TensorStorageMetadata, self._saved[key])
        local = local_part(parameter)
        if saved.size != parameter.shape:
            self._mismatch.shapes[name] = differ(tuple(saved.size), tuple(parameter.shape))
            return None
        try:
            existing = params.existing(member, path)
            if existing is None or existing.shape != saved.size:
                is_class_of_parameter = self._classes.get(key) == pickled_shards.class_name(local)
                if not is_class_of_parameter:
                    made = params.made(member, path, local.shape)
                elif local.dtype == saved.properties.dtype:
                    made = local.detach().clone()
                else:
                    made = torch.empty_like(local, dtype=saved.properties.dtype, requires_grad=False)
                existing = like(parameter, made)
            part = LocalShard(existing, member.sharding)
            classes = pickled_shards.classes_of(part.local)
            if not classes:  # a small shard, which is plain
                sizes = max((chunk.sizes for chunk in saved.chunks), key=prod)
                classes = pickled_shards.classes_of(params.made(member, path, sizes))
            self._by_class[key] = part, classes
        except CheckpointError as error:
            self._mismatch.classes[name] = f"saved as a tensor of a class of its optimizer, but {error}"
            return None
        return existing

    def _layouts_of_torch(self) -> dict[str, Layout]:
        """Return the layouts of optimizer state by parameter name, as far as torch's checkpoints say what it is."""
        assert self._params is not None
        paths = {key: tuple(path) for key, path in _paths(self._metadata) if key in self._saved}
        kinds: dict[str, dict[TreePath, str]] = {}
        for key, path in paths.items():
            if path[:2] == ("optimizer", "state") and len(path) > 2:
                kind = UNKNOWN if isinstance(self._saved[key], TensorStorageMetadata) else OBJECT
                kinds.setdefault(cast(str, path[2]), {})[path[3:]] = kind
        members = self._params.members
        existing = {name: self._params.tree(members[name]) if name in members else {} for name in kinds}
        return {name: layout_of_paths(found, existing[name]) for name, found in kinds.items()}


def with_plain_names(metadata: Metadata) -> Metadata:
    """Return ``metadata`` with the keys that ``save`` gives.

    Others save the names of a compiled model, or a model at the top level beside its optimizer, as torchtitan does.
    """
    keys = metadata.state_dict_metadata
    paths = dict(_paths(metadata))
    if not any(key.startswith("model.") for key in keys):
        paths |= {key: ("model", key) for key in keys if len(paths.get(key, (key,))) == 1}
    paths = {k: tuple(plain_name(key) if isinstance(key, str) else key for key in path) for k, path in paths.items()}
    names = {key: key_of(paths[key]) if key in paths else plain_name(key) for key in keys}
    plain = {key: name for key, name in names.items() if name not in keys}
    if not plain:
        return metadata
    return replace(
        metadata,
        state_dict_metadata={plain.get(key, key): saved for key, saved in keys.items()},
        planner_data={plain.get(key, key): path for key, path in paths.items()},
        storage_data={replace(i, fqn=plain.get(i.fqn, i.fqn)): place for i, place in metadata.storage_data.items()},
    )


def _paths(metadata: Metadata) -> Iterable[tuple[str, ContentsPath]]:
    """Return the path of each key in the nested state dict that was saved.

    Of an optimizer's flattened state dict (``flatten_optimizer_state_dict`` of torch) it is that of the nested one,
    with settings by parameter: ``("optimizer", "param_groups", "0.weight", "lr")``.
    """
    paths: dict[str, ContentsPath] = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    flat = {key: str(path[1]).split(".") for key, path in paths.items() if path[0] == "optimizer" and len(path) > 1}
    names = {".".join(parts[1:-1]) for parts in flat.values() if parts[0] == "param_groups"}
    for key, (section, *parts) in flat.items():
        ends = [end for end in range(1, len(parts)) if ".".join(parts[:end]) in names] or [len(parts) - 1]
        if parts and section in ("state", "param_groups"):
            name, setting = ".".join(parts[: ends[-1]]), ".".join(parts[ends[-1] :])
            paths[key] = ("optimizer", section, name, setting, *paths[key][2:])
    return paths.items()


def _fits(saved: object, wanted: torch.Tensor) -> TypeGuard[TensorStorageMetadata]:
    return isinstance(saved, TensorStorageMetadata) and saved.size == wanted.shape


def _describe(saved: object) -> str:
    return tensor_text(saved.properties.dtype, saved.size) if isinstance(saved, TensorStorageMetadata) else "an object"


# -- reading


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that reads tensors directly into the memory of a ``LocalShard``."""

    def __init__(self, state: dict[str, LocalShard], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = state
        self.metadata = metadata

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        shard: torch.Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return shard


def read(folder: Path, metadata: Metadata, state: dict[str, LocalShard]) -> None:
    """Read the tensors in ``state`` by key from the checkpoint ``folder`` with its ``metadata``.

    Raises:
        CheckpointError: a file is damaged, or has another tensor than ``metadata`` says.
    """
    planner, reader = _LoadPlanner(state, metadata), ArchiveReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointError(f"the tensors in {folder} cannot be read: {said(error)}.") from error
