"""Plans: whether a model fits on its accelerators and how fast it trains, before a run and without its memory."""

from typing import NoReturn

from composable_fsdp.plan.known_accelerators import ACCELERATORS, Accelerator
from composable_fsdp.plan.make_plan import plan
from composable_fsdp.plan.plan_values import Plan, Row

__all__ = ["ACCELERATORS", "Accelerator", "Plan", "Row", "plan"]


def __getattr__(name: str) -> NoReturn:
    if name == "sweep":  # an AttributeError would lose its text in ``from composable_fsdp.plan import``
        raise ImportError("plan.sweep is gone: call plan for each setting, and take the fastest of those that fit.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
