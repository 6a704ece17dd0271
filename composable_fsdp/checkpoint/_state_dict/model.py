"""State dicts of a model in the three forms: full, sharded and local."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.shard_extent import has_own_memory
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, refuse, tensor_text
from composable_fsdp.checkpoint._state_dict.names import Entry, entries_of, on_meta, plain_name, prepare_for_access
from composable_fsdp.checkpoint._state_dict.options import Form, Full, Sharded
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks
from composable_fsdp.checkpoint._state_dict.tensor import compare, fill, to_form
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = ["SHARDED", "comes_from_rank0", "load_state_dict", "state_dict", "state_dict_form", "streams_from_rank0"]

SHARDED = Sharded()


# -- save


def state_dict(model: nn.Module, form: Form = SHARDED) -> dict[str, Any]:
    """Return what the unsharded model's ``state_dict()`` has, with its names and dtypes, in ``form``.

    Tied weights are one tensor under each of their names. Extra state is as ``get_extra_state`` returned it.

    Args:
        model: a module. Tensors that are not sharded are full in every form.
        form: :class:`Sharded` and :class:`Local` alias the parameters, as ``model.state_dict()`` does. :class:`Full`
            copies everything, buffers too. It is collective: all ranks must call it together, and tensors are gathered
            one by one. With ``rank0_only`` only rank 0 gets it, or the first of the ranks that own shards of the model.
            Parameters with fewer data-parallel ranks than others, such as experts, go to the first of their ranks.

    Raises:
        CheckpointError: the full form, while parameters are on the meta device.
    """
    prepare_for_access(model)
    entries = entries_of(model)
    if isinstance(form, Full):
        for problem in _on_meta(entries):
            raise CheckpointError(f"{type(model).__name__} has no full state dict: {problem}")
    tensors = ((entry.value, entry.sharding) for entry in entries.values())
    owners = OwnerRanks.of(tensors, all_ranks=comes_from_rank0(form))
    state: dict[str, Any] = OrderedDict()
    known: dict[int, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, entry in entries.items():
            receives = not comes_from_rank0(form) or owners.is_source_of(entry.value)
            if entry.is_tensor and id(entry.value) not in known:
                value = to_form(name, entry.value, entry.sharding, form)
                known[id(entry.value)] = value if receives else torch.empty(0)
                del value
            if receives:
                state[name] = known[id(entry.value)] if entry.is_tensor else entry.value
    cast(Any, state)._metadata = _versions(model)
    return state


def comes_from_rank0(form: Form | None) -> bool:
    """Return whether only the source ranks have values in this form."""
    return isinstance(form, Full) and form.rank0_only


def _versions(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return each module's state version, stored where ``nn.Module.load_state_dict`` looks for it."""
    modules = model.named_modules(remove_duplicate=False)
    return OrderedDict((plain_name(f"{name}.")[:-1], {"version": module._version}) for name, module in modules)


def _on_meta(entries: Mapping[str, Entry]) -> list[str]:
    return on_meta((name, entry.value) for name, entry in entries.items() if entry.is_tensor)


