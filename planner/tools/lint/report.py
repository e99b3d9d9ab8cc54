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

__all__ = ["LintFinding", "LintReport", "CommandReport", "lint"]


@dataclass(frozen=True)
class CommandReport:
    """One command: what is to be said of it, how it should be written, and what it does on a GPU."""

    judged: CheckedCommand
    mended: FixedCommand
    planned: CommandPlan | None  # of the command as it is, or once it is `mended` where it does not start as it is
    unplanned: str  # why there is no plan, where a GPU was named

    @property
    def refused(self) -> bool:
        """The server ends at once over how it is written."""
        return any(found.refused for found in self.judged.findings)

    @property
    def said(self) -> list[LintFinding]:
        """What there is to say something of."""
        return [found for found in self.judged.findings if found.verdict != "ok" or found.why]

    @property
    def good(self) -> list[str]:
        """The names of the rest."""
        names = dict.fromkeys(found.name for found in self.judged.findings if found not in self.said)
        return [escape_to_one_line(name)[:40] for name in names]

    @property
    def stuck(self) -> bool:
        """Only its author can say how it starts."""
        return not self.planned and any(found.kind == "flag" and found.verdict == "contradicts" for found in self.said)


@dataclass(frozen=True)
class LintReport:
    """All that is to be said of a text, and what another version would make of it."""

    commands: tuple[CommandReport, ...]
    metrics: tuple[LintFinding, ...]
    notes: tuple[str, ...]
    to: str | None
    drift: tuple[LintFinding, ...]  # what changes at `to`

    @property
    def findings(self) -> list[LintFinding]:
        """Of all commands and metrics."""
        return [*(found for one in self.commands for found in one.judged.findings), *self.metrics]

    @property
    def mend(self) -> bool:
        """Something should be mended: now, or to start at `to`."""
        starts = all(memory.starts for memory in self._memories)
        return not starts or any(found.mend for found in (*self.findings, *self.drift))

    @property
    def verdict(self) -> Literal["ok", "at_risk", "mend"]:
        """At risk: it starts, but something in it is risky, or its memory may not suffice."""
        wrong = {found.verdict for found in (*self.findings, *self.drift) if found.mend}
        if wrong - {"risky"} or not all(memory.starts for memory in self._memories):
            return "mend"
        return "at_risk" if wrong or any(memory.status != "ok" for memory in self._memories) else "ok"

    @property
    def _memories(self) -> list[MemoryPlan]:
        return [one.planned.memory for one in self.commands if one.planned]

    def frame(self) -> list[dict[str, Any]]:
        """One row for each finding, for tables."""
        return [{**vars(found), "mend": found.mend} for found in self.findings]

    def json(self) -> dict[str, Any]:
        return {
            "commands": [
                {
                    "where": one.judged.command.where, "engine": one.judged.command.engine,
                    "engine_version": one.judged.version, "command": _format_without_secrets(one.judged.command),
                    "findings": [vars(found) for found in one.judged.findings],
                    "better": _format_without_secrets(one.mended.command) if one.mended.diff else None, "diff": list(one.mended.diff),
                    "refused": one.refused, "planned": serialize_command_plan(one.planned) if one.planned else None,
                    "unplanned": one.unplanned or None,
                }
                for one in self.commands
            ],
            "metrics": [vars(found) for found in self.metrics],
            "to": self.to, "drift": [vars(found) for found in self.drift],
            "notes": list(self.notes), "mend": self.mend, "verdict": self.verdict,
        }  # fmt: skip

    def __str__(self) -> str:
        return render_template(
            "tools/lint", "lint", found=self, table=_format_findings_table, public=_format_without_secrets
        ).strip("\n")


