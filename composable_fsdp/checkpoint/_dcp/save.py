"""``save``: collect, plan, copy to host memory, write, commit. The contents of a checkpoint and their keys:

========================================  =============================================================
``model.<name>``                          parameters, buffers, extra states of modules
``optimizer.state.<name>.<key>``          optimizer state of the parameter of that name; below lists and dicts, further
                                          indices and keys
``optimizer.layouts``                     ``Layout`` (``state_tree.py``) of each of these states; under ``groups`` the
                                          param groups, with parameter names in ``params``
``optimizer.param_groups.<i>.<setting>``  the same settings as torch reads them: without types of keys and empty dicts;
                                          with a parameter's name in place of ``<i>`` for torch's flattened state dicts
``ranks.<rank>.extra``, ``….random``      the ``extra`` of each rank; its random number generators
``classes.<key>``                         the name of the class of a tensor whose shards are pickles
                                          (``pickled_shards.py``)
========================================  =============================================================

Names are those of the model without wrappers such as ``torch.compile``.

The planner and the format are those of ``torch.distributed.checkpoint`` (DCP), but blocks are those of ``LocalShard``,
since placements cannot describe every shard of a tensor-parallel shard; objects are serialized when the save is
planned, before training goes on; each rank copies to host memory only what it writes; and files get checksums.
"""

from __future__ import annotations

import io
import operator
import os
import pickle
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim import Optimizer
from torch.utils.serialization import config as serialization_config

from composable_fsdp._core.memory import current_accelerator, is_accelerator
from composable_fsdp._core.params import is_wrapper
from composable_fsdp._extents import like
from composable_fsdp._files import Directory
from composable_fsdp.checkpoint._archive import check_archive
from composable_fsdp.checkpoint._coordination import (
    TIMEOUT,
    Arguments,
    PendingSave,
    RankGroup,
    check_arguments,
    meet,
    said,
)
from composable_fsdp.checkpoint._dcp.directory import (
    METADATA,
    PARTIAL,
    FileRecord,
    Manifest,
    PartialCheckpoint,
    candidates,
    name_of,
)
from composable_fsdp.checkpoint._state_dict.model import check_meshes
from composable_fsdp.checkpoint._state_dict.optimizer import (
    OptimizerParam,
    OptimizerParams,
    check_values,
    on_host,
    plain_text,
)
from composable_fsdp.checkpoint._state_dict.pickled_shards import class_name, pickled, refuse_unknown
from composable_fsdp.checkpoint._state_dict.state_tree import (
    OBJECT,
    PLAIN,
    Layout,
    holds_dtensor,
    kind_of,
    kinds_of,
    layout_of,
    leaves,
)
from composable_fsdp.checkpoint._state_dict.tensors import (
    LocalShard,
    check_parts,
    prepare_for_access,
    tensors_of,
)
from composable_fsdp.errors import CheckpointError, ConfigurationError
from composable_fsdp.plugins.checks.optimizer_checks import why_not_pickled
from composable_fsdp.policies import checks_keywords

ContentsPath = tuple[Any, ...]
"""The path of a value in a nested state dict: names, and indices of lists. Joined by dots, it is the key."""

GroupKey = tuple[int, tuple[str, ...]]
"""The names of a group's parameters, and how many groups before it have the same ones: several may have none."""

Layouts = dict[str, Layout]
"""The layouts of optimizer state by parameter name."""


def key_of(path: ContentsPath) -> str:
    return ".".join(map(str, path))


@dataclass
class Contribution:
    """The notes of a rank to the others before a save: ranks may hold different parameters, as pipeline stages do.

    Attributes:
        groups: the param groups of the optimizer, with the names of their parameters in ``params``.
        layouts: see :data:`Layouts`.
        values: texts of what is no DTensor in the optimizer's state, by key, and of settings of its groups, except of
            groups without parameters: they are each rank's own, as of pipeline stages.
        classes: the classes of tensors whose shards are pickles, and their dtypes, by key: on one rank, or, after
            :func:`merge`, on all of them.
    """

    groups: dict[GroupKey, dict[str, Any]] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    classes: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)


