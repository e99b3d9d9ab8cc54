"""Review a change of commands, compose files, manifests or Helm values, for a pull request."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from markupsafe import Markup

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.redaction import MASK, redact_json, redact_text
from planner.core.templates import render_template
from planner.core.text import escape_markdown, escape_to_one_line, format_count
from planner.engines.argument_names import load_argument_names
from planner.memory.memory_plan import MEMORY_STATUSES
from planner.planning.argument_advice import DEFAULT_OUTPUT_TOKENS, DEFAULT_PROMPT_TOKENS
from planner.planning.candidate import Candidate
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario import Scenario
from planner.planning.slo import SloTarget
from planner.planning.tolerance import state_deployment
from planner.tools.comparison import (
    ComparisonRow,
    build_change_columns,
    format_table,
)
from planner.tools.lint.command_plan import CommandPlan
from planner.tools.lint.findings import (
    LINT_EXIT_CODES,
    LintFinding,
    ReportVerdict,
    judge_findings,
    select_new_findings,
)
from planner.tools.lint.plan_upgrade import (
    compare_memory,
    compare_predictions,
    describe_load,
)
from planner.tools.lint.report import CommandReport, LintReport, lint
from planner.tools.lint.shown_values import is_shown_option, show_variable
from planner.workload.workload import Workload

FailPolicy = Literal["fix", "risky", "never"]
FAILING_VERDICTS: dict[FailPolicy, tuple[ReportVerdict, ...]] = {
    "fix": ("mend",),
    "risky": ("mend", "at_risk"),
    "never": (),
}
"""Verdicts that fail a check, by policy."""
SHOWN_LATENCIES = tuple(SloTarget(metric, "p95", 1.0) for metric in ("ttft", "tpot"))
"""Latencies that are compared if no scenario sets limits."""
MAX_CELL_LENGTH = 200
MIN_LOSS_FRACTION = 0.2
"""Fraction of the KV cache, the capacity or a latency whose loss is reported."""


@dataclass(frozen=True)
class SettingChange:
    """One option, variable or default before and after; None where it is not set."""

    name: str
    before: str | None
    after: str | None
    defaults: tuple[str | None, str | None] = (None, None)  # in effect where it is not set


@dataclass(frozen=True)
class ServerReview:
    """One server before and after; None on the side on which nothing starts it."""

    before: CommandReport | None
    after: CommandReport | None
    scenario: Scenario | None = None

    @property
    def title(self) -> str:
        """Where the server is started, and by which engine."""
        command = (self.after or self.before).checked.command  # type: ignore[union-attr]
        return f"{command.where}, {command.engine}" if command.where else command.engine

    @cached_property
    def options(self) -> tuple[SettingChange, ...]:
        """Written options that differ, and then arguments whose defaults do."""
        before, after = (_list_settings(report) for report in (self.before, self.after))
        effective = self._list_effective_arguments()
        unset = (None, None)
        written = [
            SettingChange(
                name,
                before[name].shown if name in before else None,
                after[name].shown if name in after else None,
                effective.get(name, unset),
            )
            for name in dict.fromkeys((*before, *after))
            if name not in before or name not in after or before[name].value != after[name].value
        ]
        names = {change.name for change in written}
        defaults = (
            SettingChange(f"{name} (default)", *values)
            for name, values in effective.items()
            if name not in names and values[0] != values[1]
        )
        return (*written, *defaults)

    def _list_effective_arguments(self) -> dict[str, tuple[str | None, str | None]]:
        """Return what each argument is before and after, by its option; empty without plans."""
        if self.plans is None:
            return {}
        old, new = (plan.deployment for plan in self.plans)
        names = load_argument_names(new.engine.name).engine_names
        return {
            f"--{names.get(name, name).replace('_', '-')}": (
                None if value is None else str(value),
                None if (other := getattr(new.args, name)) is None else str(other),
            )
            for name, value in vars(old.args).items()
        }

    @property
    def plans(self) -> tuple[CommandPlan, CommandPlan] | None:
        """The plans of both sides; None if a side has none."""
        old, new = _get_plan(self.before), _get_plan(self.after)
        return (old, new) if old and new else None

    @cached_property
    def candidates(self) -> tuple[Candidate | None, Candidate | None]:
        """Both sides under the scenario's traffic."""
        old, new = _get_plan(self.before), _get_plan(self.after)
        return self._state(old), self._state(new)

    def _state(self, plan: CommandPlan | None) -> Candidate | None:
        if plan is None or self.scenario is None:
            return None
        deployment = plan.deployment
        scenario = replace(self.scenario, engine=deployment.engine, other_engines=())
        return state_deployment(scenario, deployment)

    @cached_property
    def rows(self) -> list[ComparisonRow]:
        """Memory of a GPU, then capacity, latencies and cost; empty if a side is not planned."""
        if self.plans is None:
            return []
        old, new = self.plans
        return [*compare_memory(old.deployment, new.deployment), *self._list_performance(old, new)]

    def _list_performance(self, old: CommandPlan, new: CommandPlan) -> Iterator[ComparisonRow]:
        """Yield figures under the scenario, or else at the load of full slots of either side."""
        before, after = self.candidates
        if before and after and self.scenario:
            pair, targets = (before.prediction, after.prediction), self.scenario.slo_targets
        elif old.loads and new.loads:
            full = [_predict_full(plan) for plan in (old, new)]
            counts = [Interval.from_value(_count_in_flight(each)) for each in full]
            yield ComparisonRow(
                "requests in flight, at most", "", counts[0], counts[1], worse="neither"
            )
            paces = [each.performance.get("tpot", "p95") for each in full if each.performance]
            if counts[0] != counts[1] and len(paces) == 2:
                times = [pace * 1e3 for pace in paces]
                yield ComparisonRow("p95 TPOT with all slots taken", "ms", times[0], times[1])
            pair, targets = _predict_at_common_load(old, new), SHOWN_LATENCIES
            rates = [each.performance.output_tps for each in pair if each.performance]
            if len(rates) == 2:
                yield ComparisonRow("output tokens/s", "", rates[0], rates[1], worse="neither")
        else:
            return
        costs = [each.usd_per_hour_interval for each in pair]
        if costs[0] and costs[1]:
            yield ComparisonRow("GPUs", "$/h", costs[0], costs[1], worse="neither")
        yield from compare_predictions(*pair, targets)

    @property
    def table(self) -> list[Markup]:
        """The rows as lines of Markdown."""
        return format_table(
            self.rows, build_change_columns("before", "after", ">"), is_markdown=True
        )

    @property
    def load(self) -> str:
        """The load of the rows about capacity, latencies and cost; empty if there are none."""
        if self.plans is None:
            return ""
        if before := self.candidates[0]:
            return describe_load(before.prediction.workload)
        old, new = self.plans
        return describe_load(_find_common_load(old, new)) if old.loads and new.loads else ""

    @property
    def losses(self) -> list[str]:
        """What the change takes of the KV cache and the capacity, or adds to latencies, if it is much."""
        return [
            f"{row.name} {'rises' if row.ratio > 1 else 'falls'} by {row.loss:.0%},"
            f" from {row.format_value(row.expected)} to {row.format_value(row.measured)} {row.unit}"
            for row in self.rows
            if row.loss > MIN_LOSS_FRACTION
        ]

    @property
    def new_findings(self) -> tuple[LintFinding, ...]:
        """What has to be looked at now and did not before."""
        return select_new_findings(*map(_list_findings, (self.after, self.before)))

    @property
    def gone_findings(self) -> tuple[LintFinding, ...]:
        """What no longer has to be looked at."""
        return select_new_findings(*map(_list_findings, (self.before, self.after)))

    @property
    def risks(self) -> list[tuple[ReportVerdict, str]]:
        """What the change makes worse besides the findings: startup and targets."""
        risks = list[tuple[ReportVerdict, str]]()
        old, new = _get_plan(self.before), _get_plan(self.after)
        rank = MEMORY_STATUSES.index(new.memory.status) if new else 0
        if new and rank > (MEMORY_STATUSES.index(old.memory.status) if old else 0):
            state = "may not start" if rank == 1 else "does not start"
            enough = [remedy.change for remedy in new.remedies.enough] if new.remedies else []
            advice = f"; enough alone: {', '.join(enough)}" if enough else ""
            risk: ReportVerdict = "at_risk" if rank == 1 else "mend"
            risks.append((risk, f"{state}: {new.memory.reason}{advice}"))
        before, after = self.candidates
        if after and rank < 2 and not after.is_confident:
            if not after.is_feasible and (before is None or before.is_feasible):
                risks.append(("mend", f"does not meet the targets: {after.shortfall}"))
            elif after.is_feasible and (before is None or before.is_confident):
                risks.append(("at_risk", f"may miss the targets: {after.shortfall}"))
        if after is None and rank < 2:  # with a scenario its targets decide
            risks += [("at_risk", loss) for loss in self.losses]
        return risks

    @property
    def notes(self) -> list[str]:
        """What was not compared, and why."""
        reports = {"before": self.before, "after": self.after}
        return [
            *(
                f"{side} the change the server rejects its options; the memory is that of the fixed"
                " command"
                for side, report in reports.items()
                if report and report.refuses_to_start and report.plan
            ),
            *(
                f"not planned {side} the change: {report.not_planned_reason}"
                for side, report in reports.items()
                if report and report.not_planned_reason
            ),
        ]

    @property
    def is_changed(self) -> bool:
        """Whether anything differs."""
        return bool(
            self.options or self.new_findings or self.gone_findings
            or self.before is None or self.after is None
        )  # fmt: skip