def _described(value: object) -> str:
    return tensor_text(value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


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
    tied weights the first name that is present counts. The model's own ``load_state_dict`` runs last, with values that
    are in place already, so that hooks and ``set_extra_state`` are called. Prefixes that wrappers add to names are
    ignored.

    Args:
        model: a module, sharded or not.
        state_dict: from :func:`state_dict`, or that of the unsharded model.
        form: the form of the values. By default a DTensor is sharded and a plain tensor full; :class:`Local` must be
            passed.
        strict: missing and unexpected names are an error.
        broadcast_from_rank0: only rank 0 has a (full) state dict, as with ``Full(rank0_only=True)``, and broadcasts it
            tensor by tensor. What other ranks pass is ignored; they hold one full tensor at a time.

    Returns:
        The missing and unexpected names, as ``nn.Module.load_state_dict`` does.

    Raises:
        CheckpointError: the state dict does not fit. The text has a line for each name that is missing, unexpected, of
            another shape or of another kind of dtype, and is the same on every rank.
        ConfigurationError: ``broadcast_from_rank0`` with a form that is not full.
    """
    streams = streams_from_rank0(form, broadcast_from_rank0)
    load = _Load(model, state_dict, Full() if streams else form, streams)
    load.agree(strict)
    return load.carry_out()


def streams_from_rank0(form: Form | None, broadcast_from_rank0: bool) -> bool:
    """Return whether one rank broadcasts full values to the others."""
    if broadcast_from_rank0 and not isinstance(form, Full | None):
        raise ConfigurationError(
            f"broadcast_from_rank0 sends whole tensors, but form is {form!r}. Pass a full state dict on rank 0, or a "
            "sharded or local one on every rank without broadcast_from_rank0."
        )
    return broadcast_from_rank0 or comes_from_rank0(form)


@dataclass
class _Report:
    """One rank's findings about the state dict that it was given."""

    mismatch: Mismatch = field(default_factory=Mismatch)
    others: dict[str, Any] = field(default_factory=dict)
    """Values that are not tensors, if they must be sent to other ranks."""
    versions: dict[str, Any] | None = None


class _Load:
    """One call of :func:`load_state_dict`.

    Args:
        streams: only source ranks have values. The state dicts of other ranks are ignored.
    """

    def __init__(self, model: nn.Module, state_dict: object, form: Form | None, streams: bool) -> None:
        self._model = model
        self._form = form
        self._streams = streams
        prepare_for_access(model)
        self._entries = entries_of(model)
        self._owners = OwnerRanks.of(((e.value, e.sharding) for e in self._entries.values()), all_ranks=streams)
        self._given: dict[str, Any] = {}
        self._reports = self._owners.exchange(self._inspect(state_dict))

    def agree(self, strict: bool) -> None:
        """Raise the same error on all ranks if any of them found one."""
        mismatches = {rank: report.mismatch for rank, report in self._reports.items()}
        if not strict:
            missing = [] if self._streams else [mismatch.missing for mismatch in mismatches.values()]
            uneven = {name: "other ranks have it" for m in missing for name in m if any(name not in o for o in missing)}
            mismatches = {
                rank: replace(mismatch, missing={n: uneven[n] for n in mismatch.missing if n in uneven}, unexpected={})
                for rank, mismatch in mismatches.items()
            }
        refuse(f"the state dict does not fit {type(self._model).__name__}", mismatches)

    def carry_out(self) -> _IncompatibleKeys:
        """Fill parameters and buffers, then run the model's own method with these values."""
        present = {name: e for name, e in self._entries.items() if name not in self._report_of(e).mismatch.missing}
        filled: set[int] = set()
        values = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, entry in present.items():
                values[entry.key] = entry.value
                if not entry.is_tensor:
                    values[entry.key] = self._report_of(entry).others[name] if self._streams else self._given[name]
                elif id(entry.value) not in filled:
                    filled.add(id(entry.value))
                    self._fill(entry)
        missing = self._load_with_hooks(values)
        unexpected = dict.fromkeys(name for report in self._reports.values() for name in report.mismatch.unexpected)
        return _IncompatibleKeys([plain_name(name) for name in missing], list(unexpected))

    def _report_of(self, entry: Entry | None = None) -> _Report:
        """Return the report of the rank that has ``entry``, or by default the report for the complete state dict."""
        value = None if entry is None else entry.value
        return self._reports[self._owners.source_of(value) if self._streams else self._owners.rank]

    def _inspect(self, state_dict: object) -> _Report:
        report = _Report(Mismatch(others=_on_meta(self._entries)))
        is_source = not self._streams or self._owners.is_source_of()
        mine = [e for e in self._entries.values() if not self._streams or self._owners.is_source_of(e.value)]
        if not mine and not is_source:
            return report
        if not isinstance(state_dict, Mapping):
            report.mismatch.others.append(
                f"a state dict maps names to values, but a {type(state_dict).__name__} was given"
            )
            return report
        self._given = {plain_name(str(name)): value for name, value in state_dict.items()}
        for entry in mine:
            self._inspect_entry(entry, report)
        if is_source:
            unexpected = {str(n): v for n, v in state_dict.items() if plain_name(str(n)) not in self._entries}
            report.mismatch.unexpected = {name: _described(value) for name, value in unexpected.items()}
            report.versions = getattr(state_dict, "_metadata", None)
        return report

    def _inspect_entry(self, entry: Entry, report: _Report) -> None:
        name = entry.name
        if name not in self._given:
            report.mismatch.missing[name] = _described(entry.value)
        elif entry.is_tensor:
            compare(name, entry.value, self._given[name], self._form, report.mismatch)
            value = self._given[name]
            if self._streams and isinstance(value, torch.Tensor) and not has_own_memory(local_part(value)):
                report.mismatch.others.append(
                    f"{name!r} is a {type(value).__name__}, which cannot be sent from rank 0: only plain tensors can. "
                    "Load it on all ranks, without broadcast_from_rank0"
                )
        elif self._streams:
            report.others[name] = self._given[name]

    def _fill(self, entry: Entry) -> None:
        target, value = entry.value, self._given.get(entry.name)
        if self._streams:
            value = self._owners.send(target, value, target.dtype, target.shape)
        assert value is not None
        fill(target, entry.sharding, value, self._form)

    def _load_with_hooks(self, values: dict[str, Any]) -> list[str]:
        """Call ``nn.Module.load_state_dict``, and return the missing names that hooks of modules left."""
        state, versions = OrderedDict(values), self._report_of().versions
        if versions is not None:
            by_name = {plain_name(f"{name}."): version for name, version in versions.items()}
            paths = [name for name, _ in self._model.named_modules(remove_duplicate=False)]
            known = {path: by_name[n] for path in paths if (n := plain_name(f"{path}.")) in by_name}
            cast(Any, state)._metadata = OrderedDict(known)
        # The method of the class: state_dict_form may have replaced the instance's.
        missing: list[str] = type(self._model).load_state_dict(self._model, state, strict=False).missing_keys
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
    inside = {"state_dict": _state_dict_method(model, form), "load_state_dict": _load_state_dict_method(model, form)}
    attributes = vars(model)
    before = {name: attributes[name] for name in inside if name in attributes}
    attributes.update(inside)
    try:
        yield
    finally:
        for name in inside:
            attributes.pop(name, None)
        attributes.update(before)


def _state_dict_method(model: nn.Module, form: Form) -> Callable[..., Any]:
    def show(*args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if args or keep_vars:  # keep_vars asks for the parameters themselves, which have one form
            return type(model).state_dict(model, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        state = state_dict(model, form)
        if destination is None and not prefix:
            return state
        destination = OrderedDict() if destination is None else destination
        destination.update({prefix + name: value for name, value in state.items()})
        return destination

    return show


def _load_state_dict_method(model: nn.Module, form: Form) -> Callable[..., _IncompatibleKeys]:
    def load(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        if assign:
            raise ConfigurationError(
                "inside state_dict_form values are copied to the parameters, so load_state_dict cannot assign=True. "
                "Leave it out, or call it outside."
            )
        return load_state_dict(model, state_dict, form, strict=strict)

    return load