def merge(contributions: Sequence[Contribution]) -> Contribution:
    """Merge what all ranks have. Ranks that have a group of the same parameters must have the same settings of it."""
    check_values({rank: each.values for rank, each in enumerate(contributions)})
    groups = {members: group for each in contributions[::-1] for members, group in each.groups.items()}
    layouts: Layouts = {}
    for rank, each in enumerate(contributions):
        for name, layout in each.layouts.items():
            if kinds_of(layouts.setdefault(name, layout)) != kinds_of(layout):
                raise CheckpointError(
                    f"the optimizer state of {name} on rank {rank} is another than on ranks before it, but only one is "
                    "saved. Have all ranks make the same steps."
                )
    classes: dict[str, tuple[str, torch.dtype]] = {}
    for key, found in ((key, found) for each in contributions for key, found in each.classes.items()):
        if (first_class := classes.setdefault(key, found)) != found:
            raise CheckpointError(f"{key} is of another class on each rank: {first_class[0]}, {found[0]}.")
    return Contribution(groups, layouts, classes=classes)


def _is_empty(member: OptimizerParam) -> bool:
    """Return whether other ranks have all elements. An optimizer may make no step here, so state here is not saved."""
    return LocalShard(member.parameter, member.sharding).extent.is_empty and member.parameter.numel() > 0


@dataclass
class Contents:
    """The state of one rank, by path.

    Attributes:
        parts: local shards of tensors. A block that several ranks hold is written by one of them.
        objects: all other values. If several ranks have a key, one of them writes it.
        aliases: further paths of tensors in ``parts``, with the path there.
        notes: what the other ranks get to know before the save.
    """

    parts: dict[ContentsPath, LocalShard] = field(default_factory=dict)
    objects: dict[ContentsPath, Any] = field(default_factory=dict)
    aliases: dict[ContentsPath, ContentsPath] = field(default_factory=dict)
    notes: Contribution = field(default_factory=Contribution)
    _keys: set[str] = field(default_factory=set)
    """The keys of the optimizer."""

    def add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        params = OptimizerParams(model, optimizer)
        trees, groups = params.packed()
        for number, group in enumerate(groups):
            for name, value in group.items():  # ranks exchange them before they are planned
                serialized(f"optimizer.param_groups[{number}][{name!r}]", value)
            index = sum(each["params"] == group["params"] for each in self.notes.groups.values())
            self.notes.groups[index, tuple(group["params"])] = {key: on_host(value) for key, value in group.items()}
        layouts = {name: self._add_tree(params.members[name], tree) for name, tree in trees.items()}
        self.notes.layouts = {name: layout for name, layout in layouts.items() if not _is_empty(params.members[name])}

    def _add_tree(self, member: OptimizerParam, tree: Any) -> Layout:
        """Add the leaves of the ``tree`` of optimizer state of ``member``, and return its layout."""
        kinds = []
        for path, value in leaves(tree, ("optimizer", "state", member.name)):
            own = tuple(each if isinstance(each, int) else str(each) for each in path)
            key = key_of(own)
            if key in self._keys:
                raise CheckpointError(f"two values of the optimizer are both called {key} without types and dots.")
            self._keys.add(key)
            kind = kind_of(value, member.parameter, key)
            kinds.append(kind)
            if kind in (OBJECT, PLAIN) and _is_empty(member):
                continue
            if kind == OBJECT:
                self.objects[own] = value
                continue
            self.parts[own] = LocalShard(value, member.sharding)
            if kind == PLAIN:
                refuse_unknown(key, self.parts[own])
                self.notes.values[key] = plain_text(value)
        remaining = iter(kinds)
        return layout_of(tree, lambda _: next(remaining))

    def contribution(self) -> Contribution:
        for path, part in self.parts.items():
            refuse_unknown(key_of(path), part)
        wrappers = {key_of(path): part for path, part in self.parts.items() if is_wrapper(part.local)}
        self.notes.classes = {key: (class_name(part.local), part.value.dtype) for key, part in wrappers.items()}
        values = {key_of(path): plain_text(value) for path, value in self.objects.items() if path[0] == "optimizer"}
        self.notes.values |= values | {
            f"the setting {key!r} of the param group of {names[0]}": plain_text(value)
            for (_, names), group in self.notes.groups.items()
            for key, value in group.items()
            if names and key != "params"
        }
        return self.notes

    def settings_by_parameter(self) -> dict[ContentsPath, ContentsPath]:
        """Return the path of each parameter's settings in torch's flattened state dicts, with that of their group's."""
        names = {path[2]: value for path, value in self.objects.items() if path[3:] == ("params",)}
        return {
            ("optimizer", f"param_groups.{name}.{path[3]}", *path[4:]): path
            for path in (*self.parts, *self.objects)
            if path[:2] == ("optimizer", "param_groups") and path[3] != "params"
            for name in names[path[2]]
        }

    def settle(self, merged: Contribution) -> None:
        """Add the groups of all ranks, and the classes of tensors whose shards are pickles on any rank."""
        if groups := list(merged.groups.values()):
            self.objects["optimizer", "layouts"] = {"state": merged.layouts, "groups": groups}
            settings, paths = flatten_state_dict({"optimizer": {"param_groups": groups}})
            for key, value in settings.items():  # torch's keys: it reads them one by one
                if isinstance(value, torch.Tensor):
                    self.parts[paths[key]] = LocalShard(value)
                else:
                    self.objects[paths[key]] = value
        checked: set[type] = set()
        for path, part in self.parts.items():
            if key_of(path) not in merged.classes:
                continue
            name, dtype = merged.classes[key_of(path)]
            if not is_wrapper(part.local):  # small shards of the same state may be plain
                self.parts[path] = LocalShard(like(part.value, part.local.to(dtype)), part.sharding)
            elif type(part.local) not in checked:
                checked.add(type(part.local))
                if reason := why_not_pickled(part.local):
                    raise CheckpointError(f"{key_of(path)} cannot be saved: {reason}.")
            for each in (path, *(alias for alias, of in self.aliases.items() if of == path)):
                self.objects["classes", key_of(each)] = name


