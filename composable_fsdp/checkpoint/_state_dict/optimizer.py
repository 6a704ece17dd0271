"""State dicts of optimizers, keyed by parameter names.

A state tensor with its parameter's shape is a DTensor that is sharded like the parameter. Everything else must be the
same on every rank. Only the local form has plain tensors that are this rank's shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from composable_fsdp._core.extents import like, plain_name, shardings_of, states_below
from composable_fsdp._core.mesh import ParameterSharding, as_dtensor
from composable_fsdp._core.params import find_replaced, local_part
from composable_fsdp.checkpoint._coordination import Mismatch
from composable_fsdp.checkpoint._state_dict.model import (
    SHARDED,
    Form,
    Local,
    OwnerRanks,
    StateDictLoader,
    comes_from_rank0,
    compare,
    digest,
    shard_for,
    streams_from_rank0,
    to_form,
)
from composable_fsdp.checkpoint._state_dict.tensors import (
    checksum,
    on_meta,
    parameter_names,
    prepare_for_access,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.local_optimizer import ELEMENTWISE


@dataclass(frozen=True, eq=False)
class OptimizerParam:
    """A parameter of an optimizer, its first name in the model, and its sharding by ``fully_shard``, if any."""

    name: str
    parameter: torch.Tensor
    sharding: ParameterSharding | None


class OptimizerParams:
    """The parameters of an optimizer. The model must be prepared for access.

    Attributes:
        groups: the parameters of each group.
        members: all parameters by name, in the order in which the optimizer numbers them.

    Raises:
        CheckpointError: some are not parameters of ``model``, or no longer are. The text says which, and what to do.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        shardings, names = shardings_of(states_below(model)), parameter_names(model)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        unmanaged = [parameter for group in groups for parameter in group if id(parameter) not in names]
        taken = [found.description for parameter in unmanaged if (found := find_replaced(parameter)) is not None]
        if taken:
            raise CheckpointError(
                f"this {type(optimizer).__name__} was made before fully_shard, and holds what these parameters were "
                f"then: {taken}. Make the optimizer after fully_shard."
            )
        if unmanaged:
            shapes = [tuple(parameter.shape) for parameter in unmanaged]
            raise CheckpointError(
                f"this {type(optimizer).__name__} holds parameters that are not the model's, of shapes {shapes}. Pass "
                "the model whose parameters() it was made of."
            )
        self.groups = [[OptimizerParam(names[id(p)], p, shardings.get(id(p))) for p in group] for group in groups]
        self.members = {member.name: member for group in self.groups for member in group}

    def state_of(self, member: OptimizerParam) -> Mapping[str, Any]:
        found = self._optimizer.state.get(member.parameter, {})
        return found if isinstance(found, Mapping) else {}

    def match_groups(self, saved: Sequence[Mapping[str, Any]], mismatch: Mismatch) -> list[Mapping[str, Any] | None]:
        """Return the saved group of each of the optimizer's groups, found by its parameters, if there is one.

        Groups of the same parameters, such as those that have none so far, are matched in order.
        """
        by_members: dict[frozenset[str], list[Mapping[str, Any]]] = {}
        for group in saved:
            by_members.setdefault(frozenset(map(plain_name, group["params"])), []).append(group)
        wanted = [[member.name for member in group] for group in self.groups]
        found = [same.pop(0) if (same := by_members.get(frozenset(names))) else None for names in wanted]
        left = [sorted(members) for members, groups in by_members.items() for _ in groups]
        for names in left:
            mismatch.unexpected[f"param_group of {_first(names) or 'no parameters'}"] = f"members: {len(names)}"
        others = iter(left)
        for index, (names, group) in enumerate(zip(wanted, found, strict=True)):
            if group is not None:
                mismatch.others += lacking(self._optimizer, index, group)
                continue
            there = next(others, None)
            text = f"no saved param_group has the parameters of group {index}: {_first(names)}"
            if there is not None:
                missing, unexpected = [n for n in names if n not in there], [n for n in there if n not in names]
                text += f" (missing [{_first(missing, 20)}], unexpected [{_first(unexpected, 20)}])"
            mismatch.others.append(text)
        return found

    def load(
        self,
        saved: Sequence[Mapping[str, Any] | None],
        state: Mapping[str, Mapping[str, Any]],
        others: Mapping[str, Any],
    ) -> None:
        """Call ``optimizer.load_state_dict`` with the ``saved`` settings of each group and ``state`` by names."""
        numbers = {name: number for number, name in enumerate(self.members)}
        groups = [
            restored(group, settings or {}, [numbers[member.name] for member in members])
            for group, settings, members in zip(self._optimizer.param_groups, saved, self.groups, strict=True)
        ]
        by_number = {numbers[name]: entry for name, entry in state.items()}
        self._optimizer.load_state_dict({**others, "state": by_number, "param_groups": groups})


