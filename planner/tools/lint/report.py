"""Lint a command: what its version accepts, what it does on a GPU, and the fixed command."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    get_cli_options,
    is_unresolved,
    load_flag_lists,
)
from planner.engines.deployment import Deployment
from planner.hardware.gpus import parse_gpu_count
from planner.memory.memory_plan import (
    MEMORY_STATUSES,
    MemoryPlan,
    find_safe_memory_utilization,
)
from planner.tools.lint.command_plan import (
    REFERENCE_GPU,
    CommandPlan,
    MemoryNeed,
    compute_memory_need,
    describe_largest_gpu,
    plan_command,
    plan_command_memory,
    serialize_command_plan,
)
from planner.tools.lint.consistency_facts import find_consistency_facts
from planner.tools.lint.deployment_reader import (
    RefusedDeploymentError,
    UnmodelledError,
    build_command_deployment,
    get_served_name,
    read_named_gpu,
    resolve_served_model,
)
from planner.tools.lint.findings import (
    LintFinding,
    LintVerdict,
    ReportVerdict,
    judge_findings,
)
from planner.tools.lint.fixes import FixedCommand, fix_command
from planner.tools.lint.option_checks import (
    VERSIONED_DEFAULTS,
    CheckedCommand,
    check_command,
    check_metrics,
    find_engine_version,
)
from planner.tools.lint.place_facts import find_place_facts
from planner.tools.lint.rules import apply_rules, load_rules
from planner.tools.lint.server_commands import (
    IMAGE_OPTION,
    ServerCommand,
    is_hub_name,
    quote_word,
)
from planner.tools.lint.shared_gpus import find_neighbours
from planner.tools.lint.source_reader import read_source
from planner.tools.lint.unmodelled import find_unmodelled_options
from planner.workload.workload import Workload

LAST_RELEASE_OF_V0 = "0.7.3"
"""Last release of vLLM whose engine was V0 on every GPU."""
MAX_FIX_ROUNDS = 3
"""How often a proposed command is checked and fixed again."""
__all__ = ["CommandReport", "LintFinding", "LintReport", "lint"]


@dataclass(frozen=True)
class CommandReport:
    """One command: its findings, the fixed command, and its plan on a GPU."""

    checked: CheckedCommand
    fixed: FixedCommand
    plan: CommandPlan | None  # of the fixed command if the original does not start
    not_planned_reason: str  # empty without a GPU
    unsettled: tuple[str, ...] = ()  # what ends the fixed command too
    need: MemoryNeed | None = None  # without a GPU, if the model is known

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
    def needs_fix(self) -> bool:
        """Whether something needs a fix: now, or for `target_version`."""
        is_clean = judge_findings((*self.findings, *self.upgrade_findings)) == "ok"
        return not (is_clean and all(memory.can_start for memory in self._memory_plans))

    @property
    def verdict(self) -> ReportVerdict:
        """`at_risk`: it starts, but something is risky or not judged, or its memory may not suffice."""
        if not all(memory.can_start for memory in self._memory_plans):
            return "mend"
        verdict = judge_findings((*self.findings, *self.upgrade_findings))
        is_tight = any(memory.status != "ok" for memory in self._memory_plans)
        is_open = any(
            report.not_planned_reason or (report.need and report.need.exceeds_all_gpus)
            for report in self.commands
        )
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
                    "needs_gib_per_gpu": report.need and round(report.need.gib, 2),
                    "unplanned": report.not_planned_reason or None,
                }
                for report in self.commands
            ],
            "metrics": [vars(finding) for finding in self.metrics],
            "unread": [vars(finding) for finding in self.unread],
            "to": self.target_version, "drift": [vars(finding) for finding in self.upgrade_findings],
            "notes": list(self.notes), "mend": self.needs_fix, "verdict": self.verdict,
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
            largest=describe_largest_gpu(),
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
    notes = list[str]()
    for option, requested in (("--engine-version", version), ("--to", to)):
        with add_error_context(option):
            if requested and not is_nightly(requested):
                Version.parse(requested)
    command_reports, upgrade_findings = list[CommandReport](), list[LintFinding]()
    if gpu is not None:
        parse_gpu_count(gpu)
    versions = [
        version or command.version or str(load_flag_lists(command.engine).versions[-1])
        for command in source.commands
    ]
    all_checked = list[CheckedCommand]()
    for command, checked_version in zip(source.commands, versions, strict=True):
        checked = _check_command(command, checked_version)
        written = (one for one in command.findings if not (version and one.name == IMAGE_OPTION))
        found = _merge_findings((*checked.findings, *written), _list_unread_parts(checked))
        all_checked.append(replace(checked, findings=found))
    for checked, checked_version in zip(all_checked, versions, strict=True):
        command = checked.command
        notes += filter(None, (checked.options.note, command.note))
        pool = (
            f"a {command.role} worker of pools is planned as a server of its own, which does both"
        )
        planned_gpu = gpu or command.planned_on or read_named_gpu(checked)
        neighbours = find_neighbours(checked, all_checked)
        place = find_place_facts(checked, planned_gpu)
        around = (
            *apply_rules(load_rules("place") if place else {}, place, checked.version),
            *neighbours.check_shares(checked),
        )
        checked = replace(checked, findings=_merge_findings(checked.findings, around))
        checked = _judge_old_engine(checked, planned_gpu)
        notes += [pool] if command.role and planned_gpu else []
        model = get_served_name(checked)
        is_pinned = checked.argument_values.get("revision") or command.planned_on
        # a command line is typed for the day, and what Headroom planned says so itself
        if command.setup and is_hub_name(model) and not is_pinned:
            notes.append(f"each start pulls the latest revision of {model}: --revision pins it")
        if neighbours.commands:
            notes.append(f"{command.where} shares GPU {neighbours.gpu} with {neighbours.names}")
        notes += (
            []
            if version or command.version
            else [f"no version given: checked against {command.engine} {checked_version}"]
        )
        report = _plan_command(checked, planned_gpu, checked_version, workload)
        notes += report.plan.deployment.model.warnings if report.plan else ()
        if drafts := report.plan and report.plan.deployment.speculation:
            repeats = " n-gram drafts reach that only where outputs repeat parts of their prompts;"
            notes.append(
                f"latencies assume that {drafts.acceptance_rate:.0%} of {drafts.method} drafts are"
                f" accepted after one that was;{repeats if drafts.method == 'ngram' else ''}"
                " `speculation: {acceptance_rate: ...}` of a scenario takes yours (`headroom plan`)"
            )
        command_reports.append(report)
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
        source.unread,
    )


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


def _judge_old_engine(checked: CheckedCommand, gpu: str | None) -> CheckedCommand:
    """Judge vLLM 0.8 on a GPU below compute capability 8.0, where it runs engine V0, as 0.7 did.

    vLLM 0.8.5 engine/arg_utils.py, _is_v1_supported_oracle.
    """
    spec = parse_gpu_count(gpu)[1] if gpu else None
    is_old = spec is not None and 0 < (spec.compute_capability or 0) < 8
    is_between = Version(0, 8) <= checked.version < Version(0, 9)
    if not (checked.command.engine == "vllm" and is_old and is_between):
        return checked
    before = {one.name: one for one in _check_command(checked.command, LAST_RELEASE_OF_V0).findings}
    findings = [
        before.get(one.name, one) if one.verdict in ("useless", "risky") else one
        for one in checked.findings
    ]
    why = "below compute capability 8.0 this release runs it, and memory and latencies are those of V1"
    findings.append(LintFinding("setting", "engine V0", "engine V0", "unread", why))
    return replace(checked, findings=tuple(findings))


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
    """Yield the defaults that differ between two versions: by the lists of options, or the catalog's facts."""
    old, new = checked.options, get_cli_options(checked.command.engine, to)
    engines = [find_engine_version(checked.command.engine, one) for one in (checked.version, to)]
    facts = [one.facts if one and one.name == "vllm" else None for one in engines]
    for name in dict.fromkeys(
        one.name for one in [*old.by_spelling.values(), *new.by_spelling.values()]
    ):
        argument = name.lstrip("-").replace("-", "_")
        options = [one.by_spelling.get(name) for one in (old, new)]
        defaults = [one.default if one else "" for one in options]
        if (
            not (all(defaults) and defaults[0] != defaults[1])
            and argument in VERSIONED_DEFAULTS
            and all(facts)
        ):
            values = [getattr(one, VERSIONED_DEFAULTS[argument]) for one in facts]
            defaults = [("off", "on")[one] if isinstance(one, bool) else str(one) for one in values]
        before, after = defaults
        is_json = options[0] is not None and options[0].kind == "json"
        if (
            not (before and after)
            or before == after
            or argument in checked.as_meant.values
            or is_json
        ):
            continue
        keep = f"{name} {before}"
        if before in ("on", "off"):
            keep = (
                name
                if before == "on"
                else next(iter(options[1].negations if options[1] else ()), "")
            )
        why = f"the default is {after}, it was {before}"
        yield LintFinding("flag", name, f"{name} {before} -> {after}", "default changed", why, keep)


