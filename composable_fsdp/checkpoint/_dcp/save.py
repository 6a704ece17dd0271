"""``save``: collect, plan, copy to host memory, write, commit. The contents of a checkpoint and their keys:

========================================  =============================================================
``model.<name>``                          parameters, buffers, extra states of modules
``optimizer.state.<name>.<key>``          optimizer state of the parameter of that name; below lists and dicts, further
                                          indices and keys
``optimizer.layouts``                     ``Layout`` (``state_tree.py``) of each of these states; under ``groups`` the
                                          param groups, with parameter names in ``params``
``optimizer.param_groups.<i>.<setting>``  the same settings as torch reads them: without types of keys and empty dicts;
                                          with a parameter's name in place of ``<i>`` for torch's flattened state dicts
``communication.<name>.residual``         state of codecs with error feedback
``ranks.<rank>.extra``, ``….random``      the ``extra`` of each rank; its random number generators
``classes.<key>``                         ``Record`` (``inner_tensors.py``) of a tensor subclass that is saved as inner
                                          tensors under ``<key>.<inner>``, or is opaque (``opaque_state.py``)
========================================  =============================================================

Names are those of the model without wrappers such as ``torch.compile``.

The planner and the writer are those of ``torch.distributed.checkpoint`` (DCP), but blocks are those of ``LocalShard``,
since placements cannot describe every shard of a tensor-parallel shard; objects are serialized when the save is
planned, before training goes on; each rank copies to host memory only what it writes; and files get checksums.
"""

from __future__ import annotations

import io
import operator
import os
import random
import struct
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils.serialization import config as serialization_config

from composable_fsdp._core.memory import current_accelerator, is_accelerator
from composable_fsdp._core.params import is_wrapper
from composable_fsdp._core.state import states_below
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
from composable_fsdp.checkpoint._dcp.directory import FileRecord, Manifest, PartialCheckpoint, candidates
from composable_fsdp.checkpoint._state_dict import inner_tensors
from composable_fsdp.checkpoint._state_dict.model import check_meshes
from composable_fsdp.checkpoint._state_dict.opaque_state import pickled
from composable_fsdp.checkpoint._state_dict.optimizer import (
    OptimizerParam,
    OptimizerParams,
    check_replicated,
    check_values,
    on_host,
    plain_text,
)
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
    checksum,
    prepare_for_access,
    tensors_of,
)
from composable_fsdp.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from composable_fsdp.plugins.checks.optimizer_checks import why_not_pickled
from composable_fsdp.plugins.codecs.communication_state import CommunicationState
from composable_fsdp.policies import checks_keywords

ContentsPath = tuple[Any, ...]
"""The path of a value in a nested state dict: names, and indices of lists. Joined by dots, it is the key."""

GroupKey = tuple[int, tuple[str, ...]]
"""The names of a group's parameters, and how many groups before it have the same ones: several may have none."""

Groups = Mapping[GroupKey, Mapping[str, Any]]
"""The param groups of an optimizer, with the names of their parameters in ``params``."""


Layouts = dict[str, Layout]
"""The layouts of optimizer state by parameter name."""


def key_of(path: ContentsPath) -> str:
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Contribution:
    """The notes of a rank to the others before a save: ranks may hold different parameters, as pipeline stages do.

    ``values`` are texts of what is no tensor in the optimizer's state, by key, and of settings of its groups, except of
    groups without parameters: they are each rank's own, as of pipeline stages. ``inner`` describes tensor subclasses by
    key: on one rank, or, after :func:`merge`, on all of them.
    """

    groups: Groups
    layouts: Layouts
    replicated: Mapping[str, int]
    values: Mapping[str, str]
    inner: Mapping[str, Any]


