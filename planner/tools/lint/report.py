"""Lint a command: what its version accepts, what it does on a GPU, and the fixed command."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.core.errors import PlannerError, add_error_context
from planner.core.number_format import format_number
from planner.core.redaction import (
    MASK,
    is_secret_name,
    redact_json,
    redact_text,
)
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns
from planner.core.units import GIB
from planner.core.versions import Version, is_nightly
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import (
    is_unresolved,
    load_flag_lists,
)
from planner.engines.deployment import Deployment
from planner.hardware.gpus import parse_gpu_count
from planner.memory.memory_plan import (
    MEMORY_STATUSES,
    MemoryPlan,
    find_safe_memory_utilization,
    plan_memory,
)
from planner.tools.lint.command_plan import (
    FITTED_LENGTHS,
    REFERENCE_GPU,
    CommandPlan,
    compute_least_bytes,
    plan_command,
    plan_least_memory,
    serialize_command_plan,
)
from planner.tools.lint.deployment_reader import (
    RefusedDeploymentError,
    UnmodelledError,
    build_command_deployment,
    find_unmodelled_options,
    get_served_name,
    read_named_gpu,
    resolve_served_model,
)
from planner.tools.lint.facts import find_consistency_facts, find_place_facts
from planner.tools.lint.findings import (
    LintFinding,
    LintVerdict,
    ReportVerdict,
    judge_findings,
    merge_findings,
)
from planner.tools.lint.fixes import FixedCommand, fix_command
from planner.tools.lint.option_checks import (
    VERSIONED_DEFAULTS,
    CheckedCommand,
    check_command,
    check_metrics,
    find_engine_version,
)
from planner.tools.lint.rules import apply_rules, describe_item, load_rules
from planner.tools.lint.server_commands import (
    ServerCommand,
    quote_word,
)
from planner.tools.lint.source_reader import read_source
from planner.workload.workload import Workload

__all__ = ["CommandReport", "LintFinding", "LintReport", "lint"]


@dataclass(frozen=True)
class CommandReport:
    """One command: its findings, the fixed command, and its plan on a GPU."""

    checked: CheckedCommand
    fixed: FixedCommand
    plan: CommandPlan | None  # of the fixed command if the original does not start
    not_planned_reason: str  # empty without a GPU
    unsettled: tuple[str, ...] = ()  # what ends the fixed command too
    need: MemoryPlan | None = None  # without a GPU, if the model is known

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
        return [redact_text(escape_to_one_line(name))[:40] for name in names]


@dataclass(frozen=True)
class LintReport:
    """The findings of a text, and what another version changes."""

    commands: tuple[CommandReport, ...]
    metrics: tuple[LintFinding, ...]
    notes: tuple[str, ...]
    target_version: str | None
    upgrade_findings: tuple[LintFinding, ...]
    unread: tuple[LintFinding, ...] = ()  # texts beside the commands that were not judged

    @property
    def findings(self) -> list[LintFinding]:
        """The findings of all commands and metrics."""
        return [
            *(finding for report in self.commands for finding in report.checked.findings),
            *self.metrics,
            *self.unread,
        ]

    @property
    def verdict(self) -> ReportVerdict:
        """`at_risk`: it starts, but something is risky or not judged, or its memory may not suffice."""
        if not all(memory.can_start for memory in self._memory_plans):
            return "mend"
        verdict = judge_findings((*self.findings, *self.upgrade_findings))
        is_tight = any(memory.status != "ok" for memory in self._memory_plans)
        is_open = any(report.not_planned_reason for report in self.commands)
        return "at_risk" if verdict == "ok" and (is_tight or is_open) else verdict

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
                    "needs_gib_per_gpu": report.need and round(compute_least_bytes(report.need) / GIB, 2),
                    "unplanned": report.not_planned_reason or None,
                }
                for report in self.commands
            ],
            "metrics": [vars(finding) for finding in self.metrics],
            "unread": [vars(finding) for finding in self.unread],
            "to": self.target_version, "drift": [vars(finding) for finding in self.upgrade_findings],
            "notes": list(self.notes), "mend": self.verdict == "mend", "verdict": self.verdict,
        }  # fmt: skip
        return dict(redact_json(report))

    def __str__(self) -> str:
        text = render_template(
            "tools/lint",
            "lint",
            report=self,
            table=_format_findings_table,
            explain=_format_finding,
            public=_format_without_secrets,
            least=compute_least_bytes,
            example=REFERENCE_GPU,
            number=format_number,
        )
        return redact_text(text).strip("\n")


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
    for option, requested in (("--engine-version", version), ("--to", to)):
        with add_error_context(option):
            if requested and not is_nightly(requested):
                Version.parse(requested)
    if gpu is not None and re.search("[,+]", gpu):
        raise PlannerError(
            "--gpu: a server on two kinds of GPU has no model here; name one of them"
        )
    if gpu is not None:
        parse_gpu_count(gpu)
    checked, notes = list[CheckedCommand](), list[str]()
    for command in source.commands:
        judged_as = version or command.version or str(load_flag_lists(command.engine).versions[-1])
        one = _check_command(command, judged_as)
        found = merge_findings((*one.findings, *command.findings), _list_unread_parts(one))
        checked.append(replace(one, findings=found))
    reports, drift = list[CommandReport](), list[LintFinding]()
    for one in checked:
        planned_gpu = gpu or one.command.planned_on or read_named_gpu(one)
        place = find_place_facts(one, planned_gpu, checked)
        around = apply_rules(load_rules("place") if place else {}, place, one.version)
        one = replace(one, findings=merge_findings(one.findings, around))
        reports.append(_plan_command(one, planned_gpu, workload))
        notes += _list_notes(reports[-1], version)
        drift += check_upgrade(one, to) if to else []
    metrics = check_metrics(source.metrics, checked, version)
    later = check_metrics(source.metrics, checked, to) if to else []
    drift += [one for one in later if one not in metrics and one.needs_fix]
    return LintReport(
        tuple(reports), tuple(metrics), tuple(dict.fromkeys(notes)), to, tuple(dict.fromkeys(drift)),
        source.unread,
    )  # fmt: skip


def _list_notes(report: CommandReport, version: str | None) -> Iterator[str]:
    """Yield what a verdict on a command rests on."""
    checked, command = report.checked, report.checked.command
    yield from filter(None, (checked.options.note, command.note))
    if command.role and report.plan:
        yield f"a {command.role} worker of pools is planned as a server of its own, which does both"
    if not (version or command.version):
        yield f"no version given: checked against {command.engine} {checked.version}"
    yield from report.plan.deployment.model.warnings if report.plan else ()
    if drafts := report.plan and report.plan.deployment.speculation:
        yield f"latencies assume that {drafts.acceptance_rate:.0%} of {drafts.method} drafts are accepted"


def read_launched_deployment(what: str, gpu: str) -> Deployment:
    """Return the deployment that a command line or file starts on a GPU.

    Raises `PlannerError` if it starts none or several, or one that is not known.
    """
    commands = read_source(what).commands
    if len(commands) != 1:
        raise PlannerError(f"--command: one server is needed, this starts {len(commands)}")
    (command,) = commands
    version = command.version or str(load_flag_lists(command.engine).versions[-1])
    return build_command_deployment(check_command(command, version), gpu, version)


def check_upgrade(checked: CheckedCommand, to: str) -> list[LintFinding]:
    """Return what changes for a command at version `to`: new verdicts and changed defaults."""
    current = {(finding.kind, finding.name): finding for finding in checked.findings}
    upgraded = _check_command(checked.command, to).findings
    changed = [
        finding
        for finding in upgraded
        if finding.verdict != "ok" and finding != current.get((finding.kind, finding.name))
    ]
    return [*changed, *_compare_defaults(checked, to)]


def _compare_defaults(checked: CheckedCommand, to: str) -> Iterator[LintFinding]:
    """Yield the defaults of vLLM that differ between two versions, by the catalog's facts."""
    engines = [find_engine_version(checked.command.engine, one) for one in (checked.version, to)]
    given = checked.as_meant.values
    for argument, fact in VERSIONED_DEFAULTS.items() if checked.command.engine == "vllm" else ():
        values = [getattr(one.facts, fact) for one in engines if one]
        if len({*values}) < 2 or argument in given:
            continue
        name = f"--{argument.replace('_', '-')}"
        before, after = (
            ("off", "on")[one] if isinstance(one, bool) else str(one) for one in values
        )
        keep = {"on": name, "off": f"--no-{name[2:]}"}.get(before, f"{name} {before}")
        written, why = f"{name} {before} -> {after}", f"the default is {after}, it was {before}"
        yield LintFinding("flag", name, written, "default changed", why, keep)


