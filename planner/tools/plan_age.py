"""Compare a saved plan with itself at today's prices, facts and measurements."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from planner import __version__
from planner.core.catalog import CATALOG_DIR, StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.files import get_report_date
from planner.core.intervals import Interval
from planner.core.readers import parse_json, read_text
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line
from planner.engines.engine import get_engine
from planner.hardware.prices import look_up_gpu_price
from planner.planning.candidate import Candidate
from planner.planning.planned_replica import PlannedReplica, load_planned_replica
from planner.planning.scenario import Scenario, list_scenarios
from planner.planning.search import Plan, search_deployments
from planner.planning.tolerance import state_deployment
from planner.tools.comparison import ComparisonRow, build_change_columns, format_table

Status = Literal["met", "at risk", "missed"]
Figure = tuple[float | None, float | None, float | None] | None
"""An interval in plan.json: expected, low, high; None for what is not finite."""
CATALOG_GROUPS = {
    "prices": ("prices.yaml",),
    "measurements": ("calibration/",),
    "engine facts": (
        "engines.yaml", "capabilities.yaml", "registries.yaml", "memory.yaml", "flags/",
    ),
}  # fmt: skip
"""What moves under a plan, and the beginnings of its catalogs' names."""
OTHER_CATALOGS = "GPUs, models and other facts"


@cache
def digest_catalogs() -> Mapping[str, str]:
    """Return a digest of the catalogs of each group."""
    digests = {group: hashlib.sha256() for group in (*CATALOG_GROUPS, OTHER_CATALOGS)}
    for path in sorted(path for path in CATALOG_DIR.rglob("*") if path.is_file()):
        name = path.relative_to(CATALOG_DIR).as_posix()
        if not name.startswith(("scenarios/", "validation/")):  # no plan depends on them
            groups = (group for group, names in CATALOG_GROUPS.items() if name.startswith(names))
            digest = digests[next(groups, OTHER_CATALOGS)]
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return {group: digest.hexdigest()[:16] for group, digest in digests.items()}


def describe_origin() -> dict[str, object]:
    """Return what a plan.json says of the day and the facts that it was made with."""
    made = {"date": get_report_date().isoformat(), "headroom": __version__}
    return {**made, "catalogs": dict(digest_catalogs())}


def find_saved_plan(name: str) -> Path | None:
    """Return the plan.json that `name` means, itself or its folder; None for a scenario."""
    path = Path(name)
    if path.suffix == ".json":
        return path
    is_folder = name not in list_scenarios() and (path / "plan.json").is_file()
    return path / "plan.json" if is_folder else None


class _Saved(StrictEntry):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Origin(_Saved):
    date: str
    headroom: str
    catalogs: dict[str, str]


class _SavedTarget(_Saved):
    metric: str
    percentile: str
    predicted_ms: Figure = None


class _SavedPlan(_Saved):
    """The figures of a plan.json that may move."""

    scenario: str
    made: _Origin | None = None
    probability: float = Field(ge=0, le=1)
    usd_per_hour: Figure = None
    price_source: str | None = None
    capacity_rps: Figure = None
    service_level: tuple[_SavedTarget, ...] = ()


def _read_figure(figure: tuple[float | None, float | None, float | None]) -> Interval:
    mid, lo, hi = (math.inf if end is None else end for end in figure)
    return Interval(lo, mid, hi)