def merge(contributions: Sequence[Contribution]) -> Contribution:
    """Merge what all ranks have. Ranks that have a group of the same parameters must have the same settings of it."""
    check_replicated({rank: each.replicated for rank, each in enumerate(contributions)})
    check_values([each.values for each in contributions])
    groups = {members: group for each in contributions[::-1] for members, group in each.groups.items()}
    layouts: Layouts = {}
    for rank, each in enumerate(contributions):
        for name, layout in each.layouts.items():
            first = layouts.setdefault(name, layout)
            if first != layout and (differing := kinds_of(first).items() ^ kinds_of(layout).items()):
                paths = ", ".join(sorted({key_of(path) for path, _ in differing}))
                raise CheckpointError(
                    f"the optimizer state of {name} on rank {rank} is another than on ranks before it, in "
                    f"{paths or 'all of it'}, but only one is saved. Have all ranks make the same steps."
                )
    return Contribution(groups, layouts, {}, {}, inner_tensors.agreed([each.inner for each in contributions]))


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
        replicated: checksums of the plain tensors in ``parts`` that must be equal on all ranks, by key.
        groups: see :data:`Groups`.
        layouts: see :data:`Layouts`.
    """

    parts: dict[ContentsPath, LocalShard] = field(default_factory=dict)
    objects: dict[ContentsPath, Any] = field(default_factory=dict)
    aliases: dict[ContentsPath, ContentsPath] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)
    groups: dict[GroupKey, dict[str, Any]] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=dict)
    _keys: set[str] = field(default_factory=set)
    """The keys of the optimizer."""

    def add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        params = OptimizerParams(model, optimizer)
        trees, groups = params.packed()
        for group in groups:
            names = group["params"]
            index = sum(group["params"] == names for group in self.groups.values())
            self.groups[index, tuple(names)] = {key: on_host(value) for key, value in group.items()}
        layouts = {name: self._add_tree(params.members[name], tree) for name, tree in trees.items()}
        self.layouts = {name: layout for name, layout in layouts.items() if not _is_empty(params.members[name])}

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
                inner_tensors.refuse_unknown(key, self.parts[own])
                self.replicated[key] = checksum(value)
        remaining = iter(kinds)
        return layout_of(tree, lambda _: next(remaining))

    def add_rank(self, model: nn.Module, rank: int, extra: Mapping[str, Any]) -> None:
        for name, kept in communication_of(model).items():
            self.parts["communication", name, "residual"] = LocalShard(kept["residual"])
        self.objects["ranks", str(rank), "extra"] = extra
        self.objects["ranks", str(rank), "random"] = _random_state()

    def contribution(self) -> Contribution:
        parts = {key_of(path): part for path, part in self.parts.items()}
        values = {key_of(path): plain_text(value) for path, value in self.objects.items() if path[0] == "optimizer"}
        values |= {
            f"the setting {key!r} of the param group of {names[0]}": plain_text(value)
            for (_, names), group in self.groups.items()
            for key, value in group.items()
            if names and key != "params"
        }
        inner = inner_tensors.inner_contributions_of(parts)
        return Contribution(self.groups, self.layouts, self.replicated, values, inner)

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
        """Add the groups of all ranks, and replace each tensor subclass by its inner tensors and its record."""
        if groups := list(merged.groups.values()):
            self.objects["optimizer", "layouts"] = {"state": merged.layouts, "groups": groups}
            settings, paths = flatten_state_dict({"optimizer": {"param_groups": groups}})
            for key, value in settings.items():  # torch's keys: it reads them one by one
                if isinstance(value, torch.Tensor):
                    self.parts[paths[key]] = LocalShard(value)
                else:
                    self.objects[paths[key]] = value
        checked: set[type] = set()
        for path in [path for path in self.parts if key_of(path) in merged.inner]:
            part, record = self.parts.pop(path), merged.inner[key_of(path)]
            if record.is_opaque:
                if not is_wrapper(part.local):  # small shards of the same state may be plain
                    part = LocalShard(like(part.value, part.local.to(getattr(torch, record.dtype))), part.sharding)
                elif type(part.local) not in checked:
                    checked.add(type(part.local))
                    if reason := why_not_pickled(part.local):
                        raise CheckpointError(f"{key_of(path)} cannot be saved: {reason}.")
                self.parts[path] = part
            aliases = [alias for alias, of in self.aliases.items() if of == path]
            for each in (path, *aliases):
                self.aliases.pop(each, None)
                self.objects["classes", key_of(each)] = record.encoded()
            for suffix, inner in () if record.is_opaque else inner_tensors.parts_of(part, record).items():
                own = (*path[:-1], f"{path[-1]}{suffix}")
                self.parts[own] = inner
                self.aliases |= {(*alias[:-1], f"{alias[-1]}{suffix}"): own for alias in aliases}


def contents_of(model: nn.Module) -> Contents:
    """Return the tensors and extra states of ``model``, which is prepared. Nothing is copied."""
    contents = Contents()
    tensors, others = tensors_of(model)
    for first, *shared in tensors:
        contents.parts["model", first.name] = LocalShard(first.value, first.sharding)
        contents.aliases |= {("model", entry.name): ("model", first.name) for entry in shared}
    contents.objects = {("model", entry.name): entry.value for entry in others}
    return contents


def communication_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the ``residual`` of the error-feedback codecs by name; empty if the model is not sharded."""
    return CommunicationState(model).state_dict() if states_below(model) else {}


# -- random number generators


