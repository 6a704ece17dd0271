"""Plans: whether a model fits on its accelerators and how fast it trains, before a run and without its memory."""

from composable_fsdp.plan.known_accelerators import ACCELERATORS, Accelerator
from composable_fsdp.plan.make_plan import plan
from composable_fsdp.plan.plan_values import Plan, Row

__all__ = ["ACCELERATORS", "Accelerator", "Plan", "Row", "plan"]
