"""State dicts of a model: their forms, and the load of a state dict that models and optimizers share.

torch's ``torch.distributed.checkpoint.state_dict`` does not serve: placements cannot describe every uneven shard of a
tensor-parallel one; a rank that finds an error there does not tell the others, which load; and it copies what fits
before it raises. Its functions for optimizers make a step if there is no state.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._pytree import tree_map_only

from composable_fsdp._consistency.process_groups import broadcast_, fill_, gather_objects
from composable_fsdp._core.full_mesh import default_mesh
from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import alias_of, local_part
from composable_fsdp._core.state import states_below
from composable_fsdp._extents import assemble_full, extent_of, gather, has_own_memory, like, plain_name
from composable_fsdp.checkpoint._coordination import (
    Failure,
    Mismatch,
    RankGroup,
    differ,
    dtype_name,
    refuse,
    said,
    tensor_text,
)
from composable_fsdp.checkpoint._state_dict.pickled_shards import is_opaque, values_of
from composable_fsdp.checkpoint._state_dict.tensors import (
    Entry,
    LocalShard,
    checksum,
    differences,
    entries_of,
    on_meta,
    prepare_for_access,
)
from composable_fsdp.errors import ArgumentTypeError, CheckpointError, ConfigurationError

T = TypeVar("T")


# -- forms: full, sharded and local


class _Options:
    """Base that rejects unknown options, and names the form that has them."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        known = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for option in sorted(options.keys() - known):
            owners = [form.__name__ for form in (Full, Sharded, Local) if option in form.__dataclass_fields__]
            whose = f"an option of {' and '.join(owners)}" if owners else "no option of any form"
            raise ConfigurationError(f"{option} is {whose}, not of {cls.__name__}, which has {sorted(known)}.")
        return super().__new__(cls)


@dataclass(frozen=True)
class Full(_Options):
    """Full plain tensors, with the names and shapes of the unsharded model.

    Args:
        rank0_only: only rank 0 gets values, or provides them when loading. Other ranks get, and pass, an empty dict.
        offload_to_cpu: return tensors in CPU memory. The accelerator then holds one full tensor at a time.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Sharded(_Options):
    """``DTensor``s of which each rank has its shard, as ``torch.distributed.checkpoint`` takes them.

    Args:
        offload_to_cpu: return local tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Local(_Options):
    """This rank's shards as plain tensors, empty ones included. They can be loaded with the same sharding only.

    Args:
        offload_to_cpu: return tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


Form = Full | Sharded | Local


def check_form(form: object) -> None:
    """Raise ``ArgumentTypeError`` if ``form`` is none, such as its name or its class."""
    if not isinstance(form, _Options):
        raise ArgumentTypeError(f"the form of a state dict is Full(), Sharded() or Local(), not {form!r}.")


# -- one tensor


def to_form(name: str, tensor: torch.Tensor, sharding: ParameterSharding | None, form: Form) -> torch.Tensor:
    """Return ``tensor`` in ``form``. For :class:`Full` this is a copy, and collective over the tensor's mesh."""
    if isinstance(form, Full):
        try:
            return assemble_full(tensor, sharding, form.offload_to_cpu)
        except Exception as error:  # the subclass's own code, which fails on all ranks
            local = local_part(tensor)
            if has_own_memory(local):
                raise
            raise CheckpointError(
                f"{name} cannot be gathered by its class {type(local).__name__} ({said(error)}). Use Sharded()."
            ) from error
    value = tensor.detach()
    if isinstance(form, Local) or not isinstance(value, DTensor):
        value = local_part(value).detach()
        return value.cpu() if form.offload_to_cpu else value
    local = local_part(value)
    return alias_of(value, local.cpu() if form.offload_to_cpu else local)