def _list_unread_parts(checked: CheckedCommand) -> Iterator[LintFinding]:
    """Yield what was not understood of a command: nobody can say whether it is right."""
    command, parsed, show = checked.command, checked.as_meant, checked.command.shown
    if command.unread:
        why = "it was not read: what it starts, and with which options, is not known here"
        instead = "headroom lint of the script, or of the command that it runs"
        path = r"[\w./${}-]*(/|\.sh$)[\w./${}-]*"
        script = " ".join(word if re.fullmatch(path, word) else MASK for word in command.unread)
        yield LintFinding("word", "script", script, "unread", why, instead)
    model = get_served_name(checked)
    settled = {
        model
    }  # a folder that is known only where it runs may hold a model known by its name
    try:
        resolve_served_model(checked)
    except PlannerError:
        settled, written = set(), show.show_word("", model)
        unknown = "no model that is known here: layout, format and length were not checked"
        if model and not is_unresolved(model):
            yield LintFinding("word", written, written, "ok", unknown)
    known = {*load_argument_names(command.engine).arguments, "model", "model_path"}
    given: list[tuple[str, str, str, tuple[str, ...], bool]]
    given = [("word", show.show_word("", one), "", (one,), True) for one in parsed.positional]
    given += [
        # nothing is known of the values of other options, and a plan's file explains its own
        ("flag", one.option.name, show.show_option(one), one.words, not command.planned_on and (
            one.option.kind != "text" or bool(one.option.choices) or one.option.argument in known))
        for one in parsed.options if one.option and not is_secret_name(one.written)
    ]  # fmt: skip
    for kind, name, written, words, is_checked in given:
        # a sum in $((...)) is a number, whichever
        is_open = any(
            is_unresolved(one) and not re.fullmatch(r"\$\(\(.*\)\)", one) for one in words
        )
        if is_open and not {*words} <= settled:
            verdict: LintVerdict = "unread" if is_checked else "ok"
            why = "what it stands for is known only where it runs"
            yield LintFinding(kind, name, written or name, verdict, why)  # type: ignore[arg-type]