def _list_unread_parts(checked: CheckedCommand) -> Iterator[LintFinding]:
    """Yield what was not understood of a command: nobody can say whether it is right."""
    command, parsed = checked.command, checked.as_meant
    if command.unread:
        why = "it was not read: what it starts, and with which options, is not known here"
        instead = "headroom lint of the script, or of the command that it runs"
        paths = (
            word if re.fullmatch(r"[\w./${}-]*(/|\.sh$)[\w./${}-]*", word) else MASK
            for word in command.unread
        )
        script = " ".join(paths)
        yield LintFinding("word", "script", script, "unread", why, instead)
    why = "what it stands for is known only where it runs"
    model, is_known_model = get_served_name(checked), True
    if model:
        try:
            resolve_served_model(checked)
        except PlannerError:
            is_known_model = False
            if not is_unresolved(model):
                unknown = "no model that is known here: layout, format and length were not checked"
                shown = command.shown.show_word("", model)
                yield LintFinding("word", shown, shown, "ok", unknown)
    # a folder that is known only where it runs may hold a model that is known by its name
    settled = {model} if is_known_model else set[str]()
    for word in dict.fromkeys(parsed.positional):
        if is_unresolved(word) and word not in settled:
            shown = command.shown.show_word("", word)
            yield LintFinding("word", shown, shown, "unread", why)
    known = {*load_argument_names(command.engine).arguments, "model", "model_path"}
    for option in parsed.options:
        # a sum in $((...)) is a number, whichever
        words = [
            word
            for word in option.words
            if word not in settled and not re.fullmatch(r"\$\(\(.*\)\)", word)
        ]
        is_secret = is_secret_name(option.written)
        if option.option and any(map(is_unresolved, words)) and not is_secret:
            # nothing is known of the values of other options, and a plan's file explains its own
            is_free = option.option.kind == "text" and not option.option.choices
            is_checked = not is_free or option.option.argument in known
            verdict: LintVerdict = "unread" if is_checked and not command.planned_on else "ok"
            yield LintFinding(
                "flag", option.option.name, command.shown.show_option(option), verdict, why
            )