def compare(
    name: str, target: torch.Tensor, value: object, form: Form | None, mismatch: Mismatch, *, is_sent: bool = False
) -> None:
    """Add to ``mismatch`` why ``value`` cannot be loaded into ``target``. ``form`` is what the user passed.

    ``is_sent``: another rank has the values of ``value``, which is on the meta device here.
    """
    is_local = isinstance(form, Local)
    shape = tuple((local_part(target) if is_local else target).shape)
    if not isinstance(value, torch.Tensor):
        mismatch.others.append(f"{name!r} is no tensor but of type {type(value).__name__}")
    elif isinstance(value, DTensor) and isinstance(form, (Full, Local)):
        mismatch.others.append(f"{name!r} is a DTensor: pass form=Sharded() instead of {type(form).__name__}()")
    elif isinstance(target, DTensor) and not isinstance(value, DTensor) and isinstance(form, Sharded):
        mismatch.others.append(f"{name!r} is a plain tensor: pass form=Full() or Local() instead of Sharded()")
    elif value.is_meta and not is_sent:
        mismatch.others.append(f"{name!r} is on the meta device and has no values")
    elif tuple(value.shape) != shape:
        where = " as this rank's part" if is_local and isinstance(target, DTensor) else ""
        mismatch.shapes[name] = differ(tuple(value.shape), f"{shape}{where}")
    elif _kind(value.dtype) != _kind(target.dtype):
        mismatch.dtypes[name] = differ(dtype_name(value.dtype), dtype_name(target.dtype))
    elif isinstance(value, DTensor) and not any(placement.is_partial() for placement in value.placements):
        # Placements cannot describe every uneven tensor-parallel shard that was sharded again.
        as_placed = not _has_same_placements(target, value)
        wanted = extent_of(value).local_shape if as_placed else tuple(local_part(target).shape)
        if (found := tuple(local_part(value).shape)) != wanted:
            mismatch.shapes[name] = differ(f"a local part of {found}", wanted)


def shard_for(
    target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None
) -> torch.Tensor:
    """Return the values that this rank's shard of ``target`` takes from ``value``: a view of it where possible.

    Collective if ``value`` is a DTensor with other placements than ``target``: it is gathered temporarily.
    """
    if isinstance(value, DTensor):
        if _has_same_placements(target, value):
            return local_part(value)
        local = local_part(value)
        value = gather(like(value, values_of(local)) if is_opaque(local) else value)
    elif isinstance(form, Local):
        return value
    return extent_of(target, sharding).take(value)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _has_same_placements(target: Any, value: DTensor) -> bool:
    """Return whether both have the same placements on the same ranks, on any device. All ranks get the same answer."""
    if not isinstance(target, DTensor) or target.placements != value.placements:
        return False
    here, there = target.device_mesh, value.device_mesh
    return here == there or torch.equal(here.mesh, there.mesh)


# -- the ranks that load together


