"""The plan that a page is held against: one replica of a scenario's answer, or of a plan.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.core.catalog import parse_json, read_text
from planner.core.quantities import PlannerError
from planner.facts.deployment import Deployment, Speculation, deploy_on
from planner.facts.workload import Workload
from planner.latency.speculation import acceptance_from_length
from planner.models.registry import model
from planner.planning.candidate import traffic
from planner.planning.scenario import Scenario, Target, load_scenario
from planner.planning.scenario_entries import engine_arguments
from planner.planning.search import search
from planner.studies.summary import subject


@dataclass(frozen=True)
class Planned:
    """One replica of a plan, its share of the traffic as far as that is known, and what is promised."""

    deployment: Deployment
    workload: Workload | None
    rate: float | None  # requests/s
    targets: tuple[Target, ...] = ()

    @classmethod
    def of(cls, deployment: Deployment, workload: Workload | None, targets: tuple[Target, ...] = ()) -> Planned:
        """One replica of `deployment` under its share of `workload`."""
        share = workload.share(deployment.layout.replicas) if workload else None
        return cls(deployment.with_replicas(1), share, share.rate if share else None, targets)


def planned_by(where: str | Path) -> Planned:
    """The plan of a scenario (its name or YAML file), or that of a plan.json; `PlannerError` for what is neither."""
    return _saved(Path(where)) if str(where).endswith(".json") else _of(load_scenario(where))


def _of(scenario: Scenario) -> Planned:
    deployment = subject(search(scenario))
    return Planned.of(deployment, traffic(scenario, deployment), scenario.service_level)


def _saved(path: Path) -> Planned:
    """What `planner plan --out` wrote; it does not say how long prompts and answers are."""
    said = parse_json(read_text(path), path.name)
    try:
        layout: dict[str, Any] = said["layout"]
        args: dict[str, Any] = dict(engine_arguments(said["engine_args"]))
        stored = said["quantization"]
        own = model(said["checkpoint"]).quantization.method
        drafting: dict[str, Any] | None = said["speculation"]
        speculation = None
        if drafting:
            draft = model(drafting["draft_model"]) if drafting.get("draft_model") else None
            named = {name: drafting[name] for name in ("method", "num_speculative_tokens", "acceptance_rate")}
            speculation = Speculation(**named, draft=draft)
        deployment = deploy_on(
            said["checkpoint"], said["gpu"], engine=said["engine"], engine_version=said["engine_version"],
            quantization=stored if stored not in (own, "none") else None, speculation=speculation,
            **{name: size for name, size in layout.items() if name != "replicas"}, **args,
        )  # fmt: skip
        level = said.get("service_level", ())
        targets = [Target(each["metric"], each["percentile"], each["limit_ms"] / 1e3) for each in level]
        rate = said.get("planned_rps")
        return Planned(deployment, None, rate / layout["replicas"] if rate else None, tuple(targets))
    except (KeyError, TypeError, AttributeError) as error:
        raise PlannerError(f"{path.name} is not a plan.json of this planner: it lacks {error}") from None


def with_acceptance(deployment: Deployment, share: float) -> Deployment:
    """The same with drafts of which so large a share of all drafted tokens is accepted."""
    drafting = deployment.speculation
    if drafting is None:
        return deployment
    k = drafting.num_speculative_tokens
    rate = acceptance_from_length(1 + k * min(share, 1.0), k)
    return replace(deployment, speculation=replace(drafting, acceptance_rate=rate))
