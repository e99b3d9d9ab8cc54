"""What a sweep's file asks: a question, and the points at which it is asked, a grid or a sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError, add_error_context
from planner.core.readers import read_yaml
from planner.planning.scenario import apply_overrides, find_scenario_file
from planner.planning.scenario_schema import MAX_GPUS_PER_KIND

MAX_SWEEP_POINTS, MAX_SWEEP_VALUES = 10**6, 4 * 10**6
"""Of one sweep: points, and fields that all of them set together."""
MIN_LOG_RANGE_START = 1e-12
"""Where a range by factors begins."""
LayoutSize = Annotated[int, Field(ge=1, le=MAX_GPUS_PER_KIND)]
BoundedNumber = Annotated[float, Field(ge=-(2**40), le=2**40)]
FieldValue = float | int | bool | str | dict[str, Any] | list[Any]


class RangeEntry(StrictEntry):
    """Numbers from `low` to `high`, evenly apart or (`log`) by equal factors; `points` of them in a grid."""

    low: BoundedNumber
    high: BoundedNumber
    points: Annotated[int, Field(ge=2, le=MAX_SWEEP_POINTS)] | None = None
    scale: Literal["linear", "log"] = "linear"
    whole: bool = False

    def interpolate(self, share: float) -> float:
        """The number that lies `share` of the way from `low` to `high`."""
        if self.scale == "linear":
            value = self.low + share * (self.high - self.low)
        else:
            value = self.low * (self.high / self.low) ** share
        return round(value) if self.whole else value


FieldValues = Annotated[
    Annotated[list[FieldValue], Tag("list")] | Annotated[RangeEntry, Tag("range")],
    Discriminator(lambda given: "range" if isinstance(given, dict) else "list"),
]


class SampleEntry(StrictEntry):
    """Points drawn at random, evenly over all fields (Latin hypercube)."""

    points: Annotated[int, Field(ge=1, le=MAX_SWEEP_POINTS)]
    seed: Annotated[int, Field(ge=0, le=2**32)] = 0
    fields: Annotated[dict[str, FieldValues], Field(min_length=1)]


class DeploymentEntry(StrictEntry):
    """What is predicted: one of the scenario's GPUs (its first) or another, the layout and the formats."""

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
    """A sweep file: the scenario, what is asked of every point, and the points, a grid or a sample."""

    answer: Literal["predict", "plan"]
    scenario: str
    replay: bool | None = None
    deployment: DeploymentEntry | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, FieldValues] = Field(default_factory=dict)
    sample: SampleEntry | None = None


@dataclass(frozen=True)
class SweepSpec:
    """The points of a sweep, each the fields that it sets, and the question that they are set in."""

    answer: Literal["predict", "plan"]
    replay: bool
    fields: Mapping[str, Any]  # of the scenario, and `deployment`
    name: str
    folder: Path  # of the scenario's file
    points: Sequence[Mapping[str, Any]]
    files: tuple[Path, ...]

    def build_scenario_fields(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The question with the fields of `point` set."""
        return apply_overrides(self.fields, point, self.name)


def load_sweep_spec(path: Path) -> SweepSpec:
    """The sweep in a YAML file; `PlannerError` for whatever is wrong in it. A scenario's path is relative to it."""
    entry = validate_entry(SweepEntry, read_yaml(path), path.name)
    if entry.answer == "plan" and entry.deployment:
        raise PlannerError(f"{path.name}, field deployment: a plan chooses it; leave it out")
    if bool(entry.grid) == bool(entry.sample):
        raise PlannerError(
            f"{path.name}: give either a grid or a sample, such as grid: {{workload.rate: [1, 2]}}"
        )
    source = find_scenario_file(entry.scenario, path.parent)
    data = read_yaml(source)
    if not isinstance(data, dict):
        raise PlannerError(f"{source.name}: expected fields such as model, gpus and workload")
    fields = apply_overrides(data, entry.set, source.name)
    if entry.answer == "predict":
        fields["deployment"] = (entry.deployment or DeploymentEntry()).model_dump(exclude_none=True)
    swept = entry.sample.fields if entry.sample else entry.grid
    if entry.answer == "plan" and any(
        name.split(".")[0] == "deployment" for name in (*swept, *entry.set)
    ):
        raise PlannerError(
            f"{path.name}: a plan chooses its deployment; sweep that with answer: predict"
        )
    with add_error_context(path.name):
        points = _sample_points(entry.sample) if entry.sample else _build_grid(entry.grid)
        sweep_spec = SweepSpec(
            entry.answer, entry.answer == "plan" if entry.replay is None else entry.replay, fields,
            source.stem,
            source.parent.resolve(), points, (path, source),
        )  # fmt: skip
        sweep_spec.build_scenario_fields(points[0])
    return sweep_spec


def _build_grid(fields: Mapping[str, list[FieldValue] | RangeEntry]) -> list[dict[str, Any]]:
    """Every combination of the fields' values, the last field changing fastest."""
    values = {name: _list_values(name, given) for name, given in fields.items()}
    if (many := math.prod(map(len, values.values()))) > MAX_SWEEP_POINTS:
        raise PlannerError(f"grid: {many:,} points, and at most {MAX_SWEEP_POINTS:,} are swept")
    _check_sweep_size(many, len(values))
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def _check_sweep_size(points: int, fields: int) -> None:
    if points * fields > MAX_SWEEP_VALUES:
        raise PlannerError(
            f"{points:,} points of {fields:,} fields are more than {MAX_SWEEP_VALUES:,} values"
        )


def _list_values(name: str, given: list[FieldValue] | RangeEntry) -> list[Any]:
    if isinstance(given, list):
        if not given:
            raise PlannerError(f"{name}: give at least one value")
        return given
    if given.points is None:
        raise PlannerError(f"{name}: a range in a grid needs its number of points")
    _check_range(name, given)
    return list(
        dict.fromkeys(given.interpolate(k / (given.points - 1)) for k in range(given.points))
    )


def _check_range(name: str, range_entry: RangeEntry) -> None:
    if range_entry.high < range_entry.low or (
        range_entry.scale == "log" and range_entry.low < MIN_LOG_RANGE_START
    ):
        ends = f"{range_entry.low:g} to {range_entry.high:g}"
        raise PlannerError(
            f"{name}: a range goes up, and by factors from {MIN_LOG_RANGE_START:g} on, got {ends}"
        )


def _sample_points(sample: SampleEntry) -> list[dict[str, Any]]:
    """Points of a Latin hypercube: each field takes as many different values as there are points, once each."""
    from scipy.stats import qmc

    _check_sweep_size(sample.points, len(sample.fields))
    for name, field_values in sample.fields.items():
        if isinstance(field_values, list):
            _list_values(name, field_values)
        elif field_values.points is None:
            _check_range(name, field_values)
        else:
            raise PlannerError(f"{name}: a range in a sample has no number of points of its own")
    shares = qmc.LatinHypercube(len(sample.fields), rng=sample.seed).random(sample.points)
    return [
        {
            name: (
                given[int(share * len(given))]
                if isinstance(given, list)
                else given.interpolate(float(share))
            )
            for (name, given), share in zip(sample.fields.items(), row, strict=True)
        }
        for row in shares
    ]