@dataclass(frozen=True)
class ChangeReview:
    """What a change of a deployment's files does."""

    servers: tuple[ServerReview, ...]
    new_metrics: tuple[LintFinding, ...]  # and scripts and texts that were not judged
    gone_metrics: tuple[LintFinding, ...]
    notes: tuple[str, ...]
    gpu: str | None
    scenario: Scenario | None

    @property
    def changed_servers(self) -> list[ServerReview]:
        """The servers that differ."""
        return [server for server in self.servers if server.is_changed]

    @property
    def verdict(self) -> ReportVerdict:
        """What the change makes worse: `mend` has to be fixed, `at_risk` is risky."""
        findings = [*self.new_metrics, *(f for server in self.servers for f in server.new_findings)]
        verdicts = {verdict for server in self.servers for verdict, _ in server.risks}
        verdicts |= {judge_findings(findings)} - {"ok"}
        return "mend" if "mend" in verdicts else "at_risk" if verdicts else "ok"

    @property
    def heading(self) -> str:
        """The verdict, and how many of several servers change."""
        title = {"at_risk": "New risk", "mend": "Needs a fix"}.get(self.verdict, "No new risk")
        if self.verdict == "ok" and any(server.losses for server in self.servers):
            title = "No new risk, but a loss"
        changed = len(self.changed_servers)
        counts = f"{changed} of {format_count(len(self.servers), 'server')} changed"
        return title if changed == len(self.servers) == 1 else f"{title} ({counts})"

    def get_exit_code(self, fail_on: FailPolicy) -> int:
        """Return lint's exit code for the verdict if the policy fails it, else 0."""
        return LINT_EXIT_CODES[self.verdict] if self.verdict in FAILING_VERDICTS[fail_on] else 0

    @property
    def traffic(self) -> str:
        """The traffic of the latencies, in words."""
        if self.scenario:
            return f"{self.scenario.name}, all of it to one replica"
        return f"{DEFAULT_PROMPT_TOKENS:,} + {DEFAULT_OUTPUT_TOKENS} tokens a request"

    def to_markdown(self) -> str:
        """Return the review as a comment; no text of the files can be markup or a mention."""
        text = render_template(
            "tools/lint",
            "review.md",
            review=self,
            code=_format_code,
            value=_format_value,
            text=_format_text,
        )
        return redact_text(text)


