"""pipelab: pipeline parallelism as one object that is planned, predicted, proved, run and drawn.

The front door. Every name is imported when it is first used, so that `import pipelab` stays quick and pulls in neither
torch nor matplotlib.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (
        *("PipelabError", "SizeError", "ScheduleError", "CostError", "PartitionError", "EngineError"),
        *("CheckpointError", "FormulaError", "PlanError", "RankError", "MissingPackageError"),
    ),
    "action": ("Action", "Kind"),
    "schedule": ("Schedule",),
    "trace": ("Trace", "Span", "Message"),
    "validate": ("validate",),
    "costs": ("Costs", "Link"),
    "simulate": ("simulate",),
    "memory": ("peak_activations", "memory_curve"),
    "schedules": (
        *("SCHEDULES", "naive", "gpipe", "one_f_one_b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "pipedream"),
        *("zb_v", "v_half", "v_min", "dualpipe_v", "pipedream_2bw", "search"),
    ),
    "versions": ("weight_versions", "update_groups", "stashed_versions", "with_updates", "gradient_ages"),
    "partition": ("partition_layers", "Partition"),
    "mesh": ("Mesh",),
    "lower": ("lower", "validate_program", "Program"),
    "profiling": ("profile_layers",),
    "planner": ("plan", "Plan", "Hardware", "Transformer", "PRESETS"),
    "layers": ("as_layers",),
    "ranks": ("Ranks",),
    "doctor": ("doctor",),
    "engine": ("Pipeline", "StepResult", "tune_microbatches"),
    "replay": ("replay",),
    "gantt": ("gantt", "gantt_compare"),
    "plots": ("memory_plot", "bubble_plot", "line_plot", "bar_plot", "pareto_plot"),
    "mesh_plot": ("mesh_plot",),
    "version_plot": ("version_plot", "version_map"),
    "stacked": ("gantt_memory", "gantt_stack"),
    "widgets": ("explore", "play", "build"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_MODULES = ("data", "models", "theory")

__all__ = [*_ROOM_OF, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


class _FrontDoor(ModuleType):
    """Keeps `pipelab.simulate` the function: importing the room of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _ROOM_OF):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
