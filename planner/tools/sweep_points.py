"""What-ifs of a scenario: the points of a grid or a sample of its fields, and their answers."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError, add_error_context
from planner.core.readers import read_yaml
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import get_gpu
from planner.models.registry import load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment
from planner.planning.evaluation import evaluate_candidate
from planner.planning.plan import SMALLEST, Plan
from planner.planning.scenario import (
    CandidateGpu,
    Scenario,
    apply_overrides,
    find_scenario_file,
    parse_scenario,
)
from planner.planning.scenario_schema import MAX_GPUS_PER_KIND
from planner.planning.search import search_analytically, search_deployments
from planner.planning.table_rows import build_output_row
from planner.planning.tolerance import simulate_candidate
from planner.tools.answer_store import Answer

MAX_SWEEP_POINTS = 10**6
MAX_SWEEP_VALUES = 4 * 10**6
"""Points times fields of one sweep."""
GPU_FIELDS = ("gpus", "deployment.gpu")
"""Fields, and those below them, whose values are kinds of GPU to choose from."""
MIN_LOG_RANGE_END = 1e-12
LayoutSize = Annotated[int, Field(ge=1, le=MAX_GPUS_PER_KIND)]
BoundedNumber = Annotated[float, Field(ge=-(2**40), le=2**40)]
FieldValue = float | int | bool | str | dict[str, Any] | list[Any]
SweepPoint = Mapping[str, Any]
"""Values by the scenario's field that they set, such as `workload.rate`."""


class RangeEntry(StrictEntry):
    """Numbers from `low` to `high`, evenly spaced or (`log`) by equal factors.

    A grid needs their number, `points`; a sample has as many as it has points.
    """

    low: BoundedNumber
    high: BoundedNumber
    points: Annotated[int, Field(ge=2, le=MAX_SWEEP_POINTS)] | None = None
    scale: Literal["linear", "log"] = "linear"
    whole: bool = False

    def interpolate(self, fraction: float) -> float:
        """Return the number at `fraction` of the way from `low` to `high`."""
        if self.scale == "log" and min(self.low, self.high) < MIN_LOG_RANGE_END:
            raise PlannerError(
                f"a range by factors (log) lies above {MIN_LOG_RANGE_END:g}, got {self.low:g} to"
                f" {self.high:g}"
            )
        if self.scale == "linear":
            value = self.low + fraction * (self.high - self.low)
        else:
            value = self.low * (self.high / self.low) ** fraction
        return round(value) if self.whole else value


FieldValues = Annotated[
    Annotated[list[FieldValue], Field(min_length=1), Tag("list")]
    | Annotated[RangeEntry, Tag("range")],
    Discriminator(lambda values: "range" if isinstance(values, dict) else "list"),
]


class SampleEntry(StrictEntry):
    """Random points that cover every field evenly (Latin hypercube)."""

    points: Annotated[int, Field(ge=1, le=MAX_SWEEP_POINTS)]
    seed: Annotated[int, Field(ge=0, le=2**32)] = 0
    fields: Annotated[dict[str, FieldValues], Field(min_length=1)]


class DeploymentEntry(StrictEntry):
    """The deployment to predict: GPU (by default the scenario's first), layout and formats."""

    gpu: str | None = None
    tp: LayoutSize = 1
    pp: LayoutSize = 1
    dp: LayoutSize = 1
    ep: LayoutSize = 1
    dcp: LayoutSize = 1
    replicas: LayoutSize = 1
    quantization: str = "checkpoint"
    kv_cache_dtype: str = "auto"


class SweepEntry(StrictEntry):
    """A sweep file: a scenario, what to answer at every point, and the points."""

    answer: Literal["predict", "plan"]
    scenario: str
    replay: bool | None = None
    deployment: DeploymentEntry | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, FieldValues] = Field(default_factory=dict)
    sample: SampleEntry | None = None


