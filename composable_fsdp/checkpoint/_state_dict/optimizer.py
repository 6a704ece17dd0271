"""State dicts of optimizers, keyed by parameter names.

The state of a parameter is a tree (``state_tree.py``). Its tensors are DTensors, or plain and then the same on every
rank. Only the local form has plain tensors that are this rank's shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import find_replaced, is_wrapper, local_part
from composable_fsdp._core.state import states_below
from composable_fsdp._extents import like, plain_name, shardings_of
from composable_fsdp.checkpoint._coordination import Mismatch
from composable_fsdp.checkpoint._state_dict.model import (
    SHARDED,
    Form,
    Full,
    Local,
    OwnerRanks,
    agree,
    check_form,
    comes_from_rank0,
    compare,
    digest,
    on_all_ranks,
    shard_for,
    to_form,
)
from composable_fsdp.checkpoint._state_dict.pickled_shards import (
    Piece,
    fill_by_class,
    is_opaque,
    quantized_text,
    state_of_step,
    values_of,
    with_inner,
)
from composable_fsdp.checkpoint._state_dict.state_tree import (
    AS_PARAMETER,
    OBJECT,
    OPAQUE,
    PLAIN,
    UNKNOWN,
    TreePath,
    at,
    kind_of,
    leaves,
    mapped,
    new_state,
)
from composable_fsdp.checkpoint._state_dict.tensors import (
    LocalShard,
    checksum,
    differences,
    on_meta,
    parameter_names,
)
from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim.local_optimizer import ELEMENTWISE

logger = logging.getLogger(__name__)


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
            why = f"was made before fully_shard, and holds what these parameters were then: {taken}. Make it afterwards"
        else:
            shapes = [tuple(parameter.shape) for parameter in unmanaged]
            why = f"holds parameters that are not the model's, of shapes {shapes}. Pass the model that it was made of"
        if unmanaged:
            raise CheckpointError(f"this {type(optimizer).__name__} {why}.")
        self.groups = [[OptimizerParam(names[id(p)], p, shardings.get(id(p))) for p in group] for group in groups]
        self.members = {member.name: member for group in self.groups for member in group}
        self._made: tuple[object, dict[Any, Any]] = None, {}

    def packed(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Call ``optimizer.state_dict()``, with its hooks, and return the result with names in place of numbers.

        That is a tree for each parameter that has any state, and the settings of each group, with names in ``params``.

        Raises:
            CheckpointError: it has another form, or state that is of no parameter of the optimizer.
        """
        kind, state = type(self._optimizer).__name__, self._state()
        ids = {id(member.parameter) for member in self.members.values()}
        strays = [key for key in state if isinstance(key, torch.Tensor) and id(key) not in ids]
        for key in strays:
            if state[key]:
                raise CheckpointError(
                    f"this {kind} has state for a parameter of shape {tuple(key.shape)} of no group: delete it."
                )
            del state[key]  # reading a defaultdict made it
        found = self._optimizer.state_dict()
        numbers = [number for group in found.get("param_groups", ()) for number in group["params"]]
        if not isinstance(found.get("state"), Mapping) or len(numbers) != len(self.members):
            raise CheckpointError(
                f"the state_dict() of this {kind} has {sorted(map(str, found))}, not the 'state' and 'param_groups' of "
                "its parameters. Pass the optimizer that it wraps, and what it keeps itself in extra."
            )
        others = [key for key in state if not isinstance(key, torch.Tensor)]
        others += [key for key in found["state"] if key not in numbers and key not in others]
        if others := [*others, *(found.keys() - {"state", "param_groups"})]:
            raise CheckpointError(
                f"this {kind} has state that is of no parameter, under {', '.join(sorted(map(repr, others)))}. Save "
                "it in extra: remove it from the optimizer, or pass the optimizer that this one wraps."
            )
        names = dict(zip(numbers, self.members, strict=True))
        groups = [
            {**{key: v for key, v in group.items() if key != "param_names"}, "params": [m.name for m in members]}
            for group, members in zip(found["param_groups"], self.groups, strict=True)
        ]
        trees = {name: found["state"][number] for number, name in names.items() if number in found["state"]}
        return {name: tree for name, tree in trees.items() if not isinstance(tree, Mapping) or tree}, groups

    def _state(self) -> Any:
        return getattr(self._optimizer, "state", {})

    def made(self, member: OptimizerParam, path: TreePath, shape: Sequence[int]) -> torch.Tensor:
        """Return what the first step of the optimizer makes at ``path`` of the state of a ``member`` of ``shape``.

        Raises:
            CheckpointError: it makes no tensor there, or cannot step a copy of itself.
        """
        key = member.name, tuple(shape)
        if key != self._made[0]:
            self._made = key, state_of_step(self._optimizer, member.parameter, shape)
        found = at(self._made[1], path)
        if not isinstance(found, torch.Tensor):
            raise CheckpointError("this optimizer makes no such state")
        return found

    def tree(self, member: OptimizerParam) -> Any:
        """Return the state of ``member``."""
        return self._state().get(member.parameter, {})

    def existing(self, member: OptimizerParam, path: TreePath) -> torch.Tensor | None:
        """Return the tensor that the optimizer has at ``path`` of the state of ``member``, or ``None``."""
        found = at(self.tree(member), path)
        return found if isinstance(found, torch.Tensor) else None

    def match_groups(self, saved: Sequence[Mapping[str, Any]], mismatch: Mismatch) -> list[Mapping[str, Any] | None]:
        """Return the saved group of each of the optimizer's groups, found by its parameters, if there is one.

        Groups of the same parameters, such as those that have none so far, are matched in order.
        """
        by_members: dict[frozenset[str], list[Mapping[str, Any]]] = {}
        for each in saved:
            by_members.setdefault(frozenset(map(plain_name, each["params"])), []).append(each)
        wanted = [[member.name for member in group] for group in self.groups]
        found = [same.pop(0) if (same := by_members.get(frozenset(names))) else None for names in wanted]
        left = [sorted(members) for members, groups in by_members.items() for _ in groups]
        for names in left:
            mismatch.unexpected[f"param_group of {_first(names) or 'no parameters'}"] = f"members: {len(names)}"
        for index, (names, group) in enumerate(zip(wanted, found, strict=True)):
            if group is not None:
                mismatch.others += lacking(self._optimizer, index, group)
            else:
                mismatch.others.append(f"no saved param_group has the parameters of group {index}: {_first(names)}")
        return found

    def load(self, saved: Sequence[Mapping[str, Any] | None], state: Mapping[str, Any]) -> None:
        """Call ``optimizer.load_state_dict`` with the ``saved`` settings of each group, and ``state`` by name.

        torch's method casts all state to its parameter's dtype. That is right for torch's own classes only, except for
        scalars: others keep their dtypes, such as fp32 state of bf16 parameters.
        """
        numbers = {name: number for number, name in enumerate(self.members)}
        groups = [
            restored(group, settings or {}, [numbers[member.name] for member in members])
            for group, settings, members in zip(self._optimizer.param_groups, saved, self.groups, strict=True)
        ]
        given = {numbers[name]: mapped(_without_iterables, tree) for name, tree in state.items()}
        self._optimizer.load_state_dict({"state": given, "param_groups": groups})
        loaded = self._state()
        for name, tree in state.items():
            parameter = self.members[name].parameter
            if parameter in loaded:  # a wrapper may keep the state elsewhere
                found = loaded[parameter]
                new = mapped(partial(_loaded_leaf, found, type(self._optimizer)), tree)
                if isinstance(new, dict) and isinstance(found, dict):
                    new |= {key: value for key, value in found.items() if key not in new}  # that hooks have added
                loaded[parameter] = new