def _first(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


# -- the settings of a group


def lacking(optimizer: Optimizer, index: int, saved: Mapping[str, Any]) -> list[str]:
    """Return an error text if ``saved`` lacks settings that the optimizer has defaults for: schedulers add others."""
    absent = [key for key in optimizer.param_groups[index] if key in optimizer.defaults and key not in saved]
    return [f"param_group {index} has settings that the saved one lacks: {', '.join(absent)}"] if absent else []


def restored(group: Mapping[str, Any], saved: Mapping[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """Return ``group`` with the settings of ``saved``, as ``optimizer.load_state_dict`` takes it, on its devices."""
    settings = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    for key, value in settings.items():
        if isinstance(value, torch.Tensor) and isinstance(own := group.get(key), torch.Tensor):
            settings[key] = value.to(own.device)
    return {**group, **settings, "params": list(numbers)}


# -- plain tensors beside DTensors


def is_plain(value: object, member: OptimizerParam) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a plain tensor, and no scalar, while its parameter is a DTensor."""
    is_candidate = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    return is_candidate and isinstance(member.parameter, DTensor)


def check_replicated(checksums: Mapping[int, Mapping[str, int]]) -> None:
    """Raise unless the plain tensors are equal on all ranks, which have ``checksums`` of them by key."""
    first: dict[str, tuple[int, int]] = {}
    for rank, on_rank in checksums.items():
        for key, found in on_rank.items():
            first_rank, expected = first.setdefault(key, (rank, found))
            if found != expected:
                raise CheckpointError(
                    f"{key} is a plain tensor with other values on rank {rank} than on rank {first_rank}, but only one "
                    "is saved. Have the optimizer keep a DTensor."
                )


def replicated(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as a replicated DTensor if ``parameter`` is a DTensor: operations need both to be one."""
    if not value.ndim or not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    return as_dtensor(value, mesh, [Replicate()] * mesh.ndim, tuple(value.shape))


# -- save


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer, form: Form = SHARDED) -> dict[str, Any]:
    """Return the optimizer's state and settings, keyed by the model's parameter names.

    Parameters without state are absent from ``"state"``. Tensors that are sharded like a parameter are in ``form``.
    Others, such as step counts, are unchanged. All ranks must call it together.

    Args:
        model: a module, sharded or not.
        optimizer: an optimizer of any class, over parameters of ``model``.
        form: as for :func:`~composable_fsdp.checkpoint.state_dict`. With ``rank0_only`` other ranks get an empty dict.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}``

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's, ranks have state of different ones, or
            state of a sharded parameter is a plain tensor that differs between ranks. The local form takes that.
    """
    prepare_for_access(model)
    params = OptimizerParams(model, optimizer)
    members = list(params.members.values())
    tensors = ((member.parameter, member.sharding) for member in members)
    owners = OwnerRanks.of(tensors, only_sources=comes_from_rank0(form))
    packed = optimizer.state_dict()
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    entries = {m.name: packed["state"][i] for i, m in zip(ids, members, strict=True) if i in packed["state"]}
    _check_alike(members, entries, owners, form)
    state: dict[Any, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for member in members:
            receives = owners.provides(member.parameter)
            for key, value in entries.get(member.name, {}).items():
                name = f"the state {key} of {member.name}"
                found = to_form(name, value, member.sharding, form) if isinstance(value, torch.Tensor) else value
                if receives:
                    state.setdefault(member.name, {})[key] = found
                del found
    if not owners.provides():
        return {"state": state} if state else {}
    state |= {key: value for key, value in packed["state"].items() if key not in set(ids)}
    named = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [member.name for member in of_group]}
        for group, of_group in zip(packed["param_groups"], params.groups, strict=True)
    ]
    return {**packed, "state": state, "param_groups": named}


def _check_alike(
    members: Sequence[OptimizerParam], entries: Mapping[str, Mapping[str, Any]], owners: OwnerRanks, form: Form
) -> None:
    """Raise if ranks have state of different parameters, whose collectives would hang, or plain tensors that differ."""
    items = [(m, key, value) for m in members for key, value in entries.get(m.name, {}).items()]
    keys = [f"{member.name!r}, {key!r}" for member, key, _ in items]
    plain = {} if isinstance(form, Local) else {f"{m.name}.{k}": checksum(v) for m, k, v in items if is_plain(v, m)}
    found = owners.exchange((digest(keys), plain))
    if len({which for which, _ in found.values()}) > 1:
        all_keys = owners.exchange(keys).items()
        some = {rank: [k for k in has if any(k not in other for _, other in all_keys)] for rank, has in all_keys}
        raise CheckpointError(f"ranks have different state, by rank: {some}. Have all of them make the same steps.")
    check_replicated({rank: checksums for rank, (_, checksums) in found.items()})


# -- load


def load_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    form: Form | None = None,
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load what :func:`optimizer_state_dict` returned, from the same or other ranks, meshes or forms.

    All ranks must call it together, and agree on errors before anything is loaded. A fresh optimizer needs no step
    first. Parameters and groups are matched by names, in any order, and the groups' hyperparameters are restored.
    Existing state is filled in place. New state is allocated, as DTensors where the parameter is one.
    ``optimizer.load_state_dict`` runs last, with its hooks and casts.

    Args:
        model: a module, sharded or not.
        optimizer: an optimizer of parameters of ``model``, with the same parameters in each group as when saved.
        state: the state by names, as ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` returns it of
            an unsharded model too.
        form: the form of the values. By default a DTensor is sharded and a plain tensor full; :class:`Local` must be
            passed.
        broadcast_from_rank0: only rank 0 has a (full) state dict, as with ``Full(rank0_only=True)``, and broadcasts it
            tensor by tensor. What other ranks pass is ignored.

    Raises:
        CheckpointError: groups, parameters or shapes differ. The text has a line for each and is the same on every
            rank.
        ConfigurationError: ``broadcast_from_rank0`` with a form that is not full.
    """
    _Load(model, optimizer, state, form, streams_from_rank0(form, broadcast_from_rank0)).carry_out()


class _Load:
    """One call of :func:`load_optimizer_state_dict`: the constructor finds all differences on all ranks."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, state: Any, form: Form | None, streams: bool) -> None:
        prepare_for_access(model)
        self._optimizer = optimizer
        self._params = OptimizerParams(model, optimizer)
        self._members = self._params.members
        tensors = ((m.parameter, m.sharding) for m in self._members.values())
        self._loader = StateDictLoader(OwnerRanks.of(tensors, only_sources=streams), form)
        self._form = self._loader.form
        self._match(state)
        self._loader.agree(f"the state dict does not fit {type(optimizer).__name__}")

    def carry_out(self) -> None:
        state: dict[str, dict[str, Any]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, member in self._members.items():
                entry = self._loader.report_of(member.parameter).values.get(name)
                if entry is not None:
                    state[name] = {key: self._loaded_value(member, key, value) for key, value in entry.items()}
        groups, others = self._loader.report_of().settings
        self._params.load(groups, state, others)

    def _match(self, state: Any) -> None:
        loader, owners, report = self._loader, self._loader.owners, self._loader.report
        others = report.mismatch.others
        others += on_meta((name, member.parameter) for name, member in self._members.items())
        mine = {name for name, member in self._members.items() if owners.provides(member.parameter)}
        if not mine and not owners.provides():
            return
        if not _is_state(state) or (owners.provides() and "param_groups" not in state):
            others.append("a state dict of an optimizer has 'state' and 'param_groups'; this one has not")
            return
        if any(isinstance(name, int) for name in state["state"]):
            others.append("parameters have numbers for names: pass what get_optimizer_state_dict of torch returns")
            return
        entries = {plain_name(str(name)): dict(entry) for name, entry in state["state"].items()}
        if owners.provides():
            saved = [{**g, "params": [plain_name(str(name)) for name in g["params"]]} for g in state["param_groups"]]
            groups = self._params.match_groups(saved, report.mismatch)
            if len(saved) != len(groups):
                others.append(f"{len(saved)} parameter groups, expected {len(groups)}")
            if owners.only_sources:
                groups = [group and {key: on_host(value) for key, value in group.items()} for group in groups]
            report.settings = groups, {k: v for k, v in state.items() if k not in ("state", "param_groups")}
            report.mismatch.unexpected |= {name: "state" for name in entries if name not in self._members}
        loader.given = {name: entries[name] for name in self._members if name in entries and name in mine}
        for name, entry in loader.given.items():
            for key, value in entry.items():
                self._compare(self._members[name], key, value, report.mismatch)
            report.values[name] = {k: _described(v) for k, v in entry.items()} if owners.only_sources else entry
        report.digest = digest([(name, list(entry)) for name, entry in loader.given.items()])

    def _compare(self, member: OptimizerParam, key: str, value: object, mismatch: Mismatch) -> None:
        """Compare what is known of the target with ``value``: some optimizers have state of any shape."""
        if not isinstance(value, torch.Tensor):
            return
        parameter, existing = member.parameter, self._existing(member, key)
        target = existing if existing is not None else value
        if existing is not None and existing.ndim and existing.shape == local_part(parameter).shape:
            target = parameter
        if existing is None and value.ndim and type(self._optimizer) in ELEMENTWISE:
            target = parameter
        compare(f"{member.name}.{key}", target, value, self._form, mismatch)

    def _existing(self, member: OptimizerParam, key: str) -> torch.Tensor | None:
        value = self._params.state_of(member).get(key)
        return value if isinstance(value, torch.Tensor) else None

    def _loaded_value(self, member: OptimizerParam, key: str, value: Any) -> Any:
        """Return the value to give to the optimizer, after a broadcast if only one rank has it."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            given = self._loader.given.get(member.name, {}).get(key)
            value = self._loader.owners.send(member.parameter, given, value.dtype, value.shape)
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if not value.ndim and not isinstance(value, DTensor):
            return value.clone()
        parameter, existing = member.parameter, self._existing(member, key)
        is_local = isinstance(self._form, Local) and not isinstance(value, DTensor)
        is_sharded = value.shape == (local_part(parameter) if is_local else parameter).shape
        fits = existing is not None and existing.shape == value.shape
        target = parameter if is_sharded else existing if fits else value
        shard = shard_for(cast(torch.Tensor, target), member.sharding if is_sharded else None, value, self._form)
        if existing is not None and local_part(existing).shape == shard.shape:
            local_part(existing).copy_(shard)
            return existing
        own = _copied(shard, local_part(parameter).device)
        if is_sharded or isinstance(value, DTensor):
            return like(parameter if is_sharded else value, own)
        return replicated(own, parameter)


def _is_state(state: Any) -> bool:
    entries = state.get("state") if isinstance(state, Mapping) else None
    return isinstance(entries, Mapping) and all(isinstance(entry, Mapping) for entry in entries.values())


def _copied(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(shard, device=device, memory_format=torch.contiguous_format).copy_(shard)


def on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> Any:
    """Return what is sent of a value with the report: of a tensor that is not a scalar, only shape and dtype."""
    is_sent_later = isinstance(value, torch.Tensor) and value.ndim > 0
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_sent_later else on_host(value)
