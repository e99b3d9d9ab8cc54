"""Lint a command: what its version accepts, what it does on a GPU, and the fixed command."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.core.errors import PlannerError, add_error_context
from planner.core.redaction import redact_environment, redact_json, redact_text, redact_words
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns
from planner.core.versions import Version, is_nightly
from planner.engines.cli_options import is_unresolved, load_flag_lists
from planner.memory.memory_plan import MemoryPlan, find_safe_memory_utilization
from planner.tools.lint.command_plan import CommandPlan, plan_command, serialize_command_plan
from planner.tools.lint.consistency import find_contradictions
from planner.tools.lint.deployment_reader import RefusedDeploymentError, parse_gpu_count
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.fixes import FixedCommand, fix_command
from planner.tools.lint.metric_checks import check_metrics
from planner.tools.lint.option_checks import CheckedCommand, check_command, find_engine_version
from planner.tools.lint.server_commands import ServerCommand, quote_word
from planner.tools.lint.source_reader import read_source
from planner.tools.lint.upgrade import check_upgrade
from planner.workload.workload import Workload

__all__ = ["CommandReport", "LintFinding", "LintReport", "lint"]


@dataclass(frozen=True)
class CommandReport:
    """One command: its findings, the fixed command, and its plan on a GPU."""

    checked: CheckedCommand
    fixed: FixedCommand
    plan: CommandPlan | None  # of the fixed command if the original does not start
    not_planned_reason: str  # empty without a GPU

    @property
    def refuses_to_start(self) -> bool:
        """Whether the server rejects the command at startup."""
        return any(finding.refused for finding in self.checked.findings)

    @property
    def reported_findings(self) -> list[LintFinding]:
        """The findings that need a line of their own."""
        return [
            finding for finding in self.checked.findings if finding.verdict != "ok" or finding.why
        ]

    @property
    def accepted_names(self) -> list[str]:
        """The names of all other items."""
        names = dict.fromkeys(
            finding.name
            for finding in self.checked.findings
            if finding not in self.reported_findings
        )
        return [escape_to_one_line(name)[:40] for name in names]

    @property
    def needs_author(self) -> bool:
        """Whether only the author of the command can resolve its contradictions."""
        return not self.plan and any(
            finding.kind == "flag" and finding.verdict == "contradicts"
            for finding in self.reported_findings
        )


@dataclass(frozen=True)
class LintReport:
    """The findings of a text, and what another version changes."""

    commands: tuple[CommandReport, ...]
    metrics: tuple[LintFinding, ...]
    notes: tuple[str, ...]
    target_version: str | None
    upgrade_findings: tuple[LintFinding, ...]

    @property
    def findings(self) -> list[LintFinding]:
        """The findings of all commands and metrics."""
        return [
            *(finding for report in self.commands for finding in report.checked.findings),
            *self.metrics,
        ]

    @property
    def needs_fix(self) -> bool:
        """Whether something needs a fix: now, or for `target_version`."""
        starts = all(memory.can_start for memory in self._memory_plans)
        return not starts or any(
            finding.needs_fix for finding in (*self.findings, *self.upgrade_findings)
        )

    @property
    def verdict(self) -> Literal["ok", "at_risk", "mend"]:
        """`at_risk`: it starts, but something is risky, or its memory may not suffice."""
        verdicts = {
            finding.verdict
            for finding in (*self.findings, *self.upgrade_findings)
            if finding.needs_fix
        }
        if verdicts - {"risky", "unread"} or not all(
            memory.can_start for memory in self._memory_plans
        ):
            return "mend"
        return (
            "at_risk"
            if verdicts or any(memory.status != "ok" for memory in self._memory_plans)
            else "ok"
        )

    @property
    def _memory_plans(self) -> list[MemoryPlan]:
        return [report.plan.memory for report in self.commands if report.plan]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        report = {
            "commands": [
                {
                    "where": report.checked.command.where,
                    "engine": report.checked.command.engine,
                    "engine_version": str(report.checked.version),
                    "command": _format_without_secrets(report.checked.command),
                    "findings": [dict(vars(finding)) for finding in report.checked.findings],
                    "better": _format_without_secrets(report.fixed.command)
                    if report.fixed.diff
                    else None,
                    "diff": list(report.fixed.diff),
                    "refused": report.refuses_to_start,
                    "planned": serialize_command_plan(report.plan)
                    if report.plan
                    else None,
                    "unplanned": report.not_planned_reason or None,
                }
                for report in self.commands
            ],
            "metrics": [vars(finding) for finding in self.metrics],
            "to": self.target_version, "drift": [vars(finding) for finding in self.upgrade_findings],
            "notes": list(self.notes), "mend": self.needs_fix, "verdict": self.verdict,
        }  # fmt: skip
        return dict(redact_json(report))

    def __str__(self) -> str:
        return render_template(
            "tools/lint",
            "lint",
            report=self,
            table=_format_findings_table,
            public=_format_without_secrets,
        ).strip("\n")


def lint(
    what: str, version: str | None = None, *, engine: str | None = None, gpu: str | None = None,
    to: str | None = None, workload: Workload | None = None,
) -> LintReport:  # fmt: skip
    """Check a command line or file for an engine's version; with a `gpu` also plan it.

    Nothing of `what` runs. Without `version` the version is the image's, or else the newest
    recorded one; a file of a plan names its own version, and its GPU if no `gpu` is given. `to` is
    a version to upgrade to. Raises `PlannerError` if no server or metric is recognized.
    """
    source = read_source(what, engine)
    notes = list[str]()
    for option, requested in (("--engine-version", version), ("--to", to)):
        with add_error_context(option):
            if requested and not is_nightly(requested):
                Version.parse(requested)
    command_reports, upgrade_findings = list[CommandReport](), list[LintFinding]()
    if gpu is not None:
        parse_gpu_count(gpu)
    for command in source.commands:
        checked_version = (
            version or command.version or str(load_flag_lists(command.engine).versions[-1])
        )
        checked = _check_command(command, checked_version)
        checked = replace(checked, findings=(*checked.findings, *_list_unread_parts(checked)))
        notes += filter(None, (checked.options.note, command.note))
        pool = (
            f"a {command.role} worker of pools is planned as a server of its own, which does both"
        )
        planned_gpu = gpu or command.planned_on or None
        notes += [pool] if command.role and planned_gpu else []
        notes += (
            []
            if version or command.version
            else [f"no version given: judged for {command.engine} {checked_version}"]
        )
        command_reports.append(_plan_command(checked, planned_gpu, checked_version, workload))
        upgrade_findings += check_upgrade(checked, to) if to else []
    checked_commands = [report.checked for report in command_reports]
    metrics = check_metrics(source.metrics, checked_commands, version)
    if to:
        current = {finding.name: finding for finding in metrics}
        upgrade_findings += [
            finding
            for finding in check_metrics(source.metrics, checked_commands, to)
            if finding != current[finding.name] and finding.needs_fix
        ]
    return LintReport(
        tuple(command_reports),
        tuple(metrics),
        tuple(dict.fromkeys(notes)),
        to,
        tuple(dict.fromkeys(upgrade_findings)),
    )


def _list_unread_parts(checked: CheckedCommand) -> Iterator[LintFinding]:
    """Yield what was not understood of a command: nobody can say whether it is right."""
    command = checked.command
    if command.unread:
        why = "it was not read: what it starts, and with which options, is not known here"
        instead = "planner lint of the script, or of the command that it runs"
        yield LintFinding("word", "script", command.unread[:300], "unread", why, instead)
    extra = checked.as_meant.positional[1 if command.subcommand else 0 :]
    for word in dict.fromkeys(extra):
        if is_unresolved(word) or word in ("$@", "$*"):
            why = "what it stands for is known only where it runs"
            yield LintFinding("word", word[:80], word[:300], "unread", why)


def _check_command(command: ServerCommand, version: str) -> CheckedCommand:
    """Return the command with its findings, those about its model included."""
    checked = check_command(command, version)
    engine = find_engine_version(command.engine, version)
    return replace(
        checked, findings=_merge_findings(checked.findings, find_contradictions(checked, engine))
    )


def _plan_command(
    checked: CheckedCommand, gpu: str | None, version: str, workload: Workload | None
) -> CommandReport:
    """Plan one command if a GPU is named; a command that does not start is planned as fixed."""
    fixed = fix_command(checked)
    if gpu is None:
        return CommandReport(checked, fixed, None, "")
    starting = checked
    if any(finding.refused for finding in checked.findings):
        starting = _check_command(fixed.command, version)
        if refusal := next((finding for finding in starting.findings if finding.refused), None):
            why = f"the server ends with an error while it starts. {refusal.written}: {refusal.why}"
            return CommandReport(checked, fixed, None, why)
    try:
        plan = plan_command(starting, gpu, version, workload)
    except RefusedDeploymentError as error:
        refusal = LintFinding("setting", "GPU", f"on {gpu}", "contradicts", str(error))
        checked = replace(checked, findings=(*checked.findings, refusal))
        return CommandReport(checked, fixed, None, str(error))
    except PlannerError as error:
        return CommandReport(checked, fixed, None, str(error))
    checked = _drop_safe_memory_findings(checked, plan)
    return CommandReport(
        checked, fix_command(checked, {step.argument: step.value for step in plan.steps}), plan, ""
    )


def _drop_safe_memory_findings(checked: CheckedCommand, plan: CommandPlan) -> CheckedCommand:
    """Drop the rule on high memory utilization if the GPU's memory plan says that it is safe."""
    if plan.deployment.args.gpu_memory_utilization > find_safe_memory_utilization(plan.deployment):
        return checked
    rule = ("--gpu-memory-utilization", "risky")
    findings = (
        (
            replace(finding, verdict="ok", why="", instead="")
            if (finding.name, finding.verdict) == rule
            else finding
        )
        for finding in checked.findings
    )
    return replace(checked, findings=tuple(findings))