def _without_iterables(_: TreePath, value: Any) -> Any:
    """Return ``value``, or ``None`` for what ``Optimizer.load_state_dict`` would make another thing of, as strings."""
    return None if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else value


def _loaded_leaf(loaded: Any, kind: type[Optimizer], path: TreePath, value: Any) -> Any:
    """Return the leaf of ``loaded`` at ``path``, or ``value`` if it was left out, or cast by what does not know it."""
    found = at(loaded, path)
    if not isinstance(value, torch.Tensor) or not isinstance(found, torch.Tensor) or found.dtype == value.dtype:
        return value if found is None else found
    is_of_torch = value.ndim and kind.__module__.startswith("torch.optim.")
    return found if is_of_torch or kind.load_state_dict is not Optimizer.load_state_dict else value.to(found.device)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


# -- the settings of a group


def lacking(optimizer: Optimizer, index: int, saved: Mapping[str, Any]) -> list[str]:
    """Return an error text if ``saved`` lacks settings that the optimizer has defaults for: schedulers add others."""
    defaults = getattr(optimizer, "defaults", {})  # not every wrapper of an optimizer has them
    absent = [key for key in optimizer.param_groups[index] if key in defaults and key not in saved]
    return [f"param_group {index} has settings that the saved one lacks: {', '.join(absent)}"] if absent else []


