"""Checks of the arguments of the public functions of checkpoints, before ranks meet."""

from __future__ import annotations

import os

from torch import nn

from composable_fsdp.errors import ArgumentTypeError

__all__ = ["check_arguments"]


def check_arguments(signature: str, path: object, model: object, optimizer: object = None) -> None:
    """Raise :class:`ArgumentTypeError` if an argument has a wrong type, as when two are swapped.

    Args:
        signature: the call with its arguments in order, which the error shows.
        path: must be a path.
        model: must be a module.
        optimizer: must have ``param_groups``, as wrappers of optimizers also have, or be ``None``.
    """
    for name, value, fits, wanted in (
        ("path", path, isinstance(path, (str, os.PathLike)), "a str or a path"),
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        ("optimizer", optimizer, optimizer is None or hasattr(optimizer, "param_groups"), "an optimizer"),
    ):
        if not fits:
            raise ArgumentTypeError(f"{name} must be {wanted}, not {type(value).__name__}. Call {signature}.")
