"""Plans: whether a model fits on its accelerators and how fast it trains, before a run and without its memory."""

from typing import NoReturn

from composable_fsdp.plan.known_accelerators import ACCELERATORS, Accelerator
from composable_fsdp.plan.make_plan import plan
from composable_fsdp.plan.plan_values import Plan, Row

__all__ = ["ACCELERATORS", "Accelerator", "Plan", "Row", "plan"]


def __getattr__(name: str) -> NoReturn:
    from composable_fsdp._other_names import missing

    missing(__name__, name)
