"""Read a sweep file: a scenario, and the points at which it is answered, a grid or a sample."""

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

MAX_SWEEP_POINTS = 10**6
MAX_SWEEP_VALUES = 4 * 10**6
"""Points times fields of one sweep."""
MIN_LOG_RANGE_START = 1e-12
LayoutSize = Annotated[int, Field(ge=1, le=MAX_GPUS_PER_KIND)]
BoundedNumber = Annotated[float, Field(ge=-(2**40), le=2**40)]
FieldValue = float | int | bool | str | dict[str, Any] | list[Any]
SweepPoint = Mapping[str, FieldValue]
"""Values by the scenario's field that they set, such as `workload.rate`."""


class RangeEntry(StrictEntry):
    """Numbers from `low` to `high`, evenly spaced or (`log`) by equal factors.

    A grid needs their number, `points`; a sample has none.
    """

    low: BoundedNumber
    high: BoundedNumber
    points: Annotated[int, Field(ge=2, le=MAX_SWEEP_POINTS)] | None = None
    scale: Literal["linear", "log"] = "linear"
    whole: bool = False

    def interpolate(self, fraction: float) -> float:
        """Return the number at `fraction` of the way from `low` to `high`."""
        if self.scale == "linear":
            value = self.low + fraction * (self.high - self.low)
        else:
            value = self.low * (self.high / self.low) ** fraction
        return round(value) if self.whole else value


FieldValues = Annotated[
    Annotated[list[FieldValue], Tag("list")] | Annotated[RangeEntry, Tag("range")],
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
class SweepSpec:
    """A scenario's fields and the points of a sweep, each of which sets some of them."""

    answer: Literal["predict", "plan"]
    replay: bool
    fields: Mapping[str, Any]  # of the scenario; and `deployment`, for predictions
    name: str
    folder: Path  # of the scenario's file
    points: Sequence[SweepPoint]
    files: tuple[Path, ...]

    def build_scenario_fields(self, point: SweepPoint) -> dict[str, Any]:
        """Return the scenario's fields with those of `point` set."""
        return apply_overrides(self.fields, point, self.name)


def load_sweep_spec(path: Path) -> SweepSpec:
    """Read a sweep from a YAML file, to which its scenario's path is relative.

    Raises `PlannerError` for a file that cannot be used.
    """
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


def _build_grid(fields: Mapping[str, list[FieldValue] | RangeEntry]) -> list[SweepPoint]:
    """Return every combination of the fields' values, the last field changing fastest."""
    values = {name: _list_values(name, field_values) for name, field_values in fields.items()}
    if (num_points := math.prod(map(len, values.values()))) > MAX_SWEEP_POINTS:
        raise PlannerError(
            f"grid: {num_points:,} points, and at most {MAX_SWEEP_POINTS:,} are swept"
        )
    _check_sweep_size(num_points, len(values))
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def _check_sweep_size(num_points: int, num_fields: int) -> None:
    if num_points * num_fields > MAX_SWEEP_VALUES:
        raise PlannerError(
            f"{num_points:,} points of {num_fields:,} fields are more than"
            f" {MAX_SWEEP_VALUES:,} values"
        )


def _list_values(name: str, values: list[FieldValue] | RangeEntry) -> list[FieldValue]:
    if isinstance(values, list):
        if not values:
            raise PlannerError(f"{name}: give at least one value")
        return values
    if values.points is None:
        raise PlannerError(f"{name}: a range in a grid needs its number of points")
    _check_range(name, values)
    fractions = (k / (values.points - 1) for k in range(values.points))
    return list(dict.fromkeys(map(values.interpolate, fractions)))


def _check_range(name: str, range_entry: RangeEntry) -> None:
    if range_entry.high < range_entry.low or (
        range_entry.scale == "log" and range_entry.low < MIN_LOG_RANGE_START
    ):
        ends = f"{range_entry.low:g} to {range_entry.high:g}"
        raise PlannerError(
            f"{name}: a range goes up, and by factors from {MIN_LOG_RANGE_START:g} on, got {ends}"
        )


def _sample_points(sample: SampleEntry) -> list[SweepPoint]:
    """Return a Latin hypercube: every field takes as many values as there are points, once each."""
    from scipy.stats import qmc

    _check_sweep_size(sample.points, len(sample.fields))
    for name, field_values in sample.fields.items():
        if isinstance(field_values, list):
            _list_values(name, field_values)
        elif field_values.points is None:
            _check_range(name, field_values)
        else:
            raise PlannerError(f"{name}: a range in a sample has no number of points of its own")
    rows = qmc.LatinHypercube(len(sample.fields), rng=sample.seed).random(sample.points)
    return [
        {
            name: (
                values[int(fraction * len(values))]
                if isinstance(values, list)
                else values.interpolate(float(fraction))
            )
            for (name, values), fraction in zip(sample.fields.items(), row, strict=True)
        }
        for row in rows
    ]
