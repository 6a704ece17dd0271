"""Argument checks and helpers of the setters of ``FSDPModule``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

import torch

from composable_fsdp._core.hooks import root_of
from composable_fsdp._core.state import FSDPState
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, LifecycleError

__all__ = ["check_between_steps", "check_count", "check_factor", "on_stream", "set_root_options"]


def check_count(name: str, value: object, *, least: int = 0, or_none: bool = False) -> None:
    """Raise if ``value`` is not an int in range.

    Raises:
        ArgumentTypeError: ``value`` is not an int, nor ``None`` where that is allowed. A bool does not count as an int.
        ConfigurationError: it is less than ``least``.
    """
    if or_none and value is None:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or cast(int, value) < least:
        error = ConfigurationError if is_int else ArgumentTypeError
        raise error(f"{name} must be an int of at least {least}{' or None' if or_none else ''}, not {value!r}.")


def check_factor(factor: object) -> None:
    """Raise if ``factor`` is not a positive number.

    Raises:
        ArgumentTypeError: ``factor`` is not a number.
        ConfigurationError: it is not positive.
    """
    if not isinstance(factor, SupportsFloat):
        raise ArgumentTypeError(f"the gradient divide factor must be a number, not {factor!r}.")
    if not float(factor) > 0:
        raise ConfigurationError(f"the gradient divide factor must be positive, not {factor!r}.")


def check_between_steps(setter: str, states: Sequence[FSDPState]) -> None:
    """Raise if a backward may still need the current buffers of ``states``.

    Raises:
        LifecycleError: ``setter`` would rebuild these buffers between a forward and its backward.
    """
    ran = [state for state in states if state.root is not None and root_of(state).may_come_back_to(state)]
    if ran:
        raise LifecycleError(
            f"{setter} would move parameters of {ran[0].name!r}, to whose last forward a backward may still come. Call "
            "it before the forward or after the backward. If none is to come, run such forwards under torch.no_grad(), "
            "or call reset_iter_state() on the root module first."
        )


def set_root_options(state: FSDPState, options: Mapping[str, Any]) -> None:
    """Set options that apply to all FSDP states of a root.

    Raises:
        ConfigurationError: the root has run, and it is another module, whose options have other values.
    """
    before = state.options
    state.change(**options)
    if state.root is None:  # the first forward checks it
        return
    from composable_fsdp.plugins.checks.model_check import check_settings  # the core works without plugins

    try:
        check_settings(state.root.root_state, [state])
    except ConfigurationError:
        state.options = before
        raise


def on_stream(hook: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    """Return a function that runs ``hook`` on ``stream``, ordered after and before the work of the current stream."""

    def on_stream(output: torch.Tensor) -> None:
        module = torch.get_device_module(output.device)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            hook(output)
        module.current_stream().wait_stream(stream)

    return on_stream