@dataclass(frozen=True)
class PlanAge:
    """A saved plan, and what the same deployment does and costs with today's facts."""

    saved: _SavedPlan
    planned: PlannedReplica
    scenario: Scenario

    @cached_property
    def today(self) -> Candidate:
        """The saved deployment with today's facts."""
        deployment = self.planned.deployment.with_replicas(self.planned.num_replicas)
        return state_deployment(self.scenario, deployment)

    @cached_property
    def replanned(self) -> Plan | PlannerError:
        """The question planned anew, or why it cannot be: a format that is no longer known."""
        try:
            return search_deployments(self.scenario)
        except PlannerError as error:
            return error

    @property
    def planned_anew(self) -> str:
        """What is to rent today, in a sentence."""
        if isinstance(self.replanned, PlannerError):
            return f"not possible: {self.replanned}"
        return str(self.replanned.chosen or "nothing meets the targets")

    @property
    def moved(self) -> tuple[str, ...] | None:
        """What has changed since, by name; None if the plan does not say what it was made with."""
        if self.saved.made is None:
            return None
        then, now = self.saved.made.catalogs, digest_catalogs()
        groups = [group for group in now if then.get(group) != now[group]]
        return (*groups, *["Headroom itself"] * (self.saved.made.headroom != __version__))

    @property
    def newest_version(self) -> str:
        """The newest known version of the engine; empty if the plan has it."""
        engine = self.planned.deployment.engine
        newest = get_engine(engine.name, None).version
        return "" if newest == engine.version else newest

    @property
    def prices(self) -> tuple[str, str] | None:
        """The price of a GPU-hour then and now, in words; None if it has not moved."""
        price = look_up_gpu_price(self.planned.deployment.gpu, self.scenario.prices)
        then, now = self.saved.price_source or "", str(price) if price else "unknown"
        return None if not then or then == now else (then, now)

    @property
    def status(self) -> Status:
        """Whether the saved deployment meets the targets with today's facts."""
        if not self.today.is_feasible:
            return "missed"
        return "met" if self.today.is_confident else "at risk"

    @property
    def verdict(self) -> str:
        """The status in a sentence, with the probability then and now."""
        odds = f"probability {self.saved.probability:.0%} -> {self.today.probability:.0%}"
        if self.status == "met":
            return f"it still meets every target ({odds})"
        state = "is at risk" if self.status == "at risk" else "no longer meets its targets"
        return f"it {state} ({odds}): {self.today.shortfall}"

    @property
    def rows(self) -> list[ComparisonRow]:
        """Price, capacity and latencies, then and now."""
        now = self.today.prediction
        known: list[tuple[str, str, Figure, Interval | None]] = [
            ("$ per hour", "", self.saved.usd_per_hour, now.usd_per_hour_interval)
        ]
        if performance := now.performance:
            known.append(("capacity", "requests/s", self.saved.capacity_rps, performance.capacity))
            for then, target in zip(self.saved.service_level, self.planned.targets, strict=False):
                value = performance.get(target.metric, target.percentile) * 1e3
                known.append((target.name, "ms", then.predicted_ms, value))
        return [
            ComparisonRow(name, unit, _read_figure(then), value, worse="neither")
            for name, unit, then, value in known
            if then and value
        ]

    def __str__(self) -> str:
        table = format_table(self.rows, build_change_columns("planned", "today", "<28"))
        text = render_template("tools", "plan_age", age=self, table=table).strip("\n")
        return "\n".join(map(escape_to_one_line, text.split("\n")))

    def to_json(self) -> dict[str, object]:
        """Return the comparison for `--json`."""
        best = self.replanned.chosen if isinstance(self.replanned, Plan) else None
        return {
            "made": self.saved.made and self.saved.made.model_dump(exclude={"catalogs"}),
            "moved": self.moved,
            "status": self.status,
            "verdict": self.verdict,
            "probability": [self.saved.probability, round(self.today.probability, 4)],
            "quantities": {
                row.title: [row.expected and row.expected.as_json_list, row.measured.as_json_list]
                for row in self.rows
                if isinstance(row.measured, Interval)
            },
            "price": self.prices,
            "newest_engine_version": self.newest_version or None,
            "planned_anew": best
            and {"deployment": best.description, "usd_per_hour": best.usd_per_hour},
        }


def compare_plan_with_today(path: Path) -> PlanAge:
    """Compare the plan.json at `path` with itself at today's facts.

    Raises `PlannerError` for a file that is no plan, or does not state its question.
    """
    planned = load_planned_replica(path, unified=True)
    if planned.scenario is None:
        raise PlannerError(f"{path} does not state its question; plan its scenario again")
    data = parse_json(read_text(path), path.name)
    saved = validate_entry(_SavedPlan, data, f"{path.name} is not a plan.json of this planner")
    return PlanAge(saved, planned, planned.scenario)