_TWISTER_NUMBERS = 624
"""The numbers in the generators of numpy and of torch on the CPU. Neither compares a restored position with them, so
that a wrong one would read other memory.
"""


def _random_state() -> dict[str, Any]:
    """Return the random states of Python, torch (CPU and current accelerator), and numpy if it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if (accelerator := current_accelerator()) is not None:
        state[accelerator.type] = torch.get_device_module(accelerator.type).get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that :func:`_random_state` returned, except those of generators that do not exist here."""
    random.setstate(state["python"])
    left, _, position = struct.unpack_from("<iiQ", bytes(state["cpu"][:24].tolist()), 8)  # after the seed
    if (left, position) != (1, 0) and (left + position != _TWISTER_NUMBERS + 1 or not left > 0 < position):
        raise CheckpointError(f"the random state of torch is at {position} of {_TWISTER_NUMBERS} numbers, {left} left.")
    torch.set_rng_state(state["cpu"])
    accelerator = current_accelerator()
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator.type).set_rng_state(state[accelerator.type])
    if "numpy" in state and "numpy" in sys.modules:
        if not 0 <= (position := state["numpy"][2]) <= _TWISTER_NUMBERS:
            raise CheckpointError(f"the random state of numpy is at {position} of {_TWISTER_NUMBERS} numbers.")
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


# -- the plan


class SavePlanner(DefaultSavePlanner):
    """A planner that writes ``contents``. DCP merges the plans of the ranks and validates the result."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._staged: dict[MetadataIndex, torch.Tensor | bytes] = {}
        self.is_coordinator = False
        self.state_dict = {key_of(path): part for path, part in contents.parts.items()}
        self.state_dict |= {
            key_of(path): serialized(key_of(path[2 * (path[0] == "ranks") :]), value)
            for path, value in contents.objects.items()
        }
        self.mappings = {key_of(path): path for path in (*contents.parts, *contents.objects, *contents.aliases)}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor | bytes:
        if index in self._staged:
            return self._staged[index]
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, LocalShard) else value

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.lookup_object(write_item.index)
        if isinstance(value, torch.Tensor) and is_wrapper(value):
            value = pickled(value)
        return io.BytesIO(value) if isinstance(value, bytes) else value

    def is_pickled(self, item: WriteItem) -> bool:
        """Return whether ``item`` is an object, or a tensor that is written as one because its class is opaque."""
        value = self.lookup_object(item.index)
        return isinstance(value, bytes) or is_wrapper(value)

    def stage(self, plan: SavePlan) -> None:
        """Copy the tensors in ``plan`` to host memory and release all others."""
        values = {item.index: self.lookup_object(item.index) for item in plan.items}
        self._staged = {i: _on_host(v) if isinstance(v, torch.Tensor) else v for i, v in values.items()}
        self.state_dict = {}
        if any(isinstance(value, torch.Tensor) and value.is_pinned() for value in self._staged.values()):
            torch.accelerator.synchronize()


def serialized(key: str, value: object, above: frozenset[int] = frozenset()) -> bytes:
    """Return the bytes of an object. Raise ``CheckpointError``, which names the part, if ``load`` would refuse it.

    ``above`` are ids of what contains it.
    """
    data, refused = io.BytesIO(), None
    try:
        if holds_dtensor(value):
            raise TypeError(_DTENSORS)
        torch.save(value, data)
        if type(value) not in _PLAIN:
            decoded(data.getvalue())
    except Exception as error:  # the code of any class
        refused = error
    if refused is not None:
        for item, inner in _inner(value) if id(value) not in above else ():
            serialized(f"{key}[{item!r}]", inner, above | {id(value)})  # raises at the innermost part
        raise CheckpointError(
            f"{key} cannot be saved: {said(refused)}. Save what describes it instead: numbers, strings, lists, dicts "
            "and tensors"
        ) from refused
    return data.getvalue()


_DTENSORS = (
    "it has DTensors, of which each rank would save its own shard. Save averages as a model, and a second "
    "optimizer with its model, to a folder of its own, which shards them again; and full_tensor() of others"
)


def decoded(data: bytes) -> Any:
    """Return the object that :func:`serialized` wrote, tensors on the CPU. Saves ask it what ``load`` will admit."""
    file = io.BytesIO(data)
    check_archive(file)
    return torch.load(file, map_location="cpu", weights_only=True)


_PLAIN = (int, float, str, bool, type(None))


def _inner(value: object) -> Iterable[tuple[object, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, set, frozenset)) else ()


def _on_host(block: torch.Tensor) -> torch.Tensor | bytes:
    """Return a host copy of ``block``, or a pickle if its class is opaque.

    A copy from an accelerator is complete once the accelerator is synchronized.
    """
    if is_wrapper(block):
        return pickled(block)
    on_accelerator = is_accelerator(block.device)
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=on_accelerator)
    return host.copy_(block.detach(), non_blocking=on_accelerator)


# -- files


class _ChecksummingFile(io.BufferedWriter):
    """A file that computes a checksum of the bytes written. Writes must be sequential, as DCP's are."""

    checksum = 0
    bytes = 0
    error: OSError | None = None
    """The error of a failed write. torch's zip writer replaces it by one that does not say the reason."""

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.checksum = zlib.crc32(data, self.checksum)
        self.bytes += count
        return count

    def fileno(self) -> int:
        self.flush()  # DCP syncs its files before it has flushed them
        return super().fileno()


