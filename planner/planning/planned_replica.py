"""Load a planned replica: of a scenario, or of the plan.json that `headroom plan --out` writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.readers import parse_json, read_text
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine
from planner.engines.layout import SpeculationConfig
from planner.latency.speculative_decoding import infer_acceptance_rate
from planner.models.registry import load_model
from planner.planning.evaluation import get_candidate_workload
from planner.planning.plan import get_reference_deployment
from planner.planning.scenario import Scenario, apply_overrides, load_scenario, parse_scenario
from planner.planning.scenario_schema import (
    MAX_GPUS_PER_KIND,
    MAX_SPARE_REPLICAS,
    coerce_engine_args,
)
from planner.planning.search import search_deployments
from planner.planning.slo import LatencyMetric, LatencyStatistic, SloTarget
from planner.workload.workload import Workload


@dataclass(frozen=True)
class PlannedReplica:
    """One replica of a plan, its part of the traffic as far as that is known, and the SLOs."""

    deployment: Deployment
    workload: Workload | None
    rate: float | None  # requests/s
    targets: tuple[SloTarget, ...] = ()
    scenario: Scenario | None = None  # with the figures that the plan found
    num_replicas: int = 1  # of the whole plan
    is_pool: bool = False  # the decode pool of a plan with pools

    @classmethod
    def from_deployment(
        cls,
        deployment: Deployment,
        workload: Workload | None,
        targets: tuple[SloTarget, ...] = (),
        scenario: Scenario | None = None,
    ) -> PlannedReplica:
        """Return one replica of `deployment` under its part of `workload`."""
        replicas = deployment.layout.replicas
        share = workload.split(replicas) if workload else None
        rate = share.rate if share else None
        return cls(deployment.with_replicas(1), share, rate, targets, scenario, replicas)


def load_planned_replica(location: str | Path, *, unified: bool = False) -> PlannedReplica:
    """Plan a scenario (a name or a YAML file), or read what `headroom plan --out` wrote.

    That is a folder, or its plan.json. Raises `PlannerError` for anything else, and for a plan of
    prefill and decode pools if it has to be `unified`.
    """
    path = Path(location)
    if path.is_dir():
        path = path / "plan.json"
    replica = (
        _read_plan_json(path) if path.suffix == ".json" else _plan_scenario(load_scenario(location))
    )
    if unified and replica.is_pool:
        raise PlannerError(
            f"{path}: the plan has prefill and decode pools, not replicas of one kind"
        )
    return replica


def _plan_scenario(scenario: Scenario) -> PlannedReplica:
    plan = search_deployments(scenario)
    deployment = get_reference_deployment(plan)
    workload = get_candidate_workload(plan.scenario, deployment)
    replica = PlannedReplica.from_deployment(
        deployment, workload, plan.scenario.slo_targets, plan.scenario
    )
    return replace(replica, is_pool=plan.is_disaggregated)


def _read_plan_json(path: Path) -> PlannedReplica:
    """Read the replica from a plan.json; one without its question does not state the traffic."""
    data = parse_json(read_text(path), path.name)
    plan = validate_entry(PlanFile, data, f"{path.name} is not a plan.json of this planner")
    checkpoint_quantization = load_model(plan.checkpoint).quantization.method
    targets = tuple(
        SloTarget(slo.metric, slo.percentile, slo.limit_ms / 1e3) for slo in plan.service_level
    )
    scenario = _read_question(plan, targets)
    speculation = None
    if fields := plan.speculation:
        speculation = SpeculationConfig(
            method=fields.method,
            num_speculative_tokens=fields.num_speculative_tokens,
            acceptance_rate=fields.acceptance_rate,
            draft=load_model(fields.draft_model) if fields.draft_model else None,
        )
    engine = get_engine(plan.engine, plan.engine_version)
    args: dict[str, Any] = dict(coerce_engine_args(plan.engine_args, engine))
    if scenario:
        engines = {each.name: each for each in (scenario.engine, *scenario.other_engines)}
        gpus = {each.gpu.name: each for each in scenario.gpus}
        if engine.name not in engines or plan.gpu not in gpus:
            raise PlannerError(
                f"{path.name}, field question: it does not allow {engine.name} on {plan.gpu}, which"
                " the plan has"
            )
        engine, gpu = replace(engine, calibration=engines[engine.name].calibration), gpus[plan.gpu]
        args |= {
            "interconnect": gpu.interconnect,
            "gpus_per_node": gpu.max_machine_gpus,
            "sold_in": gpu.machine_sizes,
            "other_tenants": scenario.other_tenants,
            "memory_calibration": scenario.memory_calibration,
            "spare_replicas": plan.spare_replicas,
        }
    deployment = deploy_on(
        plan.checkpoint,
        plan.gpu,
        engine=engine,
        quantization=(
            None if plan.quantization in (checkpoint_quantization, "none") else plan.quantization
        ),
        speculation=speculation,
        **vars(plan.layout),
        **args,
    )
    workload = get_candidate_workload(scenario, deployment) if scenario else None
    replica = PlannedReplica.from_deployment(deployment, workload, targets, scenario)
    replicas, rate = plan.layout.replicas, plan.planned_rps
    if scenario is None and rate:
        replica = replace(replica, rate=rate / replicas)
    return replace(replica, is_pool=plan.pools is not None)


def _read_question(plan: PlanFile, targets: tuple[SloTarget, ...]) -> Scenario | None:
    """Read the scenario of a plan, with the load that was found for it; None if it has none."""
    if plan.question is None:
        return None
    figures = plan.max_load or {}
    found = {
        f"workload.{name}": figures[name] for name in ("rate", "concurrency") if name in figures
    }
    scenario = parse_scenario(apply_overrides(plan.question, found, "plan.json"), plan.scenario)
    return replace(
        scenario,
        open_figure=None,
        slo_targets=tuple(replace(t, confidence=scenario.confidence) for t in targets),
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
    replicas: Annotated[int, Field(gt=0, le=MAX_GPUS_PER_KIND)]


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
    """The fields of a plan.json that describe one replica, its SLOs, and what starts it."""

    layout: _PlannedLayout
    engine_args: dict[str, str | int | float | bool | list[str]]
    quantization: str
    checkpoint: str
    gpu: str
    engine: str
    engine_version: str
    speculation: _PlannedSpeculation | None
    service_level: tuple[_PlannedSlo, ...] = Field(default=(), strict=False)
    planned_rps: PositiveFloat | None = None
    spare_replicas: Annotated[int, Field(ge=0, le=MAX_SPARE_REPLICAS)] = 0
    scenario: str = "plan.json"
    question: dict[str, Any] | None = None
    pools: dict[str, Any] | None = None
    max_load: dict[str, float | None] | None = None
    command: tuple[str, ...] | None = Field(default=None, strict=False)
    commands: dict[str, tuple[str, ...]] | None = Field(default=None, strict=False)


def with_acceptance(deployment: Deployment, accepted_fraction: float) -> Deployment:
    """Return the deployment with this fraction of all drafted tokens accepted."""
    speculation = deployment.speculation
    if speculation is None:
        return deployment
    k = speculation.num_speculative_tokens
    rate = infer_acceptance_rate(1 + k * min(accepted_fraction, 1.0), k)
    return replace(deployment, speculation=replace(speculation, acceptance_rate=rate))
