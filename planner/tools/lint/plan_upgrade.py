"""Compare a plan at its engine's version with the same plan at another one."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.number_format import format_number
from planner.core.templates import render_template
from planner.core.text import format_count
from planner.core.units import GIB
from planner.deploy.launch_spec import build_deployment_launch
from planner.engines.deployment import Deployment
from planner.engines.engine import get_engine
from planner.engines.engine_args import EngineArgs
from planner.engines.metric_names import get_metric_names
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.parallelism.start_gate import explain_refused_start
from planner.planning.candidate import Candidate
from planner.planning.planned_replica import PlannedReplica, load_planned_replica
from planner.planning.prediction import Prediction
from planner.planning.search import Plan, search_deployments
from planner.planning.slo import SloTarget
from planner.planning.tolerance import state_deployment
from planner.tools.comparison import ComparisonRow, WorseSide, build_change_columns, format_table
from planner.tools.lint.deployment_reader import build_command_deployment
from planner.tools.lint.findings import LINT_EXIT_CODES, LintFinding, judge_findings
from planner.tools.lint.option_checks import check_command
from planner.tools.lint.source_reader import read_source
from planner.tools.lint.upgrade import check_upgrade
from planner.workload.workload import Workload

MEMORY_ROWS: dict[tuple[str, str], Callable[[MemoryPlan], Interval]] = {
    ("weights", "GiB"): lambda memory: memory.weights / GIB,
    ("activation peak", "GiB"): lambda memory: memory.activation / GIB,
    ("CUDA graphs", "GiB"): lambda memory: memory.cudagraph / GIB,
    ("other memory", "GiB"): lambda memory: memory.non_torch / GIB,
    ("KV cache", "GiB"): lambda memory: memory.kv_available / GIB,
    ("KV cache", "tokens"): lambda memory: (
        memory.kv_available * (memory.pool.reported_tokens / max(memory.kv_available.mid, 1.0))
    ),
}
"""What a memory plan states of a GPU, by name and unit."""


def compare_memory(before: Deployment, after: Deployment) -> Iterator[ComparisonRow]:
    """Yield what changes in the memory of a GPU."""
    plans = get_memory_plan(before), get_memory_plan(after)
    for (name, unit), read in MEMORY_ROWS.items():
        worse: WorseSide = "lower" if unit == "tokens" else "neither"
        yield ComparisonRow(name, unit, read(plans[0]), read(plans[1]), worse=worse)


def compare_predictions(
    before: Prediction, after: Prediction, targets: Iterable[SloTarget]
) -> Iterator[ComparisonRow]:
    """Yield what changes in capacity, the latencies of `targets` and cost; nothing if one fails."""
    first, second = before.performance, after.performance
    if first is None or second is None:
        return
    if first.capacity and second.capacity:
        yield ComparisonRow(
            "capacity", "requests/s", first.capacity, second.capacity, worse="lower"
        )
    for target in targets:
        times = [each.get(target.metric, target.percentile) * 1e3 for each in (first, second)]
        yield ComparisonRow(target.name, "ms", times[0], times[1])
    costs = before.usd_per_mtok_output, after.usd_per_mtok_output
    if costs[0] and costs[1]:
        yield ComparisonRow("$ per M output tokens", "", costs[0], costs[1], worse="neither")


def describe_load(workload: Workload | None) -> str:
    """Describe the load of capacity, latencies and cost; empty if it is not known."""
    if workload is None:
        return ""
    if workload.rate:
        return f"at {format_number(workload.rate)} requests/s"
    return f"with {format_count(workload.concurrency or 0, 'request')} in flight"


def compare_engine_args(before: EngineArgs, after: EngineArgs) -> dict[str, tuple[object, object]]:
    """Return the arguments that differ, with both values."""
    pairs = {name: (value, getattr(after, name)) for name, value in vars(before).items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class PlanUpgrade:
    """A planned replica at two versions of its engine."""

    planned: PlannedReplica
    after: Deployment  # one replica, with the defaults of the new version
    findings: tuple[LintFinding, ...]  # about the plan's own command

    @property
    def before(self) -> Deployment:
        """The planned replica."""
        return self.planned.deployment

    @property
    def changed_arguments(self) -> dict[str, tuple[object, object]]:
        """Engine arguments that the same command gets from other defaults."""
        return compare_engine_args(self.before.args, self.after.args)

    @property
    def renamed_metrics(self) -> dict[str, str]:
        """Metrics that alerts and dashboards read under another name, or no longer."""
        old, new = (get_metric_names(each.engine).names for each in (self.before, self.after))
        return {
            name: new.get(role) or "none"
            for role, name in old.items()
            if name and new.get(role) != name
        }

    @property
    def load(self) -> str:
        """The load of the rows about capacity, latencies and cost; empty if there are none."""
        return describe_load(self.candidates[0].prediction.workload) if self.candidates else ""

    @cached_property
    def candidates(self) -> tuple[Candidate, Candidate] | None:
        """The whole plan at both versions; None if its traffic is not known."""
        scenario = self.planned.scenario
        if scenario is None:
            return None
        before, after = (
            state_deployment(
                replace(scenario, engine=replica.engine, other_engines=()),
                replica.with_replicas(self.planned.num_replicas),
            )
            for replica in (self.before, self.after)
        )
        return before, after

    @cached_property
    def replanned(self) -> Plan | None:
        """The question planned anew at the new version; None if it is not known, or has no plan."""
        if (scenario := self.planned.scenario) is None:
            return None
        with suppress(PlannerError):  # such as a format that this version does not have
            return search_deployments(replace(scenario, engine=self.after.engine, other_engines=()))
        return None

    @property
    def rows(self) -> list[ComparisonRow]:
        """Memory of a GPU, then capacity, targets and cost of the whole plan."""
        rows = [*compare_memory(self.before, self.after)]
        if self.candidates:
            before, after = (candidate.prediction for candidate in self.candidates)
            rows += compare_predictions(before, after, self.planned.targets)
        return rows

    @cached_property
    def start_refusal(self) -> str:
        """Why the plan does not start at the new version; empty if it does."""
        memory = get_memory_plan(self.after)
        return explain_refused_start(self.after) or ("" if memory.can_start else memory.reason)

    @property
    def verdict(self) -> str:
        """Whether the plan still meets its targets at the new version, in a sentence."""
        if self.start_refusal:
            return f"the plan does not start: {self.start_refusal}"
        if self.candidates is None:
            return "this plan.json does not state its question: memory and options only"
        before, after = self.candidates
        odds = f"{before.probability:.0%} -> {after.probability:.0%}"
        if after.is_confident:
            return f"the plan still meets every target (probability {odds})"
        state = "is at risk" if after.is_feasible else "no longer meets its targets"
        return f"the plan {state} ({odds}): {after.shortfall}"

    @property
    def exit_code(self) -> int:
        """0: nothing to do; 3: something is risky or at risk; 1: something must change."""
        verdict = judge_findings(self.findings)
        after = self.candidates[1] if self.candidates else None
        if self.start_refusal or (after and not after.is_feasible):
            verdict = "mend"
        elif verdict == "ok" and after and not after.is_confident:
            verdict = "at_risk"
        return LINT_EXIT_CODES[verdict]

    def __str__(self) -> str:
        columns = build_change_columns(self.before.engine.version, self.after.engine.version, "<28")
        table = format_table(self.rows, columns)
        return render_template("tools/lint", "upgrade", upgrade=self, table=table).strip("\n")

    def to_json(self) -> dict[str, object]:
        """Return the comparison for `--json`."""
        best = self.replanned and self.replanned.chosen
        return {
            "from": self.before.engine.version,
            "to": self.after.engine.version,
            "verdict": self.verdict,
            "quantities": {
                row.title: [
                    side.as_json_list
                    for side in (row.expected, row.measured)
                    if isinstance(side, Interval)
                ]
                for row in self.rows
            },
            "arguments": {name: list(pair) for name, pair in self.changed_arguments.items()},
            "flags": [dict(vars(finding)) for finding in self.findings],
            "metrics": self.renamed_metrics,
            "planned_anew": best
            and {"deployment": best.description, "usd_per_hour": best.usd_per_hour},
        }


def compare_plan_versions(plan: str | Path, to: str) -> PlanUpgrade:
    """Compare the `plan` that `headroom plan --out` wrote with itself at engine version `to`.

    The command stays as it is, so that what it leaves out gets the defaults of `to`. Raises
    `PlannerError` if the version is not known.
    """
    planned = load_planned_replica(plan, unified=True)
    before = planned.deployment
    engine = replace(get_engine(before.engine.name, to), calibration=before.engine.calibration)
    (command,) = read_source(shlex.join(build_deployment_launch(before).command)).commands
    current = before.engine.version
    checked = check_command(command, current)
    changes = {}
    try:
        old, new = (
            build_command_deployment(check_command(command, version), before.gpu.name, version).args
            for version in (current, to)
        )
        changes = {name: value for name, (_, value) in compare_engine_args(old, new).items()}
    except PlannerError:  # the findings say what the new version rejects
        pass
    after = replace(before, engine=engine).with_args(**changes)
    return PlanUpgrade(planned, after, tuple(check_upgrade(checked, to)))