def _check_command(command: ServerCommand, version: str) -> CheckedCommand:
    """Return the command with its findings, those about its model included."""
    checked = check_command(command, version)
    engine = find_engine_version(command.engine, version)
    facts = find_consistency_facts(checked, engine)
    found = apply_rules(load_rules("consistency"), facts, checked.version)
    return replace(checked, findings=merge_findings(checked.findings, found))


def _plan_command(
    checked: CheckedCommand, gpu: str | None, workload: Workload | None
) -> CommandReport:
    """Plan one command if a GPU is named; a command that does not start is planned as fixed."""
    version = str(checked.version)
    fixed, again = _propose(checked, version)
    unsettled = tuple(
        redact_text(escape_to_one_line(finding.name))[:40]
        for finding in again.findings
        if finding.refused and fixed.diff
    )
    if gpu is None:
        try:
            need = plan_least_memory(again, version)
        except UnmodelledError as error:
            return CommandReport(checked, fixed, None, str(error), unsettled)
        return CommandReport(checked, fixed, None, "", unsettled, need)
    starting = checked
    if any(finding.refused for finding in checked.findings):
        starting = again
        if refusal := next((finding for finding in starting.findings if finding.refused), None):
            why = f"the server ends with an error while it starts. {refusal.written}: {refusal.why}"
            return CommandReport(checked, fixed, None, why, unsettled)
    try:
        plan = plan_command(starting, gpu, version, workload)
    except RefusedDeploymentError as error:
        refusal = LintFinding("setting", "GPU", f"on {gpu}", "contradicts", str(error))
        checked = replace(checked, findings=(*checked.findings, refusal))
        return CommandReport(checked, fixed, None, str(error))
    except PlannerError as error:
        return CommandReport(checked, fixed, None, str(error))
    # where a GPU is named its memory plan says which share is safe, in place of the rule for all
    option = "--gpu-memory-utilization"
    settled = (
        replace(one, verdict="ok", why="", instead="")
        if (one.name, one.verdict) == (option, "risky")
        else one
        for one in checked.findings
    )
    write = partial(describe_item, checked.command, checked.as_meant)
    argument = load_argument_names(checked.command.engine).engine_names["max_model_len"]
    facts = {
        "argument": argument, "option": f"--{argument.replace('_', '-')}",
        "capability": plan.deployment.gpu.compute_capability or 0,
        "engine": checked.command.engine, "capped": plan.capped_length,
        "is_fitted": checked.argument_values.get(argument) in FITTED_LENGTHS,
        "share": plan.deployment.args.gpu_memory_utilization,
        "safe_share": find_safe_memory_utilization(plan.deployment),
    }  # fmt: skip
    found = [*apply_rules(load_rules("plan"), facts, checked.version, write)]
    if any(one.name == "engine V0" for one in found):  # what V1 ignores may count there
        settled = (one for one in settled if one.verdict != "useless")
    unmodelled = find_unmodelled_options(checked, plan.deployment)
    checked = replace(checked, findings=merge_findings(settled, (*unmodelled, *found)))
    settings = {step.argument: step.value for step in plan.steps}
    fixed, again = _propose(checked, version, settings)
    if fixed.diff and _is_worse(again, plan, gpu, version):
        fixed, plan = (
            FixedCommand(checked.command, checked.command),
            replace(plan, steps=(), improved=None),
        )
    return CommandReport(checked, fixed, plan, "")