def contents_of(model: nn.Module) -> Contents:
    """Return the tensors and extra states of ``model``, which is prepared. Nothing is copied."""
    contents = Contents()
    tensors, others = tensors_of(model)
    for first, *shared in tensors:
        contents.parts["model", first.name] = LocalShard(first.value, first.sharding)
        contents.aliases |= {("model", entry.name): ("model", first.name) for entry in shared}
    contents.objects = {("model", entry.name): entry.value for entry in others}
    return contents


# -- random number generators


_TWISTER_NUMBERS = 624
"""The numbers in the generator of torch on the CPU. It does not compare a restored position with them, so that a wrong
one would read other memory.
"""


def _random_state() -> dict[str, torch.Tensor]:
    """Return the random states of torch, by device type: of the CPU, and of the current accelerator if there is one."""
    state = {"cpu": torch.get_rng_state()}
    if (accelerator := current_accelerator()) is not None:
        state[accelerator.type] = torch.get_device_module(accelerator.type).get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that :func:`_random_state` returned, except that of an accelerator that is not current."""
    left, _, position = struct.unpack_from("<iiQ", bytes(state["cpu"][:24].tolist()), 8)  # after the seed
    if (left, position) != (1, 0) and (left + position != _TWISTER_NUMBERS + 1 or not left > 0 < position):
        raise CheckpointError(f"the random state of torch is at {position} of {_TWISTER_NUMBERS} numbers, {left} left.")
    torch.set_rng_state(state["cpu"])
    accelerator = current_accelerator()
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator.type).set_rng_state(state[accelerator.type])


# -- the plan


Values: TypeAlias = dict[MetadataIndex, torch.Tensor | bytes]
"""The blocks and the serialized objects that one rank writes."""


def local_plan(contents: Contents) -> tuple[SavePlan, dict[str, LocalShard | bytes]]:
    """Return DCP's plan of all that this rank has, and the values by key. Objects are serialized."""
    values: dict[str, LocalShard | bytes] = {key_of(path): part for path, part in contents.parts.items()}
    for path, value in contents.objects.items():
        values[key_of(path)] = serialized(key_of(path[2 * (path[0] == "ranks") :]), value)
    paths = {key_of(path): path for path in (*contents.parts, *contents.objects, *contents.aliases)}
    return replace(create_default_local_save_plan(values, is_coordinator=False), planner_data=paths), values


