"""The plan that a page is held against: one replica of a scenario's answer, or of a plan.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError
from planner.core.readers import parse_json, read_text
from planner.engines.deployment import Deployment, SpeculationConfig, deploy_on
from planner.latency.speculative_decoding import infer_acceptance_rate
from planner.models.registry import load_model
from planner.planning.evaluation import get_candidate_workload
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.scenario_schema import coerce_engine_args
from planner.planning.search import get_reference_deployment, search_deployments
from planner.planning.slo import SloTarget
from planner.workload.workload import Workload


@dataclass(frozen=True)
class PlannedReplica:
    """One replica of a plan, its share of the traffic as far as that is known, and what is promised."""

    deployment: Deployment
    workload: Workload | None
    rate: float | None  # requests/s
    targets: tuple[SloTarget, ...] = ()

    @classmethod
    def from_deployment(
        cls, deployment: Deployment, workload: Workload | None, targets: tuple[SloTarget, ...] = ()
    ) -> PlannedReplica:
        """One replica of `deployment` under its share of `workload`."""
        share = workload.split(deployment.layout.replicas) if workload else None
        return cls(deployment.with_replicas(1), share, share.rate if share else None, targets)


def load_planned_replica(location: str | Path) -> PlannedReplica:
    """The plan of a scenario (its name or YAML file), or that of a plan.json; `PlannerError` for what is neither."""
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
    """What `planner plan --out` wrote; it does not say how long prompts and answers are."""
    said = parse_json(read_text(path), path.name)
    try:
        layout: dict[str, Any] = said["layout"]
        args: dict[str, Any] = dict(coerce_engine_args(said["engine_args"]))
        stored = said["quantization"]
        own = load_model(said["checkpoint"]).quantization.method
        drafting: dict[str, Any] | None = said["speculation"]
        speculation = None
        if drafting:
            draft = load_model(drafting["draft_model"]) if drafting.get("draft_model") else None
            named = {
                name: drafting[name]
                for name in ("method", "num_speculative_tokens", "acceptance_rate")
            }
            speculation = SpeculationConfig(**named, draft=draft)
        deployment = deploy_on(
            said["checkpoint"], said["gpu"], engine=said["engine"],
            engine_version=said["engine_version"],
            quantization=stored if stored not in (own, "none") else None, speculation=speculation,
            **{name: size for name, size in layout.items() if name != "replicas"}, **args,
        )  # fmt: skip
        level = said.get("service_level", ())
        targets = [
            SloTarget(each["metric"], each["percentile"], each["limit_ms"] / 1e3) for each in level
        ]
        rate = said.get("planned_rps")
        return PlannedReplica(
            deployment, None, rate / layout["replicas"] if rate else None, tuple(targets)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PlannerError(
            f"{path.name} is not a plan.json of this planner: it lacks {error}"
        ) from None


def with_acceptance(deployment: Deployment, share: float) -> Deployment:
    """The same with drafts of which so large a share of all drafted tokens is accepted."""
    drafting = deployment.speculation
    if drafting is None:
        return deployment
    k = drafting.num_speculative_tokens
    rate = infer_acceptance_rate(1 + k * min(share, 1.0), k)
    return replace(deployment, speculation=replace(drafting, acceptance_rate=rate))
