"""State dicts of a model in the three forms: full, sharded and local."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from composable_fsdp.checkpoint._state_dict.forms import Form, Full, Sharded, check_form, to_form
from composable_fsdp.checkpoint._state_dict.loader import OwnerRanks, StateDictLoader
from composable_fsdp.checkpoint._state_dict.tensors import Entry, entries_of, on_meta, plain_name, prepare_for_access
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
    check_form(form)
    prepare_for_access(model)
    entries = entries_of(model)
    if isinstance(form, Full):
        for problem in _on_meta(entries):
            raise CheckpointError(f"{type(model).__name__} has no full state dict: {problem}")
    tensors = ((entry.value, entry.sharding) for entry in entries.values())
    owners = OwnerRanks.of(tensors, only_sources=comes_from_rank0(form))
    state: dict[str, Any] = OrderedDict()
    known: dict[int, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, entry in entries.items():
            receives = owners.provides(entry.value)
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
    prepare_for_access(model)
    entries = entries_of(model)
    owners = OwnerRanks.of(((e.value, e.sharding) for e in entries.values()), only_sources=streams)
    loader = StateDictLoader(owners, form)
    loader.report.mismatch.others += _on_meta(entries)
    loader.match(entries, state_dict)
    loader.report.settings = getattr(state_dict, "_metadata", None)
    loader.agree(f"the state dict does not fit {type(model).__name__}", strict=strict)
    missing = _load_through_modules(model, loader.fill(entries), loader.report_of().settings)
    unexpected = dict.fromkeys(name for report in loader.reports.values() for name in report.mismatch.unexpected)
    return _IncompatibleKeys([plain_name(name) for name in missing], list(unexpected))


def streams_from_rank0(form: Form | None, broadcast_from_rank0: bool) -> bool:
    """Return whether one rank broadcasts full values to the others."""
    if broadcast_from_rank0 and not isinstance(form, Full | None):
        raise ConfigurationError(
            f"broadcast_from_rank0 sends whole tensors, but form is {form!r}. Pass a full state dict on rank 0, or a "
            "sharded or local one on every rank without broadcast_from_rank0."
        )
    return broadcast_from_rank0 or comes_from_rank0(form)


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