def _check_command(command: ServerCommand, version: str) -> CheckedCommand:
    """Return the command with its findings, those about its model included."""
    checked = check_command(command, version)
    engine = find_engine_version(command.engine, version)
    facts = find_consistency_facts(checked, engine)
    found = apply_rules(load_rules("consistency"), facts, checked.version)
    return replace(checked, findings=_merge_findings(checked.findings, found))


def _plan_command(
    checked: CheckedCommand, gpu: str | None, version: str, workload: Workload | None
) -> CommandReport:
    """Plan one command if a GPU is named; a command that does not start is planned as fixed."""
    fixed, again = _propose(checked, version)
    unsettled = tuple(
        redact_text(escape_to_one_line(finding.name))[:40]
        for finding in again.findings
        if finding.refused and fixed.diff
    )
    if gpu is None:
        try:
            need = compute_memory_need(again, version)
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
    # the rule on high memory utilization: the memory plan of the GPU knows the largest that is safe
    safe, option = find_safe_memory_utilization(plan.deployment), "--gpu-memory-utilization"
    chosen = [step.value for step in plan.steps if step.argument == "gpu_memory_utilization"]
    is_risky = plan.deployment.args.gpu_memory_utilization > safe
    settled = tuple(
        one
        if (one.name, one.verdict) != (option, "risky")
        else replace(one, instead=f"{option} {[*chosen, safe][0]:g}")
        if is_risky
        else replace(one, verdict="ok", why="", instead="")
        for one in checked.findings
    )
    checked = replace(checked, findings=settled)
    found = (
        *find_unmodelled_options(checked, plan.deployment),
        *_describe_capped_length(checked, plan),
        *_check_pool_size(checked, plan, gpu, version),
    )
    checked = replace(checked, findings=_merge_findings(checked.findings, found))
    settings = {step.argument: step.value for step in plan.steps}
    fixed, again = _propose(checked, version, settings)
    if fixed.diff and _is_worse(again, plan, gpu, version):
        fixed, plan = (
            FixedCommand(checked.command, checked.command),
            replace(plan, steps=(), improved=None),
        )
    return CommandReport(checked, fixed, plan, "")


