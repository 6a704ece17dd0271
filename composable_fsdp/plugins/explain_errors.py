"""Explain errors of ``DTensor`` about plain operands, where a sharded parameter is the other operand."""

from __future__ import annotations

import traceback

from torch import nn

from composable_fsdp._core.seams import Observer
from composable_fsdp._runtime.groups.state import state_of_parameter
from composable_fsdp._runtime.params.sharded_param import find_parameter, in_functional_call
from composable_fsdp.errors import LifecycleError

__all__ = ["ExplainedErrors", "explain", "explanation_of", "is_mixed"]

_MIXED = "got mixed torch.Tensor and DTensor"
_REMEDY = (
    "Call that module; or a method of it after composable_fsdp.register_fsdp_forward_method(module, name); or put "
    "module.unshard() before and module.reshard() after what computes with it."
)
_SHOWN = 3


class ExplainedErrors(Observer):
    def raised(self, error: BaseException) -> None:
        explain(error)


def is_mixed(error: BaseException) -> bool:
    """Return whether ``error`` is one of ``DTensor`` about plain operands."""
    return isinstance(error, RuntimeError) and not isinstance(error, LifecycleError) and _MIXED in str(error)


def explain(error: BaseException) -> str | None:
    """Add a note to an error about sharded parameters. Return its text where errors take no notes, in Python 3.10."""
    text = explanation_of(error)
    if text is None or not hasattr(error, "add_note"):
        return text
    if not any(note.endswith(_REMEDY) for note in getattr(error, "__notes__", ())):
        error.add_note(text)
    return None


def explanation_of(error: BaseException) -> str | None:
    """Return a text that names the sharded parameter an error of ``DTensor`` is about, or ``None`` for other errors.

    It is the first one found in the locals of the traceback, innermost frame first, or in a module among these locals.
    Otherwise the text names those below such a module, of which it may be one.
    """
    if not is_mixed(error):
        return None
    if in_functional_call():
        return "If functional_call was given sharded values, give full ones: value.full_tensor(), called by all ranks."
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name != "<module>"]
    values = [value for frame in reversed(frames) for value in frame.f_locals.values()]
    texts = (explain_value(value) for explain_value in (_explain_value, _explain_below) for value in values)
    return next(filter(None, texts), None)


def _explain_value(value: object) -> str | None:
    """Return the explanation if ``value`` is a sharded parameter, or a module that has one of its own."""
    module = value if isinstance(value, nn.Module) else None
    for name, parameter in ({"": value} if module is None else module._parameters).items():
        found, state = find_parameter(parameter), state_of_parameter(parameter)
        if found is not None and found.sharded is parameter and state is not None:
            known = f"{name!r} of this {type(module).__name__.removeprefix('FSDP')}" if name else repr(found.name)
            return (
                f"parameter {known} is sharded, being in the group of {state.name!r} ({state.class_name}): only calls "
                f"of that module bring it into memory. {_REMEDY}"
            )
    return None


def _explain_below(value: object) -> str | None:
    """Return the explanation if ``value`` is a module with sharded parameters below it."""
    if not isinstance(value, nn.Module):
        return None
    found = ((name, p, find_parameter(p)) for name, p in value.named_parameters())
    names = [repr(name) for name, p, each in found if each is not None and each.sharded is p]
    if not names:
        return None
    more = ", …" if len(names) > _SHOWN else ""
    owner = type(value).__name__.removeprefix("FSDP")
    return (
        f"If the DTensor is a sharded parameter of this {owner}, one of {', '.join(names[:_SHOWN])}{more}: only calls "
        f"of the module whose group it is in bring it into memory. {_REMEDY}"
    )
