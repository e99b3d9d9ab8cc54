"""What a chapter studies: the plan's own deployment under its own traffic.

Whatever a chapter tries, it changes on this deployment, so that each view starts at the plan.
"""

from dataclasses import dataclass

from planner.analysis.layout_tables import describe_studied_deployment, find_plan_to_study
from planner.analysis.load_ramp import choose_timeline_s
from planner.engines.deployment import Deployment
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.planning.evaluation import get_candidate_workload
from planner.planning.scenario import Scenario
from planner.planning.search import Plan, get_reference_deployment
from planner.workload.workload import Workload


@dataclass(frozen=True)
class Study:
    """The plan of a scenario in which every replica does both, prefill and decode."""

    answered: Plan  # the plan of the scenario, which may have pools
    plan: Plan  # without them; where nothing fits, after a change
    note: str  # what is studied
    is_current: bool  # of the scenario that the cockpit saved, which chapters may change
    scenario: Scenario
    deployment: Deployment  # the plan's own; the widest layout where nothing fits
    workload: Workload  # of all replicas
    memory: MemoryPlan
    decode_batch: int  # sequences that decode at once on average; 1 where nothing fits
    context: int  # mean tokens of a decoding sequence
    timeline_s: float  # seconds of one engine that are drawn


def begin_study(answered: Plan, is_current: bool = False, *, fits: bool = False) -> Study:
    """Study a plan; with `fits`, the plan after the first change with which something fits."""
    plan, change = answered.without_disaggregation, ""
    if fits:
        plan, change = find_plan_to_study(plan)
    scenario, deployment = plan.scenario, get_reference_deployment(plan)
    workload = get_candidate_workload(scenario, deployment)
    performance = plan.best and plan.best.prediction.performance
    return Study(
        answered, plan, describe_studied_deployment(answered, plan, change), is_current, scenario,
        deployment, workload, get_memory_plan(deployment),
        max(round(performance.decode_batch), 1) if performance else 1,
        round(scenario.workload.mean_decode_context), choose_timeline_s(deployment, workload),
    )  # fmt: skip