@dataclass(frozen=True)
class SweepPoints:
    """A scenario's fields and the points of a sweep, each of which sets some of them."""

    asked: Literal["predict", "plan"]
    replay: bool
    fields: Mapping[str, Any]  # of the scenario; and `deployment`, for predictions
    name: str
    folder: Path  # of the scenario's file
    points: Sequence[SweepPoint]
    files: tuple[Path, ...]
    columns: ClassVar = ("point",)  # of the table, before those of its rows
    line_end: ClassVar = "\n"  # of the table as CSV

    def build_scenario_fields(self, point: SweepPoint) -> dict[str, Any]:
        """Return the scenario's fields with those of `point` set."""
        return apply_overrides(self.fields, point, self.name)

    def describe_question(self, point: SweepPoint) -> object:
        """Return all that decides the answer to a point, as JSON values.

        The scenario's title and the files to write do not count.
        """
        fields = self.build_scenario_fields(point)
        fields = {name: v for name, v in fields.items() if name not in ("question", "files")}
        return [self.asked, self.replay, fields]

    def answer(self, point: SweepPoint) -> Answer:
        """Return the columns of a point's answer; `PlannerError` if the point is wrong."""
        fields = self.build_scenario_fields(point)
        deployment_fields = fields.pop("deployment", None)
        scenario = parse_scenario(fields, self.name, self.folder)
        assumed: Answer = {"assumed": " ".join(scenario.assumptions)}
        if self.asked == "predict":
            entry = validate_entry(DeploymentEntry, deployment_fields, "deployment")
            return _build_columns(_predict_point(scenario, entry, self.replay)) | assumed
        plan = search_deployments(scenario) if self.replay else search_analytically(scenario)
        columns = {"verdict": plan.verdict, "binding": _name_binding_limit(plan), **assumed}
        if self.replay and (day := plan.autoscaling):
            columns |= {
                "replicas_fewest": min(day.replicas),
                "replicas_most": max(day.replicas),
                "hours_missed": len(day.violated_hours),
                "gpu_hours": day.gpu_hours,
                "gpu_hours_fixed": day.fixed_gpu_hours,
            }
        if plan.best is None:
            return {"status": "nothing_meets", **columns, "error": str(plan.binding_constraint)}
        missed = (
            {} if plan.chosen else {"status": "nothing_meets", "error": "; ".join(plan.reasons)}
        )
        return _build_columns(plan.best) | columns | missed

    def build_table(self, answers: Sequence[Answer]) -> list[Answer]:
        """Return the rows of the table: what each point sets, then its answer.

        Where kinds of GPU vary, `cheapest` is "yes" if a point costs least of those that hold and
        differ from it in their GPUs alone.
        """
        groups = defaultdict[str, list[tuple[float, int]]](list)
        has_gpus = False
        for k, (point, answer) in enumerate(zip(self.points, answers, strict=True)):
            others = {name: v for name, v in point.items() if not name.startswith(GPU_FIELDS)}
            has_gpus |= len(others) < len(point)
            usd = answer.get("usd_per_hour")
            if answer.get("verdict") == "holds" and isinstance(usd, float):
                groups[json.dumps(others, sort_keys=True)].append((usd, k))
        cheapest = {min(group)[1] for group in groups.values()}
        return [
            {
                "point": k,
                **{
                    f"set.{name}": json.dumps(value) if isinstance(value, dict | list) else value
                    for name, value in point.items()
                },
                **({"cheapest": "yes" if k in cheapest else ""} if has_gpus else {}),
                **answer,
            }
            for k, (point, answer) in enumerate(zip(self.points, answers, strict=True))
        ]


def read_sweep(path: Path, calibration: Path | None = None) -> SweepPoints:
    """Read a sweep from a YAML file, to which its scenario's path is relative.

    `calibration` stands in for the scenario's own. Raises `PlannerError` for a file that cannot be
    used.
    """
    entry = validate_entry(SweepEntry, read_yaml(path), path.name)
    if bool(entry.grid) == bool(entry.sample):
        raise PlannerError(
            f"{path.name}: give either a grid or a sample, such as grid: {{workload.rate: [1, 2]}}"
        )
    source = find_scenario_file(entry.scenario, path.parent)
    data = read_yaml(source)
    if not isinstance(data, dict):
        raise PlannerError(f"{source.name}: expected fields such as model, gpus and workload")
    fields = apply_overrides(data, entry.set, source.name)
    if calibration:
        fields["calibration"] = str(calibration.resolve())
    if entry.answer == "predict":
        fields["deployment"] = (entry.deployment or DeploymentEntry()).model_dump(exclude_none=True)
    swept = {**entry.grid, **(entry.sample.fields if entry.sample else {}), **entry.set}
    if entry.answer == "plan" and (
        entry.deployment or any(name.split(".")[0] == "deployment" for name in swept)
    ):
        raise PlannerError(
            f"{path.name}: a plan chooses its deployment; sweep that with answer: predict"
        )
    with add_error_context(path.name):
        points = _draw_sample(entry.sample) if entry.sample else _build_grid(entry.grid)
        replay = entry.answer == "plan" if entry.replay is None else entry.replay
        files = (path, source, *([calibration] if calibration else []))
        folder = source.parent.resolve()
        sweep = SweepPoints(entry.answer, replay, fields, source.stem, folder, points, files)
        sweep.build_scenario_fields(points[0])
    return sweep