def _merge_findings(
    findings: Iterable[LintFinding], more: Iterable[LintFinding]
) -> tuple[LintFinding, ...]:
    """Return the findings, with those of `more` in place of risks and notes on the same item."""
    merged = {(finding.kind, finding.name): finding for finding in findings}
    for finding in more:
        previous = merged.get((finding.kind, finding.name))
        if previous is None or not previous.needs_fix or previous.verdict == "risky":
            merged[finding.kind, finding.name] = finding
    return tuple(merged.values())


def _format_without_secrets(command: ServerCommand) -> str:
    """Return the command in one line, with its environment in front, and without secrets."""
    variables = [
        f"{name}={quote_word(value)}"
        for name, value in redact_environment(command.environment).items()
        if "$(" not in value  # the file sets it itself
    ]
    shown = replace(command, argv=redact_words(command.argv))
    return escape_to_one_line(" ".join([*variables, redact_text(shown.line)]))


def _format_findings_table(findings: Iterable[LintFinding]) -> list[str]:
    """Return a line for each finding: verdict, item, reason, and what to write instead."""
    rows = []
    for finding in findings:
        item = finding.name if finding.kind == "metric" else finding.written
        row = (
            "",
            finding.verdict,
            redact_text(escape_to_one_line(item))[:70],
            _format_finding(finding),
        )
        rows.append(row)
    return format_columns(rows).splitlines() if rows else []


def _format_finding(finding: LintFinding) -> str:
    """Return the reason and the advice of a finding."""
    advice = f"instead: {finding.instead}" if finding.instead else ""
    return redact_text(escape_to_one_line("; ".join(filter(None, (finding.why, advice)))))
