"""Costs of collectives and of computation, and the choice of schedules by them."""

from composable_fsdp.plugins.tuning.choose import Choice, ScheduleOptions
from composable_fsdp.plugins.tuning.costs import AxisCosts, CollectiveCost, Costs

__all__ = ["AxisCosts", "Choice", "CollectiveCost", "Costs", "ScheduleOptions"]