def _propose(
    checked: CheckedCommand, version: str, settings: Mapping[str, Any] | None = None
) -> tuple[FixedCommand, CheckedCommand]:
    """Return the fixed command, and what its version makes of it.

    If what is fixed is refused for another reason, nothing is proposed.
    """
    refused = {finding.name for finding in checked.findings if finding.refused}
    fixed = FixedCommand(checked.command, fix_command(checked, settings))
    if not fixed.diff or get_served_name(checked).endswith(".json"):  # which no command serves
        return FixedCommand(checked.command, checked.command), checked
    again = _check_command(fixed.command, version)
    if {finding.name for finding in again.findings if finding.refused} <= refused:
        # no option of the command mends what is around it
        around = (
            one for one in checked.findings if one.refused and one.rule in load_rules("place")
        )
        kept = [one for one in around if not one.instead.startswith("--")]
        return fixed, replace(again, findings=(*again.findings, *kept))
    return FixedCommand(checked.command, checked.command), checked


def _is_worse(fixed: CheckedCommand, plan: CommandPlan, gpu: str, version: str) -> bool:
    """Return whether the memory of the fixed command is tighter than it was."""
    try:
        memory = plan_memory(build_command_deployment(fixed, gpu, version))
    except PlannerError:
        return True
    return MEMORY_STATUSES.index(memory.status) > MEMORY_STATUSES.index(plan.memory.status)


def _format_without_secrets(command: ServerCommand) -> str:
    """Return the command in one line, with its environment in front, and without secrets."""
    variables = [
        f"{name if name.isupper() else MASK}={quote_word(command.shown.show_variable(name, value))}"
        for name, value in command.environment.items()
        if "$(" not in value  # the file sets it itself
    ]
    shown = replace(command, argv=tuple(command.shown.list_words(command.argv)))
    return escape_to_one_line(" ".join([*variables, redact_text(shown.line)]))


def _format_findings_table(findings: Iterable[LintFinding]) -> list[str]:
    """Return a line for each finding: verdict, item, reason, and what to write instead."""
    rows = [
        ("", one.verdict, redact_text(escape_to_one_line(one.written))[:70], _format_finding(one))
        for one in findings
    ]
    return format_columns(rows).splitlines() if rows else []


def _format_finding(finding: LintFinding) -> str:
    """Return the reason and the advice of a finding."""
    return redact_text(escape_to_one_line("; ".join(filter(None, (finding.why, finding.advice)))))