class _ChecksummingFileSystem(FileSystem):
    """The new files of a directory, with size and checksum of each. It adds the file name to write errors."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        file = _ChecksummingFile(io.FileIO(Path(path).name, mode.replace("w", "x"), opener=self.directory.opener))
        try:
            with file:
                yield file
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else file.error
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        self.records[Path(path).name] = FileRecord(file.bytes, f"{file.checksum:08x}")

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # the directory is new

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        old, new = Path(path).name, Path(new_path).name
        self.directory.rename(old, new)
        self.records[new] = self.records.pop(old)


Writes = tuple[list[WriteResult], Mapping[str, FileRecord]]
"""The write results of one rank, and the records of its files."""


class ChecksummingWriter(FileSystemWriter):
    """DCP's writer with one synced file per rank. It records size and checksum of each file."""

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory.path, sync_files=True)
        self.fs = self.files = _ChecksummingFileSystem(directory)
        self.records = self.files.records

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write without the checksum that ``torch.save`` computes for each tensor: torch's readers do not check it."""
        with cast(Any, serialization_config).patch({"save.compute_crc32": False}):
            return super().write_data(plan, planner)

    def complete(
        self, metadata: Metadata, written: Sequence[Writes], aliases: Mapping[str, str], step: int, ranks: int
    ) -> None:
        """Write DCP's metadata, and the manifest with the ``step`` and the number of ``ranks`` that have ``written``.

        ``aliases`` are further keys of tensors, with the key in ``metadata``; they become readable under these too.
        """
        keys: dict[str, list[str]] = {}
        for alias, key in aliases.items():
            if alias not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
                keys.setdefault(key, []).append(alias)
        results = [result for of_rank, _ in written for result in of_rank]
        results += [
            replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
            for result in results
            for alias in keys.get(result.index.fqn, ())
        ]
        self.finish(metadata, [results])
        files = {name: record for _, records in written for name, record in records.items()} | self.records
        Manifest(step, ranks, files).write(self.files.directory)

    def write(self, plan: SavePlan, planner: SavePlanner) -> Writes:
        items = [replace(i, type=WriteItemType.BYTE_IO) if planner.is_pickled(i) else i for i in plan.items]
        written = self.write_data(replace(plan, items=items), planner)
        written.wait()
        return written.value(), self.records

    def storage_meta(self) -> StorageMeta:
        """Leave out the path: the directory is renamed later, and pickled paths depend on the version of Python."""
        return StorageMeta(save_id=self.save_id)


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

    A checkpoint contains parameters, buffers, extra states of modules, optimizer state by parameter name, each rank's
    random number generators, and the state of codecs with error feedback.

    Args:
        path: a folder of checkpoints that all ranks can access. Only one job at a time may write to it.
        model: sharded or not, also torch's ``AveragedModel`` of a sharded one, in a folder of its own.
        optimizer: over parameters of ``model``.
        extra: further state of this rank, such as the position in the data or the state of a scheduler: numbers,
            strings, lists, dicts, plain tensors, and what ``torch.serialization.add_safe_globals`` has admitted.
        step: step of the checkpoint. Default: ``extra["step"]`` if that is an int, else one more than the newest step.
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
    own, folder, signature = {} if extra is None else extra, Path(), "save(path, model, optimizer, extra)"

    def check() -> Arguments:
        nonlocal step, own, folder
        check_arguments(signature, path, model, optimizer)
        if not isinstance(own, Mapping):
            raise ArgumentTypeError(f"extra must be a dict, not {type(own).__name__}. Call {signature}.")
        if keep_last is not None and keep_last < 1:
            raise ConfigurationError(f"keep_last must be at least 1, not {keep_last}: the new checkpoint is one.")
        own, folder = dict(own), Path(path).absolute()  # a thread writes it, which a later chdir must not change
        step = _requested_step(step, own)
        return [os.fspath(path)], {
            "step": step,
            "keep_last": None if keep_last is None else operator.index(keep_last),
            "asynchronous": bool(asynchronous),
        }

    saver = _Save(meet(save, check, timeout), folder, step, keep_last)
    saver.plan(model, optimizer, own)
    pending = PendingSave(saver.final, saver.step)
    if asynchronous:
        saver.stage()
        pending.start(saver.write)
    else:
        saver.write()
    return pending


