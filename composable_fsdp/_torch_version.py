"""The versions of torch with which the whole suite of tests has run. ``make test-torch`` runs it with another."""

from __future__ import annotations

import warnings

import torch

from composable_fsdp.errors import UntestedTorchWarning

OLDEST, NEWEST = (2, 11), (2, 15)


def warn_of_newer_torch() -> None:
    """Warn if the installed torch is newer. pip does not refuse it: it would replace a user's torch by an older one."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) > NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        warnings.warn(
            f"This is torch {torch.__version__}; composable_fsdp was tested with torch {oldest} to {newest}. It uses "
            "private parts of torch, which may have changed. If training fails, install one of these, or a newer "
            "composable_fsdp. Else filter this composable_fsdp.errors.UntestedTorchWarning.",
            UntestedTorchWarning,
            stacklevel=5,  # the first use of a name of the package
        )