def restored(group: Mapping[str, Any], saved: Mapping[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """Return ``group`` with the settings of ``saved``, as ``optimizer.load_state_dict`` takes it, on its devices."""
    settings = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    for key, value in settings.items():
        if isinstance(value, torch.Tensor) and isinstance(own := group.get(key), torch.Tensor):
            settings[key] = value.to(own.device)
    return {**group, **settings, "params": list(numbers)}


# -- plain tensors beside DTensors, numbers and strings

_SHOWN_ITEMS, _SHOWN_LETTERS = 16, 60
"""The most items of a tensor that is compared, and letters of a value that are shown."""


def plain_text(value: object) -> str:
    """Return a text of the numbers, strings and small tensors in ``value``, by which it is compared between ranks.

    A larger plain tensor has its checksum there.
    """
    if isinstance(value, torch.Tensor) and value.ndim:
        return f"a tensor with the checksum {checksum(value):08x}"
    found: list[object] = []
    for leaf in tree_leaves(value):
        if type(leaf) is torch.Tensor and leaf.numel() <= _SHOWN_ITEMS:
            leaf = leaf.tolist()
        is_plain = leaf is None or isinstance(leaf, (Number, str, bytes, list))
        found.append(leaf if is_plain else type(leaf))  # objects of other classes are not compared
    text = repr(found[0] if len(found) == 1 else found)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}… ({digest(text)[:8]})"


def check_values(values: Mapping[int, Mapping[str, str]]) -> None:
    """Raise unless values are equal on all ranks, which have these :func:`plain_text` of them by key."""
    for key, rank, first_rank in differences(values):
        raise CheckpointError(
            f"{key} is {values[rank][key]} on rank {rank} and {values[first_rank][key]} on rank {first_rank}, but only "
            "one is saved. Keep it equal on all ranks, or a DTensor, or save what belongs to a rank in extra."
        )


# -- save


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer, form: Form = SHARDED) -> dict[str, Any]:
    """Return the optimizer's state and settings, keyed by the model's parameter names.

    Parameters without state are absent from ``"state"``. Tensors that are sharded like a parameter are in ``form``; the
    full form of 8-bit state and of other classes that cannot be cut has the dequantized values in fp32. Others, such as
    step counts, are unchanged. All ranks must call it together.

    Args:
        model: a module, sharded or not.
        optimizer: an optimizer of any class, over parameters of ``model``.
        form: as for :func:`~composable_fsdp.checkpoint.state_dict`. With ``rank0_only`` other ranks get an empty dict.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}``. State of an optimizer that keeps
        tensors in other placements than its parameters has ``"kinds"`` too, which say what each of them is.

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's, ranks have state of different ones,
            state of a sharded parameter is a plain tensor that differs between ranks, which the local form takes, or
            the form has no place for a tensor.
    """

    def read() -> tuple[OptimizerParams, dict[str, Any], list[dict[str, Any]], dict[str, dict[TreePath, str]]]:
        check_form(form)
        params = OptimizerParams(model, optimizer)
        trees, groups = params.packed()
        kinds: dict[str, dict[TreePath, str]] = {}
        for name, tree in trees.items():
            parameter = params.members[name].parameter
            kinds[name] = {path: kind_of(leaf, parameter, _title(name, path)) for path, leaf in leaves(tree)}
            cut = [path for path, kind in kinds[name].items() if isinstance(form, Local) and "S" in kind]
            if cut:
                raise CheckpointError(
                    f"{_title(name, cut[0])} is a DTensor in other placements than its parameter, for which the local "
                    "form has no place. Use Sharded() or Full()."
                )
        return params, trees, groups, kinds

    owners, (params, trees, groups, kinds) = on_all_ranks(model, read, from_rank0=comes_from_rank0(form))
    opaque = _check_alike(trees, kinds, owners, form)
    state: dict[Any, Any] = {}
    recorded: dict[str, dict[TreePath, str]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, entry in trees.items():
            member = params.members[name]

            def in_form(path: TreePath, value: Any, member: OptimizerParam = member) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if isinstance(form, Full) and path in opaque.get(member.name, ()):
                    value = like(value, values_of(local_part(value)))
                found = to_form(_title(member.name, path), value, member.sharding, form)
                return found if owners.has_values else None

            found = mapped(in_form, entry)
            if owners.has_values:
                state[name] = found
                own = {path: kind for path, kind in kinds[name].items() if kind not in (OBJECT, AS_PARAMETER, UNKNOWN)}
                own |= dict.fromkeys(opaque.get(name, ()), OPAQUE)
                if any(kind != PLAIN or at(entry, path).ndim for path, kind in own.items()):
                    recorded[name] = own
    record = {"kinds": recorded} if recorded else {}
    return {"state": state, "param_groups": groups, **record} if owners.has_values else {}


def _title(name: str, path: TreePath) -> str:
    return f"the state {'.'.join(map(str, path))} of {name}"


def _check_alike(
    state: Mapping[str, Any], kinds: Mapping[str, Mapping[TreePath, str]], owners: OwnerRanks, form: Form
) -> dict[str, list[TreePath]]:
    """Return the paths by parameter of what is opaque on any rank: small shards of it may be plain.

    It raises if ranks have state of different parameters, whose collectives would hang, or plain tensors that differ.
    """
    items = [(name, path, kind, at(state[name], path)) for name, found in kinds.items() for path, kind in found.items()]
    keys = [", ".join(map(repr, (name, *path))) for name, path, _, _ in items]
    compared = [] if isinstance(form, Local) else items
    plain = [(name, path, value) for name, path, kind, value in compared if kind == PLAIN and value.ndim]
    texts = {".".join(map(str, (name, *path))): plain_text(value) for name, path, value in plain}
    opaque = [(name, path) for name, path, _, value in items if is_opaque(value)]
    found = owners.exchange(lambda: (digest(keys), texts, opaque))
    if len({which for which, *_ in found.values()}) > 1:
        all_keys = owners.exchange(lambda: keys).items()
        some = {rank: [k for k in has if any(k not in other for _, other in all_keys)] for rank, has in all_keys}
        raise CheckpointError(f"ranks have different state, by rank: {some}. Have all of them make the same steps.")
    check_values({rank: of_rank for rank, (_, of_rank, _) in found.items()})
    on_any = dict.fromkeys(each for *_, of_rank in found.values() for each in of_rank)
    return {name: [path for each, path in on_any if each == name] for name, _ in on_any}


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
    Existing state is filled in place. New state is allocated, as DTensors where the parameter is one. It has the saved
    dtypes, or for torch's own classes, if it is no scalar, the parameter's. ``optimizer.load_state_dict`` runs last.

    Args:
        model: a module, sharded or not.
        optimizer: an optimizer of parameters of ``model``, with the same parameters in each group as when saved.
        state: the state by names, as ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` returns it of
            an unsharded model too.
        form: the form of the values. By default a DTensor is sharded and a plain tensor full; :class:`Local` must be
            passed.
        broadcast_from_rank0: only rank 0 has a full state dict, as with ``Full(rank0_only=True)``, and broadcasts it
            tensor by tensor. What other ranks pass is ignored.

    Raises:
        CheckpointError: groups, parameters or shapes differ. The text has a line for each and is the same on every
            rank.
    """

    from_rank0 = broadcast_from_rank0 or comes_from_rank0(form)
    owners, params = on_all_ranks(model, lambda: OptimizerParams(model, optimizer), from_rank0=from_rank0)
    _Load(params, owners, form, type(optimizer)).carry_out(owners.shared(state))


class _Load:
    """One call of :func:`load_optimizer_state_dict` on one rank."""

    def __init__(self, params: OptimizerParams, owners: OwnerRanks, form: Form | None, kind: type[Optimizer]) -> None:
        self._params, self._owners, self._kind = params, owners, kind
        self._form = Full() if owners.from_rank0 else form
        self._given: dict[str, Any] = {}
        self._groups: list[Mapping[str, Any] | None] = []
        self._quantized: list[str] = []

    def carry_out(self, state: Any) -> None:
        agree(self._owners, f"the state dict does not fit {self._kind.__name__}", partial(self._match, state))
        kinds = _kinds_of(state)
        trees: dict[str, Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, member in self._params.members.items():
                if name in self._given:
                    leaf = partial(self._loaded_value, member, kinds.get(name, {}))
                    trees[name] = mapped(leaf, self._given[name])
            groups = self._owners.send_all(self._groups)
        if self._quantized:
            logger.warning("loading optimizer state: %s", quantized_text(self._quantized))
        self._params.load(groups, trees)

    def _match(self, state: Any, mismatch: Mismatch) -> str:
        """Note the differences between ``state`` and what the optimizer has, and return a digest of the names in it."""
        members, others = self._params.members, mismatch.others
        others += on_meta((name, member.parameter) for name, member in members.items())
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            others.append("a state dict of an optimizer has 'state' and 'param_groups'; this one has not")
            return ""
        names = [name for group in state["param_groups"] for name in group["params"]]
        if any(isinstance(name, int) for name in names or state["state"]):
            others.append("parameters have numbers for names: pass what get_optimizer_state_dict of torch returns")
            return ""
        saved = [{**g, "params": [plain_name(str(name)) for name in g["params"]]} for g in state["param_groups"]]
        self._groups = self._params.match_groups(saved, mismatch)
        given = {plain_name(str(name)): tree for name, tree in state["state"].items()}
        mismatch.unexpected |= {name: "state" for name in given if name not in members}
        known = ("state", "param_groups", "kinds")
        mismatch.unexpected |= {str(key): "no state of a parameter" for key in state if key not in known}
        self._given = {name: given[name] for name in members if name in given}
        kinds = _kinds_of(state)
        paths = []
        for name, tree in self._given.items():
            for path, value in leaves(tree):
                paths.append((name, path))
                if isinstance(value, torch.Tensor):
                    target = self._target(members[name], path, kinds.get(name, {}).get(path, UNKNOWN), value)
                    title = ".".join(map(str, (name, *path)))
                    compare(title, target, value, self._form, mismatch, is_sent=not self._owners.has_values)
        return digest(paths)

    def _target(self, member: OptimizerParam, path: TreePath, kind: str, value: torch.Tensor) -> torch.Tensor:
        """Return what is known of the target of ``value``, by default itself: some have state of any shape."""
        parameter, existing = member.parameter, self._params.existing(member, path)
        target = existing if existing is not None else value
        is_shard = existing is not None and existing.ndim and existing.shape == local_part(parameter).shape
        is_new = existing is None and value.ndim and self._kind in ELEMENTWISE
        is_sharded = kind in (AS_PARAMETER, OPAQUE) or (kind == UNKNOWN and (is_shard or is_new))
        return parameter if is_sharded else target

    def _loaded_value(self, member: OptimizerParam, kinds: Mapping[TreePath, str], path: TreePath, value: Any) -> Any:
        """Return the value to give to the optimizer, after a broadcast if only one rank has it."""
        if not isinstance(value, torch.Tensor):
            return value
        value = self._owners.send(value, value.dtype).detach()
        parameter, existing, kind = member.parameter, self._params.existing(member, path), kinds.get(path, UNKNOWN)
        if not value.ndim and not isinstance(value, DTensor) and kind in (PLAIN, UNKNOWN):
            return value.clone()
        is_local = isinstance(self._form, Local) and not isinstance(value, DTensor)
        has_shape = value.shape == (local_part(parameter) if is_local else parameter).shape
        fits = existing is not None and existing.shape == value.shape
        is_plain = fits and not is_local and not isinstance(existing, DTensor)
        is_sharded = has_shape and (kind in (AS_PARAMETER, OPAQUE) or (kind == UNKNOWN and not is_plain))
        if is_sharded:
            target = parameter
        elif existing is not None and fits:
            target = existing
        elif isinstance(value, DTensor):
            target = value
        else:
            target = new_state(kind, path[-1], tuple(value.shape), value.dtype, parameter)
        if is_sharded and not is_local and is_opaque(value) and not isinstance(value, DTensor):
            value, kind = values_of(value), OPAQUE
        shard = shard_for(target, member.sharding if is_sharded else None, value, self._form)
        if existing is None and kind == OPAQUE and not is_wrapper(shard):
            existing = like(parameter, self._params.made(member, path, local_part(parameter).shape))
        if existing is None or local_part(existing).shape != shard.shape:
            layout, device = torch.contiguous_format, local_part(parameter).device
            return like(target, with_inner(shard, lambda inner: inner.to(device, copy=True, memory_format=layout)))
        own, title = local_part(existing), _title(member.name, path)
        if not is_wrapper(own) and not is_wrapper(shard):
            own.copy_(shard)
        elif fill_by_class(title, LocalShard(own), [Piece((0,) * own.ndim, shard)]):
            self._quantized.append(title)
        return existing


def _kinds_of(state: Mapping[str, Any]) -> dict[str, Mapping[TreePath, str]]:
    return {plain_name(name): kinds for name, kinds in state.get("kinds", {}).items()}


def on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
