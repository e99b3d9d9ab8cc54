"""A command that runs today: what its version takes of it, what it does on a GPU, and what to write instead."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.core.errors import PlannerError
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns
from planner.engines.cli_options import load_flag_lists
from planner.engines.engine import parse_release
from planner.memory.memory_plan import MemoryPlan, find_safe_memory_utilization
from planner.tools.lint.command_plan import CommandPlan, plan_command, serialize_command_plan
from planner.tools.lint.consistency import find_contradictions
from planner.tools.lint.deployment_reader import parse_gpu_count
from planner.tools.lint.findings import LintFinding, is_secret_option
from planner.tools.lint.fixes import FixedCommand, fix_command
from planner.tools.lint.metric_checks import check_metrics
from planner.tools.lint.option_checks import CheckedCommand, check_command, find_engine_version
from planner.tools.lint.server_commands import ServerCommand
from planner.tools.lint.source_reader import read_source
from planner.tools.lint.upgrade import check_upgrade
from planner.workload.workload import Workload

__all__ = ["CommandReport", "LintFinding", "LintReport", "lint"]


@dataclass(frozen=True)
class CommandReport:
    """One command: what is to be said of it, how it should be written, and what it does on a GPU."""

    checked: CheckedCommand
    fixed: FixedCommand
    plan: (
        CommandPlan | None
    )  # of the command as it is, or once it is `mended` where it does not start as it is
    not_planned_reason: str  # why there is no plan, where a GPU was named

    @property
    def refuses_to_start(self) -> bool:
        """The server ends at once over how it is written."""
        return any(finding.refused for finding in self.checked.findings)

    @property
    def reported_findings(self) -> list[LintFinding]:
        """What there is to say something of."""
        return [
            finding for finding in self.checked.findings if finding.verdict != "ok" or finding.why
        ]

    @property
    def accepted_names(self) -> list[str]:
        """The names of the rest."""
        names = dict.fromkeys(
            finding.name
            for finding in self.checked.findings
            if finding not in self.reported_findings
        )
        return [escape_to_one_line(name)[:40] for name in names]

    @property
    def needs_author(self) -> bool:
        """Only its author can say how it starts."""
        return not self.plan and any(
            finding.kind == "flag" and finding.verdict == "contradicts"
            for finding in self.reported_findings
        )


@dataclass(frozen=True)
class LintReport:
    """All that is to be said of a text, and what another version would make of it."""

    commands: tuple[CommandReport, ...]
    metrics: tuple[LintFinding, ...]
    notes: tuple[str, ...]
    target_version: str | None
    upgrade_findings: tuple[LintFinding, ...]  # what changes at `to`

    @property
    def findings(self) -> list[LintFinding]:
        """Of all commands and metrics."""
        return [
            *(
                finding
                for command_report in self.commands
                for finding in command_report.checked.findings
            ),
            *self.metrics,
        ]

    @property
    def needs_fix(self) -> bool:
        """Something should be mended: now, or to start at `to`."""
        starts = all(memory.can_start for memory in self._memory_plans)
        return not starts or any(
            finding.needs_fix for finding in (*self.findings, *self.upgrade_findings)
        )

    @property
    def verdict(self) -> Literal["ok", "at_risk", "mend"]:
        """At risk: it starts, but something in it is risky, or its memory may not suffice."""
        wrong = {
            finding.verdict
            for finding in (*self.findings, *self.upgrade_findings)
            if finding.needs_fix
        }
        if wrong - {"risky"} or not all(memory.can_start for memory in self._memory_plans):
            return "mend"
        return (
            "at_risk"
            if wrong or any(memory.status != "ok" for memory in self._memory_plans)
            else "ok"
        )

    @property
    def _memory_plans(self) -> list[MemoryPlan]:
        return [
            command_report.plan.memory for command_report in self.commands if command_report.plan
        ]

    def list_rows(self) -> list[dict[str, Any]]:
        """One row for each finding, for tables."""
        return [{**vars(finding), "mend": finding.needs_fix} for finding in self.findings]

    def to_json(self) -> dict[str, Any]:
        return {
            "commands": [
                {
                    "where": command_report.checked.command.where,
                    "engine": command_report.checked.command.engine,
                    "engine_version": command_report.checked.version,
                    "command": _format_without_secrets(command_report.checked.command),
                    "findings": [vars(finding) for finding in command_report.checked.findings],
                    "better": _format_without_secrets(command_report.fixed.command) if command_report.fixed.diff else None,
                    "diff": list(command_report.fixed.diff),
                    "refused": command_report.refuses_to_start,
                    "planned": serialize_command_plan(command_report.plan) if command_report.plan else None,
                    "unplanned": command_report.not_planned_reason or None,
                }
                for command_report in self.commands
            ],
            "metrics": [vars(found) for found in self.metrics],
            "to": self.target_version, "drift": [vars(found) for found in self.upgrade_findings],
            "notes": list(self.notes), "mend": self.needs_fix, "verdict": self.verdict,
        }  # fmt: skip

    def __str__(self) -> str:
        return render_template(
            "tools/lint",
            "lint",
            found=self,
            table=_format_findings_table,
            public=_format_without_secrets,
        ).strip("\n")


def lint(
    what: str, version: str | None = None, *, engine: str | None = None, gpu: str | None = None,
    to: str | None = None, workload: Workload | None = None,
) -> LintReport:  # fmt: skip
    """Judge the command line, or the file, `what` for an engine's version; on a `gpu` also what it does and is worth.

    The version is that of the image where none is given, or else the newest that is listed; a file
    of a plan names its version, and its GPU where no `gpu` is given. `to` is another version that
    the command is to move to. Nothing of `what` is run. Raises `PlannerError` where nothing can be
    made of it.
    """
    text = read_source(what, engine)
    notes = list[str]()
    for given in filter(None, (version, to)):
        if not given.startswith("nightly"):
            parse_release(given)
    command_reports, drift = list[CommandReport](), list[LintFinding]()
    if gpu is not None:
        parse_gpu_count(gpu)
    for command in text.commands:
        at = version or command.version or load_flag_lists(command.engine).versions[-1]
        checked = _check_command(command, at)
        notes += filter(None, (checked.options.note, command.note))
        pool = (
            f"a {command.role} worker of pools is planned as a server of its own, which does both"
        )
        on = gpu or command.planned_on or None
        notes += [pool] if command.role and on else []
        notes += (
            []
            if version or command.version
            else [f"no version given: judged for {command.engine} {at}"]
        )
        command_reports.append(_plan_command(checked, on, at, workload))
        drift += check_upgrade(checked, to) if to else []
    watched = (
        check_metrics(
            text.metrics, [command_report.checked for command_report in command_reports], version
        )
        if text.metrics
        else []
    )
    if to and text.metrics:
        now = {finding.name: finding for finding in watched}
        then = check_metrics(text.metrics, [one.checked for one in command_reports], to)
        drift += [one for one in then if one != now[one.name] and one.needs_fix]
    return LintReport(
        tuple(command_reports),
        tuple(watched),
        tuple(dict.fromkeys(notes)),
        to,
        tuple(dict.fromkeys(drift)),
    )


def _check_command(command: ServerCommand, version: str) -> CheckedCommand:
    """The verdicts on a command, those on its model among them."""
    checked = check_command(command, version)
    engine = find_engine_version(command.engine, version)
    return replace(
        checked, findings=_merge_findings(checked.findings, find_contradictions(checked, engine))
    )


def _plan_command(
    checked: CheckedCommand, gpu: str | None, version: str, workload: Workload | None
) -> CommandReport:
    """One command, planned where a GPU is named and the planner knows enough; what does not start, once mended."""
    better = fix_command(checked)
    if gpu is None:
        return CommandReport(checked, better, None, "")
    starting = checked
    if any(finding.refused for finding in checked.findings):
        starting = _check_command(better.command, version)
        if still := next((found for found in starting.findings if found.refused), None):
            why = f"the server ends with an error while it starts. {still.written}: {still.why}"
            return CommandReport(checked, better, None, why)
    try:
        done = plan_command(starting, gpu, version, workload)
    except PlannerError as error:
        return CommandReport(checked, better, None, str(error))
    checked = _drop_safe_memory_findings(checked, done)
    return CommandReport(
        checked, fix_command(checked, {step.argument: step.value for step in done.steps}), done, ""
    )


def _drop_safe_memory_findings(checked: CheckedCommand, done: CommandPlan) -> CheckedCommand:
    """The findings, without the rule on large shares of memory where this GPU's memory plan says that it is safe."""
    if done.deployment.args.gpu_memory_utilization > find_safe_memory_utilization(done.deployment):
        return checked
    share = ("--gpu-memory-utilization", "risky")
    findings = (
        (
            replace(finding, verdict="ok", why="", instead="")
            if (finding.name, finding.verdict) == share
            else finding
        )
        for finding in checked.findings
    )
    return replace(checked, findings=tuple(findings))