def serialized(key: str, value: object) -> bytes:
    """Return the bytes of an object. Raise ``CheckpointError``, which names the part, if ``load`` would refuse it."""
    data = io.BytesIO()
    try:
        if holds_dtensor(value):
            raise TypeError(_DTENSORS)
        torch.save(value, data)
        if type(value) not in _PLAIN:
            decoded(data.getvalue())
    except Exception as error:  # the code of any class
        for name, inner in value.items() if isinstance(value, Mapping) else ():
            serialized(f"{key}[{name!r}]", inner)  # raises at the innermost value of a dict
        advice = "Save what describes it instead: numbers, strings, lists, dicts and tensors"
        raise CheckpointError(f"{key} cannot be saved: {said(error)}. {advice}") from error
    return data.getvalue()


_DTENSORS = "it has DTensors, of which each rank would save its shard: save their full_tensor(), averages as a model"


def decoded(data: bytes) -> Any:
    """Return the object that :func:`serialized` wrote, tensors on the CPU. Saves ask it what ``load`` will admit."""
    file = io.BytesIO(data)
    check_archive(file)
    return torch.load(file, map_location="cpu", weights_only=True)


_PLAIN = (int, float, str, bool, type(None))


def _on_host(value: torch.Tensor | bytes) -> torch.Tensor | bytes:
    """Return a host copy of a block, or a pickle if its class is opaque.

    A copy from an accelerator is complete once the accelerator is synchronized.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if is_wrapper(value):
        return pickled(value)
    on_accelerator = is_accelerator(value.device)
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=on_accelerator)
    return host.copy_(value.detach(), non_blocking=on_accelerator)


# -- files


class _File(io.BufferedWriter):
    """A new file, with the number of its bytes and their checksum."""

    nbytes = checksum = 0
    error: OSError | None = None
    """The error of a failed write. torch's zip writer replaces it by one that does not say the reason."""

    def write(self, data: Any, /) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.nbytes, self.checksum = self.nbytes + count, zlib.crc32(data, self.checksum)
        return count


def write_value(file: io.BufferedWriter, value: torch.Tensor | bytes) -> None:
    """Write ``value``: of a tensor, the bytes of ``torch.save`` of its elements alone, without a copy of them."""
    if isinstance(value, bytes) or is_wrapper(value):
        file.write(value if isinstance(value, bytes) else pickled(value))
        return
    block = value.detach().cpu()
    if block.untyped_storage().nbytes() != block.nbytes:
        block = block.clone()
    with cast(Any, serialization_config).patch({"save.compute_crc32": False}):  # which torch's readers do not check
        torch.save(block, file)


Writes = tuple[dict[MetadataIndex, _StorageInfo], dict[str, FileRecord]]
"""The places of the values that one rank has written, and the records of its files."""