def digest(value: object) -> str:
    """Return a digest of the ``repr`` of ``value``, to compare it between ranks."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


@dataclass(frozen=True)
class OwnerRanks:
    """All ranks of ``mesh``, the largest mesh with a tensor of the model. ``None``: this rank only.

    ``from_rank0``: only the first rank of ``mesh``, which is rank 0 in most jobs, has values in a state dict.
    """

    mesh: DeviceMesh | None
    from_rank0: bool = False

    @staticmethod
    def of(tensors: Iterable[tuple[object, ParameterSharding | None]], *, from_rank0: bool = False) -> OwnerRanks:
        """Find the owner ranks of ``tensors``, given with their sharding by ``fully_shard``.

        With ``from_rank0``, if no tensor is a DTensor, they are the ranks of the default process group, if any.
        """
        placed = [(v.device_mesh, sharding) for v, sharding in tensors if isinstance(v, DTensor)]
        if not placed and from_rank0 and dist.is_initialized():
            return OwnerRanks(default_mesh(), from_rank0)
        return OwnerRanks(max((mesh for mesh, _ in placed), key=lambda mesh: mesh.size(), default=None), from_rank0)

    def check_first(self, tensors: Iterable[tuple[object, ParameterSharding | None]]) -> None:
        """Raise if only the first rank has values, and it has not all of ``tensors``."""
        sharded = [(v.device_mesh.size(), s.axes.num_ranks) for v, s in tensors if isinstance(v, DTensor) and s]
        most = max((num_ranks for _, num_ranks in sharded), default=0)
        largest = 0 if self.mesh is None else self.mesh.size()
        if self.from_rank0 and any(num_ranks < most and size < largest for size, num_ranks in sharded):
            raise ConfigurationError(
                "some parameters, such as experts, are on a smaller mesh and have other values on other ranks, so "
                "rank 0 has not all of them. Pass Full(), Sharded() or Local(), or call checkpoint.save."
            )

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def first(self) -> int:
        """The global rank whose values count with ``from_rank0``."""
        return 0 if self.mesh is None else int(self.mesh.mesh.flatten()[0])

    @property
    def has_values(self) -> bool:
        return not self.from_rank0 or self.rank == self.first

    def exchange(self, each: Callable[[], T]) -> dict[int, T]:
        """Call ``each`` on all ranks, and return its values by global rank. Collective; for small values.

        If it raises on some rank, or its value cannot be pickled there, all ranks raise, with the texts of those ranks.
        """
        if self.mesh is None:
            return {self.rank: each()}
        error: Exception | None = None
        try:
            data = pickle.dumps(each())
        except Exception as raised:
            error, data = raised, pickle.dumps(Failure.of(raised))
        found = {self.rank: data}
        for group in self.mesh.get_all_groups():
            found = {rank: each for part in gather_objects(found, group) for rank, each in part.items()}
        values = {rank: pickle.loads(found[rank]) for rank in sorted(found)}
        failure = Failure.among(values)
        if failure is not None:
            is_common = all(isinstance(value, Failure) and value.text == failure.text for value in values.values())
            raise error if error is not None and is_common else failure.kind(failure.text) from error
        return values

    def shared(self, state: Any) -> Any:
        """Return the ``state`` of this rank or, ``from_rank0``, that of the first one, elsewhere with tensors on meta.

        Scalars are sent as they are. Collective with ``from_rank0``.
        """
        if not self.from_rank0:
            return state
        found = self.exchange(lambda: tree_map_only(torch.Tensor, _described, state) if self.has_values else None)
        return state if self.has_values else found[self.first]

    def send(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a ``value`` of a state that is :meth:`shared`, after a broadcast as ``dtype`` if one rank has it."""
        if self.mesh is None or not self.from_rank0 or not value.ndim:
            return value
        device = self.mesh.device_type
        if self.has_values:
            full = value.detach().to(device, dtype)
        else:
            full = torch.empty_like(value, dtype=dtype, device=device)
        broadcast_([full], self.mesh)
        return full

    def send_all(self, values: Any) -> Any:
        """Return ``values``, which may contain tensors, after broadcasts to the host if one rank has them."""
        if not self.from_rank0:
            return values
        return tree_map_only(torch.Tensor, lambda value: self.send(value, value.dtype).cpu(), values)


def _described(value: torch.Tensor) -> torch.Tensor:
    """Return what is sent of a tensor with its state dict: of one that is no scalar only the shape and the dtype."""
    if not has_own_memory(local_part(value)):
        raise CheckpointError(
            f"a {type(value).__name__} of shape {tuple(value.shape)} cannot be sent. Load it on all ranks."
        )
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if value.ndim else value.detach().cpu()


