"""Attachments of the core, and which of them are attached by default.

A plugin imports the core, and no other plugin. It attaches itself to a seam of the core. Remove the line of a plugin
from :data:`DEFAULT`, and the library trains without it: ``make plugins`` does so for each, and runs the tests.

===================== ================================================== ==================
Plugin                Does                                               On by default
===================== ================================================== ==================
``recovery``          lets ranks meet and reconnect in a reset           on all devices
``pass_reports``      tells other ranks and traces which passes run      on all devices
``order_check_level`` sets how often ranks compare their operations      on all devices
``plain_parameters``  warns of parameters added after ``fully_shard``    on all devices
``late_ties``         merges weights that were tied afterwards           on all devices
``optimizer_checks``  refuses steps that would change nothing            on all devices
``model_check``       compares the models and values of ranks            on all devices
``forward_order``     warns of a changed order of modules                on all devices
``version_check``     finds parameters changed before their backward     on all devices
``residuals``         commits and restores residuals of error feedback   on all devices
``profiler_labels``   labels hooks in profiles and in torch's log        on all devices
``tuning``            measures costs, and chooses settings by them       no: ``calibrate()``
                                                                         or ``set_costs()``
===================== ================================================== ==================
"""

from __future__ import annotations

from composable_fsdp._runtime.root.observer import OBSERVERS, Observer
from composable_fsdp.plugins.forward_order import ForwardOrder
from composable_fsdp.plugins.late_ties import LateTies
from composable_fsdp.plugins.model_check import ModelCheck
from composable_fsdp.plugins.optimizer_checks import OptimizerChecks
from composable_fsdp.plugins.order_check_level import OrderCheckLevel
from composable_fsdp.plugins.pass_reports import ReportedPasses, TracedPasses
from composable_fsdp.plugins.plain_parameters import PlainParameters
from composable_fsdp.plugins.profiler_labels import ProfilerLabels
from composable_fsdp.plugins.recovery import Recovery
from composable_fsdp.plugins.residuals import Residuals
from composable_fsdp.plugins.tuning.tuning import Tuning
from composable_fsdp.plugins.version_check import VersionCheck

__all__ = ["DEFAULT", "OBSERVERS", "Observer"]

DEFAULT: tuple[type[Observer], ...] = (
    Recovery,  # first, so that it is told last of the end of a reset, which it may refuse
    ReportedPasses,
    TracedPasses,
    OrderCheckLevel,
    PlainParameters,
    LateTies,
    OptimizerChecks,
    ModelCheck,
    ForwardOrder,
    VersionCheck,
    Residuals,
    ProfilerLabels,
    Tuning,
)
"""The observers of every root, in their order."""

OBSERVERS.extend(plugin() for plugin in DEFAULT)