def review_change(
    old: str, new: str, version: str | None = None, *, engine: str | None = None,
    gpu: str | None = None, scenario: Scenario | None = None,
) -> ChangeReview:  # fmt: skip
    """Compare what two command lines or files start; with a `gpu` also memory, latency and cost.

    An empty file starts nothing. `scenario` has the traffic and the targets of one replica. Raises
    `PlannerError` if neither side has a server, or one cannot be read.
    """
    if all(map(_is_empty_file, (old, new))):
        raise PlannerError(f"{old:.80} and {new:.80}: both are empty, one has to start a server")
    reports = [
        LintReport((), (), (), None, ())
        if _is_empty_file(what)
        else lint(
            what,
            version,
            engine=engine,
            gpu=gpu,
            workload=scenario.workload if scenario else None,
            is_confined=True,
        )
        for what in (old, new)
    ]
    before, after = ((*report.metrics, *report.programs) for report in reports)
    return ChangeReview(
        tuple(
            ServerReview(first, second, scenario if gpu else None)
            for first, second in _pair_commands(reports[0].commands, reports[1].commands)
        ),
        (*select_new_findings(after, before), *reports[1].unread),
        select_new_findings(before, after),
        tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        gpu,
        scenario if gpu else None,
    )


def _get_plan(report: CommandReport | None) -> CommandPlan | None:
    return report.plan if report else None