def on_all_ranks(model: nn.Module, call: Callable[[], T], *, from_rank0: bool = False) -> tuple[OwnerRanks, T]:
    """Prepare ``model``, call ``call``, which reads this rank's state, and raise on all ranks if it raises on one.

    Return the owner ranks of the parameters, and what it returned. ``from_rank0`` says whether one rank provides all
    values. It must be equal on all ranks that have shards of ``model``, since they then make other collectives.
    """
    results: list[T] = []

    def each() -> bool:
        owners.check_first(tensors)
        prepare_for_access(model)
        results.append(call())
        return from_rank0

    tensors: list[tuple[object, ParameterSharding | None]]
    tensors = [(p.sharded, p.sharding) for state in states_below(model) for p in state.group.parameters]
    tensors += ((parameter, None) for parameter in model.parameters())
    owners = OwnerRanks.of(tensors, from_rank0=from_rank0)
    if len(set(owners.exchange(each).values())) > 1:
        raise ConfigurationError("only some ranks take the values of rank 0. Pass the same arguments on all ranks.")
    return owners, results[0]


def agree(
    owners: OwnerRanks, what: str, match: Callable[[Mismatch], str], *, strict: bool = True
) -> dict[int, Mismatch]:
    """Call ``match`` on all ranks, which notes differences. Raise the same error on all of them if any has some.

    ``match`` returns a digest that must be equal on all ranks. Without ``strict``, missing names are differences only
    if not all ranks miss them, and unexpected ones never. Return the differences that are none, by rank.
    """

    def each() -> tuple[Mismatch, str]:
        return (mismatch := Mismatch()), match(mismatch)

    found = owners.exchange(each)
    mismatches = refused = {rank: mismatch for rank, (mismatch, _) in found.items()}
    if not strict:
        common = set.intersection(*(set(mismatch.missing) for mismatch in mismatches.values()))
        uneven = {rank: [n for n in each.missing if n not in common] for rank, each in mismatches.items()}
        reason = "other ranks have it"
        refused = {rank: replace(m, missing=dict.fromkeys(uneven[rank], reason)) for rank, m in mismatches.items()}
    refuse(what, refused, ignore=() if strict else ("unexpected",))
    if len({digest for _, digest in found.values()}) > 1:
        refuse(what, {0: Mismatch(others=["ranks were given state of different parameters"])})
    return mismatches


def check_meshes(ranks: RankGroup, what: str, parts: Mapping[str, LocalShard]) -> None:
    """Raise on all ``ranks`` if parameters of one name are on several meshes, with other values on each.

    A checkpoint has one tensor of each name, so it would have the values of one mesh. Values are compared only if there
    are several meshes. A mesh of all ranks is the only one of its parameters.
    """
    meshes = {key: part.value.device_mesh for key, part in parts.items() if isinstance(part.value, DTensor)}
    ranks_of = {key: repr(mesh.mesh.tolist()) for key, mesh in meshes.items() if mesh.size() < ranks.size}
    own = {key: zlib.crc32(text.encode()) for key, text in ranks_of.items()}

    def on_several(found: list[dict[str, int]]) -> set[str]:
        first = {key: mesh for each in found for key, mesh in each.items()}
        return {key for each in found for key, mesh in each.items() if mesh != first[key]}

    def checksums() -> dict[tuple[str, Any], int]:
        return {(key, parts[key].extent.ranges): checksum(parts[key].local) for key in own if key in several}

    def compare_shards(found: list[dict[tuple[str, Any], int]]) -> None:
        for (key, _), rank, first_rank in differences(dict(enumerate(found))):
            raise CheckpointError(
                f"{key} is on several meshes, with other values on rank {rank} than on rank {first_rank}, but only one "
                "is saved. Give the parameters of each mesh, such as its experts, names of their own, or make one "
                "DTensor of them that is sharded over the axis between the meshes."
            )

    several = ranks.combine(what, lambda: own, on_several)
    if several:
        ranks.combine(what, checksums, compare_shards)


# -- save


SHARDED = Sharded()