def _requested_step(step: int | None, extra: Mapping[str, Any]) -> int | None:
    if step is None and type(extra.get("step")) is int:
        step = extra["step"]
    if step is None and isinstance(extra.get("step"), str) and extra["step"].isdigit():
        raise ArgumentTypeError(f"extra['step'] must be an int, not {extra['step']!r}. Or pass step= beside it.")
    if step is not None and not hasattr(step, "__index__"):
        raise ArgumentTypeError(f"step must be an int, not {step!r}.")
    if step is not None and (step := operator.index(step)) < 0:
        raise ConfigurationError(f"step must not be negative, but is {step}.")
    return step


class _Save:
    """One save on one rank. After :meth:`plan`, rank 0 also has ``_partial_checkpoint`` and ``_metadata``."""

    def __init__(self, ranks: RankGroup, path: Path, step: int | None, keep_last: int | None) -> None:
        self._ranks, self._path, self._requested_step, self._keep_last = ranks, path, step, keep_last
        self._metadata: Metadata | None = None
        self._partial_checkpoint: PartialCheckpoint | None = None

    def plan(self, model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any]) -> None:
        """Plan which rank writes what, and create the directory."""
        what = f"saving to {self._path}"
        contents = Contents()

        def contribution() -> Contribution:
            nonlocal contents
            prepare_for_access(model)
            contents = contents_of(model)
            if optimizer is not None:
                contents.add_optimizer(model, optimizer)
                for index, group in enumerate(optimizer.param_groups):  # ranks exchange them before they are planned
                    for name, value in group.items():
                        if name != "params":
                            serialized(f"optimizer.param_groups[{index}][{name!r}]", value)
            contents.add_rank(model, self._ranks.rank, extra)
            return contents.contribution()

        merged = self._ranks.combine(what, contribution, merge)
        check_meshes(self._ranks, what, {path[1]: part for path, part in contents.parts.items() if path[0] == "model"})

        def each() -> tuple[SavePlan, Mapping[str, str]]:
            contents.settle(merged)
            self._planner = SavePlanner(contents)
            further_keys = {key_of(alias): key_of(path) for alias, path in contents.aliases.items()}
            return self._planner.create_local_plan(), further_keys

        def central(planned: list[tuple[SavePlan, Mapping[str, str]]]) -> Sequence[tuple[str, str, int, SavePlan]]:
            check_parts([plan for plan, _ in planned])
            plans, self._metadata = self._planner.create_global_plan([plan for plan, _ in planned])
            self._aliases = {alias: of for _, aliases in planned for alias, of in aliases.items()}
            by_parameter = contents.settings_by_parameter()
            self._aliases |= {key_of(alias): key_of(path) for alias, path in by_parameter.items()}
            self._metadata.planner_data |= {key_of(alias): alias for alias in by_parameter}
            step = max(candidates(self._path), default=-1) + 1 if self._requested_step is None else self._requested_step
            self._partial_checkpoint = directory = PartialCheckpoint(self._path, step)
            plans = FileSystemWriter(directory.partial).prepare_global_plan(plans)
            return [(directory.final.name, directory.partial.name, step, plan) for plan in plans]

        with self._abandon_on_failure():
            reply = self._ranks.exchange(what, each, central)
        final, partial, self.step, self._plan = reply
        self.final, self._partial = self._path / final, self._path / partial

    def stage(self) -> None:
        with self._abandon_on_failure():
            self._ranks.agree(f"saving {self.final}", lambda: self._planner.stage(self._plan))

    def write(self) -> None:
        """Write this rank's files, then commit the checkpoint on rank 0."""
        writer: ChecksummingWriter | None = None
        opened = ExitStack()

        def each() -> Writes:
            nonlocal writer
            writer = ChecksummingWriter(opened.enter_context(closing(Directory(self._partial))))
            writer.set_up_storage_writer(self._ranks.rank == 0)
            return writer.write(self._plan, self._planner)

        def finish(written: list[Writes]) -> None:
            assert self._partial_checkpoint is not None
            assert self._metadata is not None
            assert writer is not None
            writer.complete(self._metadata, written, self._aliases, self.step, self._ranks.size)
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
