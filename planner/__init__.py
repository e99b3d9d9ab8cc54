"""Headroom: what to run to serve a model, to this traffic, at this latency, and what it costs.

The names below are what a script needs; each is loaded when it is first asked for, so that importing stays quick.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "Interval": "core.quantities:Interval",
    "PlannerError": "core.quantities:PlannerError",
    "Deployment": "facts.deployment:Deployment",
    "deploy_on": "facts.deployment:deploy_on",
    "Lengths": "facts.workload:Lengths",
    "Workload": "facts.workload:Workload",
    "memory_plan": "memory.budget:plan",
    "evaluate": "planning.prediction:evaluate",
    "predict": "planning.prediction:predict",
    "replay": "planning.benchmark_run:run",
    "Scenario": "planning.scenario:Scenario",
    "load_scenario": "planning.scenario:load_scenario",
    "Plan": "planning.search:Plan",
    "plan": "planning.search:search",
    "answer": "operations.answer:answer",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found


def __dir__() -> list[str]:
    return __all__