def state_dict(model: nn.Module, form: Form = SHARDED) -> dict[str, Any]:
    """Return what the unsharded model's ``state_dict()`` has, with its names and dtypes, in ``form``.

    Tied weights are one tensor under each of their names. Extra state is as ``get_extra_state`` returned it.

    Args:
        model: a module. Tensors that are not sharded are full in every form.
        form: :class:`Sharded` and :class:`Local` alias the parameters, as ``model.state_dict()`` does. :class:`Full`
            copies everything, buffers too. It is collective: all ranks must call it together, and tensors are gathered
            one by one. With ``rank0_only`` only rank 0 gets it, or the first of the ranks that own shards of the model.

    Raises:
        CheckpointError: the full form, while parameters are on the meta device.
        ConfigurationError: ``rank0_only``, while rank 0 has not all parameters, such as experts on a smaller mesh.
    """

    def read() -> dict[str, Entry]:
        check_form(form)
        entries = entries_of(model)
        for problem in _on_meta(entries) if isinstance(form, Full) else ():
            raise CheckpointError(f"{type(model).__name__} has no full state dict: {problem}")
        return entries

    if isinstance(form, Sharded | Local):  # not collective
        prepare_for_access(model)
        owners, entries = OwnerRanks(None), read()
    else:
        owners, entries = on_all_ranks(model, read, from_rank0=comes_from_rank0(form))
    state: dict[str, Any] = OrderedDict()
    known: dict[int, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, entry in entries.items():
            if entry.is_tensor and id(entry.value) not in known:
                value = to_form(name, entry.value, entry.sharding, form)
                known[id(entry.value)] = value if owners.has_values else torch.empty(0)
                del value
            if owners.has_values:
                state[name] = known[id(entry.value)] if entry.is_tensor else entry.value
    cast(Any, state)._metadata = _versions(model)
    return state


def comes_from_rank0(form: Form | None) -> bool:
    return isinstance(form, Full) and form.rank0_only


def _versions(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return each module's state version, stored where ``nn.Module.load_state_dict`` looks for it."""
    modules = model.named_modules(remove_duplicate=False)
    return OrderedDict((plain_name(f"{name}.")[:-1], {"version": module._version}) for name, module in modules)


def _on_meta(entries: Mapping[str, Entry]) -> list[str]:
    return on_meta((name, entry.value) for name, entry in entries.items() if entry.is_tensor)


# -- load


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    form: Form | None = None,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> _IncompatibleKeys:
    """Copy the values of ``state_dict`` to the parameters and buffers of ``model``, in place.

    All ranks must call it together. They agree on errors first, so after an error nothing has been loaded. Values are
    cast to the model's dtypes. Sharded values may be on another mesh, in other placements or on another device. For
    tied weights the first name that is present counts. Prefixes of wrappers are ignored. The model's own
    ``load_state_dict`` runs last, with values that are in place, so that hooks and ``set_extra_state`` are called.

    Args:
        model: a module, sharded or not.
        state_dict: from :func:`state_dict`, or that of the unsharded model.
        form: the form of the values. By default a DTensor is sharded and a plain tensor full; :class:`Local` must be
            passed.
        strict: missing and unexpected names are an error.
        broadcast_from_rank0: only rank 0 has a full state dict, as with ``Full(rank0_only=True)``, and broadcasts it
            tensor by tensor. What other ranks pass is ignored; they hold one full tensor at a time.

    Returns:
        The missing and unexpected names, as ``nn.Module.load_state_dict`` does.

    Raises:
        CheckpointError: the state dict does not fit. The text has a line for each name that is missing, unexpected, of
            another shape or of another kind of dtype, and is the same on every rank.
    """

    from_rank0 = broadcast_from_rank0 or comes_from_rank0(form)

    def read() -> tuple[dict[str, Entry], Any]:  # mappings of other classes read files, or cannot be sent
        given: Any = state_dict
        return entries_of(model), dict(given) if isinstance(given, Mapping) else given

    owners, (entries, state) = on_all_ranks(model, read, from_rank0=from_rank0)
    state, versions = owners.shared((state, getattr(state_dict, "_metadata", None)))
    form = Full() if owners.from_rank0 else form
    given = {plain_name(str(name)): value for name, value in state.items()} if isinstance(state, Mapping) else {}

    def match(mismatch: Mismatch) -> str:
        mismatch.others += _on_meta(entries)
        if not isinstance(state, Mapping):
            mismatch.others.append(f"a state dict maps names to values, but a {type(state).__name__} was given")
            return ""
        for name, entry in entries.items():
            if name not in given:
                mismatch.missing[name] = _text_of(entry.value)
            elif entry.is_tensor:
                compare(name, entry.value, given[name], form, mismatch, is_sent=not owners.has_values)
        unexpected = {str(name): value for name, value in state.items() if plain_name(str(name)) not in entries}
        mismatch.unexpected = {name: _text_of(value) for name, value in unexpected.items()}
        return ""

    mismatches = agree(owners, f"the state dict does not fit {type(model).__name__}", match, strict=strict)
    values: dict[str, Any] = {}
    filled: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        for name, entry in entries.items():
            target = entry.value
            if name in given:
                values[entry.key] = target if entry.is_tensor else owners.send_all(given[name])
            if name in given and entry.is_tensor and id(target) not in filled:
                filled.add(id(target))
                value = owners.send(given[name], target.dtype).detach()
                fill_(local_part(target), shard_for(target, entry.sharding, value, form))
                del value  # before the next one is received
    missing = _load_through_modules(model, values, versions)
    unexpected = dict.fromkeys(name for mismatch in mismatches.values() for name in mismatch.unexpected)
    return _IncompatibleKeys([plain_name(name) for name in missing], list(unexpected))


def _text_of(value: object) -> str:
    return tensor_text(value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _load_through_modules(model: nn.Module, values: Mapping[str, Any], versions: Mapping[str, Any] | None) -> list[str]:
    """Call ``nn.Module.load_state_dict``, and return the missing names that hooks of modules left."""
    state = OrderedDict(values)
    if versions is not None:
        by_name = {plain_name(f"{name}."): version for name, version in versions.items()}
        paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
        known = {path: by_name[n] for path in paths if (n := plain_name(f"{path}.")) in by_name}
        cast(Any, state)._metadata = OrderedDict(known)
    # The method of the class: state_dict_form may have replaced the instance's.
    missing: list[str] = type(model).load_state_dict(model, state, strict=False).missing_keys
    return missing


# -- the model's own methods


@contextmanager
def state_dict_form(model: nn.Module, form: Form) -> Iterator[None]:
    """Make ``model.state_dict()`` and ``model.load_state_dict(...)`` use ``form`` inside the block.

    This affects ``model`` itself, also if it is an activation-checkpoint wrapper of the sharded module, and its share
    of the ``state_dict()`` of a module that contains it. On exit the previous methods are restored; blocks may be
    nested.

    Args:
        model: as for :func:`state_dict`.
        form: as for :func:`state_dict` and :func:`load_state_dict`.
    """
    check_form(form)

    def show(*args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if args or keep_vars:  # keep_vars asks for the parameters themselves, which have one form
            return type(model).state_dict(model, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        state = state_dict(model, form)
        if destination is None and not prefix:
            return state
        destination = OrderedDict() if destination is None else destination
        destination.update({prefix + name: value for name, value in state.items()})
        return destination

    def load(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        if assign:
            raise ConfigurationError(
                "load_state_dict cannot assign=True inside state_dict_form, which copies to the parameters."
            )
        return load_state_dict(model, state_dict, form, strict=strict)

    inside = {"state_dict": show, "load_state_dict": load}
    attributes = vars(model)
    before = {name: attributes[name] for name in inside if name in attributes}
    attributes.update(inside)
    try:
        yield
    finally:
        for name in inside:
            attributes.pop(name, None)
        attributes.update(before)