def _build_grid(fields: Mapping[str, list[FieldValue] | RangeEntry]) -> list[SweepPoint]:
    """Return every combination of the fields' values, the last field changing fastest."""
    values: dict[str, list[FieldValue]] = {}
    for name, axis in fields.items():
        if not isinstance(axis, RangeEntry):
            values[name] = axis
        elif axis.points:
            fractions = (k / (axis.points - 1) for k in range(axis.points))
            values[name] = list(dict.fromkeys(map(axis.interpolate, fractions)))
        else:
            raise PlannerError(f"{name}: a range in a grid needs its number of points")
    _check_sweep_size(math.prod(map(len, values.values())), len(values))
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def _draw_sample(sample: SampleEntry) -> list[SweepPoint]:
    """Return a Latin hypercube: every field takes as many values as there are points, once each."""
    _check_sweep_size(sample.points, len(sample.fields))
    rng, columns = Random(sample.seed), []
    fractions = [(k + 0.5) / sample.points for k in range(sample.points)]
    for axis in sample.fields.values():
        values = [
            axis.interpolate(f) if isinstance(axis, RangeEntry) else axis[int(f * len(axis))]
            for f in fractions
        ]
        columns.append(rng.sample(values, sample.points))
    return [dict(zip(sample.fields, point, strict=True)) for point in zip(*columns, strict=True)]


def _check_sweep_size(num_points: int, num_fields: int) -> None:
    if num_points * num_fields > MAX_SWEEP_VALUES:
        raise PlannerError(
            f"{num_points:,} points of {num_fields:,} fields are more than"
            f" {MAX_SWEEP_VALUES:,} values"
        )


def _name_binding_limit(plan: Plan) -> str:
    """Name the limit that keeps the plan from being smaller, such as "p95 TPOT".

    Where no smaller deployment is known, it is the one of what is chosen that tolerates least.
    """
    best, constraint = plan.best, plan.binding_constraint.constraint
    if constraint != SMALLEST or best is None or best.prediction.num_gpus_billed == 1:
        return constraint
    limits = sorted(best.limits, key=attrgetter("tolerance_sigmas"))
    return limits[0].name if limits else constraint


def _predict_point(scenario: Scenario, entry: DeploymentEntry, simulate: bool) -> Candidate:
    """Evaluate the deployment of `entry` under the scenario's workload."""
    gpu = get_gpu(entry.gpu) if entry.gpu else scenario.gpus[0].gpu
    model = load_model(
        scenario.model,
        quantization=None if entry.quantization == "checkpoint" else entry.quantization,
    )
    layout = ParallelLayout(entry.tp, entry.pp, entry.dp, entry.ep, entry.dcp)
    if reason := explain_illegal_layout(model, layout, layout.gpus_per_replica, scenario.engine):
        raise PlannerError(reason)
    speculation = (
        scenario.speculation.to_config()
        if scenario.speculation and scenario.speculation.allowed
        else None
    )
    candidate_gpu = next(
        (candidate for candidate in scenario.gpus if candidate.gpu.name == gpu.name), None
    ) or CandidateGpu(gpu, layout.num_gpus * entry.replicas)
    deployment = build_deployment(
        scenario, candidate_gpu, model, layout, entry.kv_cache_dtype, speculation
    )
    candidate = evaluate_candidate(scenario, deployment, entry.replicas)
    return (
        simulate_candidate(scenario, candidate)
        if simulate and candidate.prediction.can_start
        else candidate
    )


def _build_columns(candidate: Candidate) -> Answer:
    """Return the columns of a candidate and of its prediction."""
    deployment, month = candidate.deployment, candidate.prediction.usd_per_month
    verdict = (
        "nothing_meets"
        if not candidate.is_feasible
        else "at_risk"
        if candidate.at_risk
        else "holds"
    )
    return {
        "status": "ok",
        "verdict": verdict,
        "probability": candidate.probability,
        "binding": "",
        "figures": "replay" if candidate.is_simulated else "closed form",
        "gpu": deployment.gpu.name,
        "gpus": sum(pool.num_gpus for pool in candidate.prediction.pools),
        "gpus_rented": candidate.prediction.num_gpus_billed,
        **vars(deployment.layout),
        "pools": candidate.description if candidate.is_disaggregated else "",
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto",
        "max_num_seqs": deployment.args.max_num_seqs,
        "max_model_len": deployment.args.max_model_len,
        "misses": "; ".join(candidate.violations),
        "margin": candidate.limit_utilization,
        **build_output_row(candidate.prediction),
        "usd_per_month": month.mid if month else None,
    }