def _merge_findings(
    findings: Iterable[LintFinding], more: Iterable[LintFinding]
) -> tuple[LintFinding, ...]:
    """Findings, those of `more` in place of what was said of the same item and was no more than a risk."""
    made = {(finding.kind, finding.name): finding for finding in findings}
    for one in more:
        said = made.get((one.kind, one.name))
        if said is None or not said.needs_fix or said.verdict == "risky":
            made[one.kind, one.name] = one
    return tuple(made.values())


def _format_without_secrets(command: ServerCommand) -> str:
    """The command in one line, with its environment in front, and without secrets."""
    secret = {
        name
        for name, value in command.environment.items()
        if len(value) > 7 and name.endswith(("KEY", "TOKEN"))
    }
    shown = [
        f"{name}={'...' if name in secret else value}"
        for name, value in command.environment.items()
    ]
    return escape_to_one_line(" ".join([*shown, _mask_secret(command)]))


def _mask_secret(command: ServerCommand) -> str:
    words = list(command.argv)
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if is_secret_option(name) and equals:
            words[at] = f"{name}=..."
        elif is_secret_option(name) and at + 1 < len(words):
            words[at + 1] = "..."
    return replace(command, argv=tuple(words)).line


def _format_findings_table(findings: Iterable[LintFinding]) -> list[str]:
    """A line for each finding: verdict, item, why, and what to write instead."""
    rows = [("", finding.verdict, escape_to_one_line(finding.name if finding.kind == "metric" else finding.written)[:70], _format_finding(finding))
            for finding in findings]  # fmt: skip
    return format_columns(rows).splitlines() if rows else []


def _format_finding(finding: LintFinding) -> str:
    return escape_to_one_line(
        "; ".join(
            filter(None, (finding.why, f"instead: {finding.instead}" if finding.instead else ""))
        )
    )