def _is_empty_file(what: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(what).is_file() and Path(what).stat().st_size == 0
    return False


def _pair_commands(
    old: Sequence[CommandReport], new: Sequence[CommandReport]
) -> Iterator[tuple[CommandReport | None, CommandReport | None]]:
    """Yield the servers of both sides by their places; one that is left on each side is the same."""
    left, added = list(old), list[CommandReport]()
    pairs = list[tuple[CommandReport | None, CommandReport | None]]()
    for report in new:
        place = report.checked.command.where
        same = next((each for each in left if each.checked.command.where == place), None)
        if same is None:
            added.append(report)
        else:
            left.remove(same)
            pairs.append((same, report))
    if len(left) == len(added) == 1:
        pairs.append((left.pop(), added.pop()))
    yield from pairs
    yield from ((None, report) for report in added)
    yield from ((report, None) for report in left)


class _Setting(NamedTuple):
    """What a command sets, and what may be shown of it."""

    value: str
    shown: str


def _list_settings(report: CommandReport | None) -> dict[str, _Setting]:
    """Return what a command sets, by name: version, image, model, options and environment."""
    if report is None:
        return {}
    checked, command = report.checked, report.checked.command
    settings = {"version": f"{command.engine} {checked.version}"}
    if command.setup and command.setup.image:
        settings["image"] = command.setup.image
    if checked.as_meant.positional:
        settings["model"] = " ".join(checked.as_meant.positional)
    for option in checked.as_meant.options:
        name = option.option.name if option.option else option.written.partition("=")[0]
        settings[name] = " ".join(option.words) or option.written
    shown = {
        name: redact_text(value) if is_shown_option(command.engine, name) or not name.startswith("-")
        else MASK
        for name, value in settings.items()
    }  # fmt: skip
    for name, value in command.config.items():
        settings[name], shown[name] = str(value), str(redact_json({name: value})[name])
    for name, value in command.environment.items():
        settings[f"{name}="] = value
        shown[f"{name}="] = show_variable(command.engine, name, value)
    return {name: _Setting(value, shown[name]) for name, value in settings.items()}


def _list_findings(report: CommandReport | None) -> tuple[LintFinding, ...]:
    return report.checked.findings if report else ()


def _count_in_flight(prediction: Prediction) -> int:
    return (prediction.workload and prediction.workload.concurrency) or 0


def _predict_full(plan: CommandPlan) -> Prediction:
    """Predict a side with as many requests in flight as its memory and its slots take."""
    fit = min(plan.sequences, plan.deployment.args.max_num_seqs)
    in_flight = max(fit, 1) * plan.deployment.num_engine_instances
    return predict(plan.deployment, replace(plan.workload, concurrency=in_flight))


def _find_common_load(old: CommandPlan, new: CommandPlan) -> Workload:
    in_flight = min(_count_in_flight(plan.loads[-1]) for plan in (old, new))
    return replace(old.workload, concurrency=in_flight)


def _predict_at_common_load(old: CommandPlan, new: CommandPlan) -> tuple[Prediction, Prediction]:
    """Predict both sides with as many requests in flight as either takes."""
    load = _find_common_load(old, new)
    return predict(old.deployment, load), predict(new.deployment, load)


def _format_code(text: object) -> Markup:
    """Return a code span for a cell of a table; it has no mentions and no markup."""
    line = escape_to_one_line(redact_text(str(text))).replace("`", "'")
    if len(line) > MAX_CELL_LENGTH:
        line = f"{line[:MAX_CELL_LENGTH]}..."
    return Markup(f"`{line}`".replace("|", "\\|")) if line.strip() else Markup("`''`")


def _format_value(written: str | None, default: str | None) -> Markup:
    """Return a cell of an option's value, or what is in effect where it is not set."""
    if written is not None:
        return _format_code(written)
    return Markup("not set") if default is None else _format_code(default) + " (default)"


def _format_text(parts: Iterable[str] | str) -> Markup:
    """Return text of which nothing is markup, a mention or a reference of a forge."""
    sentence = parts if isinstance(parts, str) else "; ".join(filter(None, parts))
    return Markup(re.sub(r"([@#])(?=\w)", "\\1\u2060", escape_markdown(redact_text(sentence))))