def write_values(folder: Directory, name: str, values: Values) -> Writes:
    """Write ``values`` to the new file ``name``, and to disk."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    with open(name, "xb", buffering=0, opener=folder.opener) as opened:
        file = _File(opened)
        try:
            for index, value in values.items():
                start = file.nbytes
                write_value(file, value)
                places[index] = _StorageInfo(name, start, file.nbytes - start)
            file.flush()
            os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            if (cause := error if isinstance(error, OSError) else file.error) is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(folder.path / name)) from error
    return places, {name: FileRecord(file.nbytes, f"{file.checksum:08x}")}


def write_metadata(
    folder: Directory, metadata: Metadata, written: Sequence[Writes], aliases: Mapping[str, str], step: int
) -> None:
    """Write DCP's metadata, and the manifest, of what all ranks have ``written``.

    ``aliases`` are further keys of values, with the key in ``metadata``; they become readable under these too.
    """
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = {index: place for places, _ in written for index, place in places.items()}
    by_key: dict[str, list[MetadataIndex]] = {}
    for index in metadata.storage_data:
        by_key.setdefault(index.fqn, []).append(index)
    for alias, key in aliases.items():
        if alias not in by_key:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            metadata.storage_data |= {replace(i, fqn=alias): metadata.storage_data[i] for i in by_key[key]}
    data = pickle.dumps(metadata)
    folder.write(METADATA, data)
    files = {METADATA: FileRecord(len(data), f"{zlib.crc32(data):08x}")}
    Manifest(
        step, len(written), {name: each for _, of_rank in written for name, each in of_rank.items()} | files
    ).write(folder)


# -- save


@checks_keywords
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
    timeout: float = TIMEOUT,
) -> PendingSave:
    """Write a new checkpoint ``path/step-00000020``. All ranks of the default process group must call it.

    The save is atomic: if a process is killed or the disk is full, the earlier checkpoints stay valid, including one of
    the same step until the new one is complete. Every rank writes the shards that it holds, and replicated values are
    written once. So values that differ between ranks must be DTensors, or have different names on each rank. The format
    is that of ``torch.distributed.checkpoint``, whose ``load`` can read it too, with a manifest of checksums.

    A checkpoint contains parameters, buffers, extra states of modules, optimizer state by parameter name, and torch's
    random number generators of each rank.

    Args:
        path: a folder of checkpoints that all ranks can access. Only one job at a time may write to it.
        model: sharded or not, also torch's ``AveragedModel`` of a sharded one, in a folder of its own.
        optimizer: over parameters of ``model``.
        extra: further state of this rank, such as the position in the data or the state of a scheduler: numbers,
            strings, lists, dicts, plain tensors, and what ``torch.serialization.add_safe_globals`` has admitted.
        step: step of the checkpoint. Default: ``extra["step"]``, an int, or without it one more than the newest step.
        keep_last: number of checkpoints to keep. Once this one is complete, all but the highest steps are deleted; this
            one is always kept.
        asynchronous: copy to host memory and write in a thread, so that training waits only for the copy. The next save
            or load waits for the thread, and so does the exit of the interpreter.
        timeout: seconds that ranks wait for each other, here and in each exchange.

    Returns:
        The path of the checkpoint, with ``wait()``. The checkpoint is complete unless ``asynchronous``.

    Raises:
        CheckpointError: writing failed, ranks are missing or pass other arguments, an earlier asynchronous save failed,
            an object could not be loaded again, ``extra`` has DTensors, parameters of one name on several meshes have
            other values on each, or plain optimizer state of a DTensor, or what state there is, differs between ranks.
            All ranks raise the same error.
        ConfigurationError: an argument is invalid.
    """
    own: dict[str, Any] = {}

    def check() -> Arguments:
        nonlocal step
        check_arguments("save(path, model, optimizer, extra)", path, model)
        own.update(extra or {})
        if keep_last is not None and (not hasattr(keep_last, "__index__") or keep_last < 1):
            raise ConfigurationError(f"keep_last must be an int of at least 1, not {keep_last!r}.")
        step = own.get("step") if step is None else step
        if step is not None and (not hasattr(step, "__index__") or (step := operator.index(step)) < 0):
            raise ConfigurationError(f"step must be an int of at least 0, not {step!r}, also in extra.")
        return [os.fspath(path)], {"step": step, "keep_last": keep_last, "asynchronous": asynchronous}

    ranks = meet(save, check, timeout)
    saver = _Save(ranks, Path(path).absolute(), step, keep_last)  # a later chdir must not change what a thread writes
    saver.plan(model, optimizer, own)
    pending = PendingSave(saver.final, saver.step)
    if asynchronous:
        saver.stage()
        pending.start(saver.write)
    else:
        saver.write()
    return pending


class _Save:
    """One save on one rank. After :meth:`plan`, rank 0 also has ``_partial_checkpoint`` and ``_metadata``."""

    def __init__(self, ranks: RankGroup, path: Path, step: int | None, keep_last: int | None) -> None:
        self._ranks, self._path, self._requested_step, self._keep_last = ranks, path, step, keep_last
        self._partial_checkpoint: PartialCheckpoint | None = None
        self._values: Values = {}

    def plan(self, model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any]) -> None:
        """Plan which rank writes what, and create the directory."""
        what = f"saving to {self._path}"
        contents = Contents()
        values: dict[str, LocalShard | bytes] = {}

        def contribution() -> Contribution:
            nonlocal contents
            prepare_for_access(model)
            contents = contents_of(model)
            if optimizer is not None:
                contents.add_optimizer(model, optimizer)
            for name, value in (("extra", extra), ("random", _random_state())):
                contents.objects["ranks", str(self._ranks.rank), name] = value
            return contents.contribution()

        merged = self._ranks.combine(what, contribution, merge)
        check_meshes(self._ranks, what, {path[1]: part for path, part in contents.parts.items() if path[0] == "model"})

        def each() -> tuple[SavePlan, Mapping[str, str]]:
            nonlocal values
            contents.settle(merged)
            plan, values = local_plan(contents)
            return plan, {key_of(alias): key_of(path) for alias, path in contents.aliases.items()}

        def central(planned: list[tuple[SavePlan, Mapping[str, str]]]) -> Sequence[tuple[int, SavePlan]]:
            check_parts([plan for plan, _ in planned])
            plans, self._metadata = DefaultSavePlanner().create_global_plan([plan for plan, _ in planned])
            self._aliases = {alias: of for _, aliases in planned for alias, of in aliases.items()}
            by_parameter = contents.settings_by_parameter()
            self._aliases |= {key_of(alias): key_of(path) for alias, path in by_parameter.items()}
            self._metadata.planner_data |= {key_of(alias): alias for alias in by_parameter}
            step = max(candidates(self._path), default=-1) + 1 if self._requested_step is None else self._requested_step
            self._partial_checkpoint = PartialCheckpoint(self._path, step)
            return [(step, plan) for plan in plans]

        with self._abandon_on_failure():
            self.step, plan = self._ranks.exchange(what, each, central)
        for index in (item.index for item in plan.items):
            value = values[index.fqn]
            self._values[index] = value.__get_tensor_shard__(index) if isinstance(value, LocalShard) else value
        self.final = self._path / name_of(self.step)

    def stage(self) -> None:
        """Copy what this rank writes to host memory."""

        def each() -> None:
            self._values = {index: _on_host(value) for index, value in self._values.items()}
            if any(isinstance(value, torch.Tensor) and value.is_pinned() for value in self._values.values()):
                torch.accelerator.synchronize()

        with self._abandon_on_failure():
            self._ranks.agree(f"saving {self.final}", each)

    def write(self) -> None:
        """Write this rank's files, then commit the checkpoint on rank 0."""
        opened = ExitStack()
        folder: Directory

        def each() -> Writes:
            nonlocal folder
            folder = opened.enter_context(closing(Directory(self._path / name_of(self.step, PARTIAL))))
            return write_values(folder, f"__{self._ranks.rank}_0.distcp", self._values)

        def finish(written: list[Writes]) -> None:
            assert self._partial_checkpoint is not None
            write_metadata(folder, self._metadata, written, self._aliases, self.step)
            self._partial_checkpoint.commit(self._keep_last)

        with self._abandon_on_failure(), opened:
            self._ranks.combine(f"saving {self.final}", each, finish)

    @contextmanager
    def _abandon_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._partial_checkpoint is not None:
                self._partial_checkpoint.abandon()
            raise
