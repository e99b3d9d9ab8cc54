"""Headroom: what to run to serve a model, to this traffic, at this latency, and what it costs.

The names below are what a script needs; each is loaded when it is first asked for, so that
importing stays quick. Notebooks have more, those of `ui.notebook_names`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_PLACES = {
    "Interval": "core.intervals:Interval",
    "PlannerError": "core.errors:PlannerError",
    "Deployment": "engines.deployment:Deployment",
    "deploy_on": "engines.deployment:deploy_on",
    "LengthDistribution": "workload.length_distribution:LengthDistribution",
    "Workload": "workload.workload:Workload",
    "plan_memory": "memory.memory_plan:plan_memory",
    "evaluate": "planning.prediction:evaluate",
    "predict": "planning.prediction:predict",
    "simulate": "planning.simulation_runs:run_simulation",
    "Scenario": "planning.scenario:Scenario",
    "load_scenario": "planning.scenario:load_scenario",
    "Plan": "planning.plan:Plan",
    "plan": "planning.search:search_deployments",
    "answer": "answers.serialization:build_plan_json",
}
_FORMER_NAMES = {
    "Lengths": "LengthDistribution",
    "memory_plan": "plan_memory",
    "replay": "simulate",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    name, places = _FORMER_NAMES.get(name, name), _PLACES
    if name not in places and not name.startswith("_"):
        places = import_module(f"{__name__}.ui.notebook_names").PLACES
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = places[name].partition(":")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    return __all__
