"""Load the planned replica that a diagnosis compares with: of a scenario, or of a plan.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.readers import parse_json, read_text
from planner.engines.deployment import Deployment, SpeculationConfig, deploy_on
from planner.latency.speculative_decoding import infer_acceptance_rate
from planner.models.registry import load_model
from planner.planning.evaluation import get_candidate_workload
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.scenario_schema import coerce_engine_args
from planner.planning.search import get_reference_deployment, search_deployments
from planner.planning.slo import LatencyMetric, LatencyStatistic, SloTarget
from planner.workload.workload import Workload


@dataclass(frozen=True)
class PlannedReplica:
    """One replica of a plan, its part of the traffic as far as that is known, and the SLOs."""

    deployment: Deployment
    workload: Workload | None
    rate: float | None  # requests/s
    targets: tuple[SloTarget, ...] = ()

    @classmethod
    def from_deployment(
        cls, deployment: Deployment, workload: Workload | None, targets: tuple[SloTarget, ...] = ()
    ) -> PlannedReplica:
        """Return one replica of `deployment` under its part of `workload`."""
        share = workload.split(deployment.layout.replicas) if workload else None
        return cls(deployment.with_replicas(1), share, share.rate if share else None, targets)


def load_planned_replica(location: str | Path) -> PlannedReplica:
    """Plan a scenario (a name or a YAML file) or read a plan.json; else raise `PlannerError`."""
    return (
        _read_plan_json(Path(location))
        if str(location).endswith(".json")
        else _plan_scenario(load_scenario(location))
    )


def _plan_scenario(scenario: Scenario) -> PlannedReplica:
    deployment = get_reference_deployment(search_deployments(scenario))
    return PlannedReplica.from_deployment(
        deployment, get_candidate_workload(scenario, deployment), scenario.slo_targets
    )


def _read_plan_json(path: Path) -> PlannedReplica:
    """Read the replica from a plan.json, which does not state the lengths of the traffic."""
    data = parse_json(read_text(path), path.name)
    plan = validate_entry(PlanFile, data, f"{path.name} is not a plan.json of this planner")
    checkpoint_quantization = load_model(plan.checkpoint).quantization.method
    speculation = None
    if fields := plan.speculation:
        speculation = SpeculationConfig(
            method=fields.method,
            num_speculative_tokens=fields.num_speculative_tokens,
            acceptance_rate=fields.acceptance_rate,
            draft=load_model(fields.draft_model) if fields.draft_model else None,
        )
    args: dict[str, Any] = dict(coerce_engine_args(plan.engine_args))
    deployment = deploy_on(
        plan.checkpoint,
        plan.gpu,
        engine=plan.engine,
        engine_version=plan.engine_version,
        quantization=(
            None if plan.quantization in (checkpoint_quantization, "none") else plan.quantization
        ),
        speculation=speculation,
        **{name: size for name, size in vars(plan.layout).items() if name != "replicas"},
        **args,
    )
    targets = [
        SloTarget(slo.metric, slo.percentile, slo.limit_ms / 1e3) for slo in plan.service_level
    ]
    rate = plan.planned_rps
    return PlannedReplica(
        deployment, None, rate / plan.layout.replicas if rate else None, tuple(targets)
    )


class _PlanPart(StrictEntry):
    """A part of a plan.json: what a diagnosis needs of it, which may be all that is there."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, strict=True)


class _PlannedLayout(_PlanPart):
    tp: PositiveInt
    pp: PositiveInt = 1
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    dcp: PositiveInt = 1
    replicas: PositiveInt


class _PlannedSpeculation(_PlanPart):
    method: str
    num_speculative_tokens: PositiveInt
    acceptance_rate: float = Field(ge=0, le=1)
    draft_model: str | None = None


class _PlannedSlo(_PlanPart):
    metric: LatencyMetric
    percentile: LatencyStatistic
    limit_ms: PositiveFloat


class PlanFile(_PlanPart):
    """The fields of a plan.json that describe one replica and its SLOs."""

    layout: _PlannedLayout
    engine_args: dict[str, str | int | float | bool]
    quantization: str
    checkpoint: str
    gpu: str
    engine: str
    engine_version: str
    speculation: _PlannedSpeculation | None
    service_level: tuple[_PlannedSlo, ...] = Field(default=(), strict=False)
    planned_rps: PositiveFloat | None = None


def with_acceptance(deployment: Deployment, accepted_fraction: float) -> Deployment:
    """Return the deployment with this fraction of all drafted tokens accepted."""
    speculation = deployment.speculation
    if speculation is None:
        return deployment
    k = speculation.num_speculative_tokens
    rate = infer_acceptance_rate(1 + k * min(accepted_fraction, 1.0), k)
    return replace(deployment, speculation=replace(speculation, acceptance_rate=rate))