def lint(
    what: str, version: str | None = None, *, engine: str | None = None, gpu: str | None = None,
    to: str | None = None, workload: Workload | None = None,
) -> LintReport:  # fmt: skip
    """Judge the command line, or the file, `what` for an engine's version; on a `gpu` also what it does and is worth.

    The version is that of the image where none is given, or else the newest that is listed; a file of a plan names its
    version, and its GPU where no `gpu` is given. `to` is another version that the command is to move to. Nothing of
    `what` is run. Raises `PlannerError` where nothing can be made of it.
    """
    text = read_source(what, engine)
    notes = list[str]()
    for given in filter(None, (version, to)):
        if not given.startswith("nightly"):
            parse_release(given)
    found, drift = list[CommandReport](), list[LintFinding]()
    if gpu is not None:
        parse_gpu_count(gpu)
    for command in text.commands:
        at = version or command.version or load_flag_lists(command.engine).versions[-1]
        judged = _check_command(command, at)
        notes += filter(None, (judged.options.note, command.note))
        pool = f"a {command.role} worker of pools is planned as a server of its own, which does both"
        on = gpu or command.planned_on or None
        notes += [pool] if command.role and on else []
        notes += [] if version or command.version else [f"no version given: judged for {command.engine} {at}"]
        found.append(_plan_command(judged, on, at, workload))
        drift += check_upgrade(judged, to) if to else []
    watched = check_metrics(text.metrics, [one.judged for one in found], version) if text.metrics else []
    if to and text.metrics:
        now = {one.name: one for one in watched}
        then = check_metrics(text.metrics, [one.judged for one in found], to)
        drift += [one for one in then if one != now[one.name] and one.mend]
    return LintReport(tuple(found), tuple(watched), tuple(dict.fromkeys(notes)), to, tuple(dict.fromkeys(drift)))


def _check_command(command: ServerCommand, version: str) -> CheckedCommand:
    """The verdicts on a command, those on its model among them."""
    judged = check_command(command, version)
    engine = find_engine_version(command.engine, version)
    return replace(judged, findings=_merge_findings(judged.findings, find_contradictions(judged, engine)))


def _plan_command(judged: CheckedCommand, gpu: str | None, version: str, workload: Workload | None) -> CommandReport:
    """One command, planned where a GPU is named and the planner knows enough; what does not start, once mended."""
    better = fix_command(judged)
    if gpu is None:
        return CommandReport(judged, better, None, "")
    starting = judged
    if any(found.refused for found in judged.findings):
        starting = _check_command(better.command, version)
        if still := next((found for found in starting.findings if found.refused), None):
            why = f"the server ends with an error while it starts. {still.written}: {still.why}"
            return CommandReport(judged, better, None, why)
    try:
        done = plan_command(starting, gpu, version, workload)
    except PlannerError as error:
        return CommandReport(judged, better, None, str(error))
    judged = _drop_safe_memory_findings(judged, done)
    return CommandReport(judged, fix_command(judged, {step.argument: step.value for step in done.steps}), done, "")


def _drop_safe_memory_findings(judged: CheckedCommand, done: CommandPlan) -> CheckedCommand:
    """The findings, without the rule on large shares of memory where this GPU's memory plan says that it is safe."""
    if done.deployment.args.gpu_memory_utilization > find_safe_memory_utilization(done.deployment):
        return judged
    share = ("--gpu-memory-utilization", "risky")
    findings = (
        replace(one, verdict="ok", why="", instead="") if (one.name, one.verdict) == share else one
        for one in judged.findings
    )
    return replace(judged, findings=tuple(findings))


def _merge_findings(findings: Iterable[LintFinding], more: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Findings, those of `more` in place of what was said of the same item and was no more than a risk."""
    made = {(one.kind, one.name): one for one in findings}
    for one in more:
        said = made.get((one.kind, one.name))
        if said is None or not said.mend or said.verdict == "risky":
            made[one.kind, one.name] = one
    return tuple(made.values())


def _format_without_secrets(command: ServerCommand) -> str:
    """The command in one line, with its environment in front, and without secrets."""
    secret = {name for name, value in command.environment.items() if len(value) > 7 and name.endswith(("KEY", "TOKEN"))}
    shown = [f"{name}={'...' if name in secret else value}" for name, value in command.environment.items()]
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
    rows = [("", one.verdict, escape_to_one_line(one.name if one.kind == "metric" else one.written)[:70], _format_finding(one))
            for one in findings]  # fmt: skip
    return format_columns(rows).splitlines() if rows else []


def _format_finding(one: LintFinding) -> str:
    return escape_to_one_line("; ".join(filter(None, (one.why, f"instead: {one.instead}" if one.instead else ""))))