def _describe_capped_length(checked: CheckedCommand, plan: CommandPlan) -> Iterator[LintFinding]:
    """Yield that requests as long as the context do not fit, where the server still starts."""
    if plan.capped_length is None:
        return
    engine = checked.command.engine
    argument = load_argument_names(engine).engine_names["max_model_len"]
    option, length = f"--{argument.replace('_', '-')}", checked.argument_values.get(argument)
    written = f"{option} {length}" if length else "(not given)"
    if length in ("auto", "-1", -1):
        why = f"it takes the length that fits: {plan.capped_length:,} tokens at least"
        yield LintFinding("flag", option, written, "ok", why)
        return
    fate = "never runs" if engine == "vllm" else "refuses"
    why = (
        f"the KV cache is certain to hold {plan.capped_length:,} tokens: {engine} still starts, and"
        f" {fate} longer requests"
    )
    yield LintFinding("flag", option, written, "risky", why, f"{option} {plan.capped_length}")


def _check_pool_size(
    checked: CheckedCommand, plan: CommandPlan, gpu: str, version: str
) -> Iterator[LintFinding]:
    """Yield that a KV cache whose size is given is too small or too large, or what it leaves idle."""
    if not plan.pool_argument:
        return
    memory, option = plan.memory, f"--{plan.pool_argument.replace('_', '-')}"
    written = f"{option} {checked.argument_values[plan.pool_argument]}"
    holds = f"the KV cache has {memory.kv_available.mid / GIB:.2f} GiB, {memory.pool.reported_tokens:,} tokens"
    options = tuple(
        one for one in checked.as_meant.options
        if one.option is None or one.option.argument != plan.pool_argument
    )  # fmt: skip
    left_out = replace(checked, as_meant=replace(checked.as_meant, options=options))
    without, _ = plan_command_memory(left_out, gpu, version)
    instead = f"leave it out: {without.pool.reported_tokens:,} tokens" if without.can_start else ""
    if memory.status != "ok":
        why = f"{holds}, whatever --gpu-memory-utilization says"
        verdict: LintVerdict = "risky" if memory.can_start or plan.capped_length else "contradicts"
        yield LintFinding("flag", option, written, verdict, why, instead)
    else:
        yield LintFinding(
            "flag", option, written, "ok", f"{holds}, whatever the share of the memory"
        )


def _propose(
    checked: CheckedCommand, version: str, settings: Mapping[str, Any] | None = None
) -> tuple[FixedCommand, CheckedCommand]:
    """Return the fixed command, and what its version makes of it.

    A fix that is refused itself is fixed again; if that does not help, nothing is proposed.
    """
    refused = {finding.name for finding in checked.findings if finding.refused}
    fixed = FixedCommand(checked.command, fix_command(checked, settings))
    if not fixed.diff or get_served_name(checked).endswith(".json"):  # which no command serves
        return FixedCommand(checked.command, checked.command), checked
    for _ in range(MAX_FIX_ROUNDS):
        again = _check_command(fixed.command, version)
        if {finding.name for finding in again.findings if finding.refused} <= refused:
            return fixed, again
        fixed = FixedCommand(checked.command, fix_command(again))
    return FixedCommand(checked.command, checked.command), checked


def _is_worse(fixed: CheckedCommand, plan: CommandPlan, gpu: str, version: str) -> bool:
    """Return whether the memory of the fixed command is tighter than it was."""
    try:
        memory, _ = plan_command_memory(fixed, gpu, version)
    except PlannerError:
        return True
    return MEMORY_STATUSES.index(memory.status) > MEMORY_STATUSES.index(plan.memory.status)


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
        f"{name}={quote_word(command.shown.show_variable(name, value))}"
        for name, value in command.environment.items()
        if "$(" not in value  # the file sets it itself
    ]
    shown = replace(command, argv=tuple(command.shown.list_words(command.argv)))
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
    return redact_text(escape_to_one_line("; ".join(filter(None, (finding.why, finding.advice)))))
