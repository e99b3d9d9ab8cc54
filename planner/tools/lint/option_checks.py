"""Check every option and variable of a command against a version of its engine.

`catalogs/flags/ENGINE.csv` records which version has which option; `changes.yaml` and
`rules.yaml` in the same folder hold the advice and the rules.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError, find_closest
from planner.core.redaction import MASK, is_secret_name
from planner.core.versions import Version
from planner.engines import engine as engines
from planner.engines.argument_names import find_own_option
from planner.engines.cli_options import (
    CliOptions,
    ParsedCommandLine,
    ParsedOption,
    get_cli_options,
    is_unresolved,
    list_versions_with_spelling,
    load_flag_lists,
    load_recorded_names,
    parse_engine_version,
)
from planner.engines.engine import Engine
from planner.tools.lint.findings import (
    LintFinding,
    LintVerdict,
    OptionChange,
    judge_presence,
    load_engine_changes,
    merge_findings,
)
from planner.tools.lint.rules import apply_option_rules, apply_rules, load_rules
from planner.tools.lint.server_commands import ServerCommand
from planner.tools.lint.value_checks import check_values

VERSIONED_DEFAULTS = {
    "enable_prefix_caching": "prefix_caching", "enable_chunked_prefill": "chunked_prefill",
    "async_scheduling": "async_scheduling", "gpu_memory_utilization": "gpu_memory_utilization",
}  # fmt: skip
"""vLLM's arguments whose defaults `catalogs/engines.yaml` lists by version."""


@dataclass(frozen=True)
class CheckedCommand:
    """A command as a version of its engine reads it, with the findings about it."""

    command: ServerCommand
    options: CliOptions
    version: Version
    as_meant: ParsedCommandLine
    findings: tuple[LintFinding, ...]

    @property
    def argument_values(self) -> Mapping[str, Any]:
        """Argument -> value, with TensorRT-LLM's file, which wins."""
        return {**self.as_meant.values, **self.command.config}


def check_command(command: ServerCommand, engine_version: str | Version) -> CheckedCommand:
    """Check a command at a version of its engine; the findings are in the command's order."""
    cli_options = get_cli_options(command.engine, engine_version)
    version = parse_engine_version(command.engine, str(engine_version))
    as_meant = cli_options.parse(command.argv)
    findings = [check_flag(option, command, cli_options, version) for option in as_meant.options]
    words = find_word_facts(command, as_meant, version)
    findings += apply_rules(load_rules("words"), words, version)
    findings += check_environment(command, version)
    found = (
        *check_values(as_meant, command, version),
        *apply_option_rules(command, as_meant, version),
    )
    return CheckedCommand(command, cli_options, version, as_meant, merge_findings(findings, found))


def check_flag(
    option: ParsedOption, command: ServerCommand, options: CliOptions, version: Version
) -> LintFinding:
    """Check one option of a command."""
    spelling = _normalize_setting_name(option.written, options)
    name = (
        option.option.name
        if option.option and spelling not in load_engine_changes(options.engine).flags
        else spelling
    )
    written = command.shown.show_option(option)
    change = load_engine_changes(options.engine).flags.get(name) or OptionChange()
    finding = LintFinding("flag", name, written, "ok")
    if option.option is None:
        finding = _check_missing_option(finding, options, version, change)
        return replace(finding, refused=finding.needs_fix)
    if option.error and not _is_taken_next(option, options, version):
        return replace(_check_value(option, finding, options, version), refused=True)
    having = [
        v
        for v in load_flag_lists(options.engine).versions
        if option.option.name in get_cli_options(options.engine, v).spellings
    ]
    return judge_presence(finding, having, options.engine, version, change) or finding


def _is_taken_next(option: ParsedOption, options: CliOptions, version: Version) -> bool:
    """Return whether the next listed version takes what the one before this does not."""
    later = [one for one in load_flag_lists(options.engine).versions if one > version]
    if options.version == version or not later:
        return False
    words = (option.written, *option.words)
    return not any(
        one.error for one in get_cli_options(options.engine, later[0]).parse(words).options
    )


def _normalize_setting_name(written: str, options: CliOptions) -> str:
    name = written.partition(".")[0] if written.startswith("-") and "." in written else written
    return name.replace("_", "-") if options.lists.underscores and name.startswith("--") else name


def _check_missing_option(
    finding: LintFinding, options: CliOptions, version: Version, change: OptionChange
) -> LintFinding:
    """Check an option that this version lacks: removed, not yet added, or never there."""
    name = finding.name
    if name in options.spellings:
        why = f"{name} takes a value as a whole, not one of its keys"
        return replace(finding, verdict="unknown", why=why)
    having = list_versions_with_spelling(options.engine, name)
    if judged := judge_presence(finding, having, options.engine, version, change):
        return judged
    similar = [
        listed
        for listed in options.by_spelling
        if listed[2:5] == name[2:5] or listed[-5:] == name[-5:]
    ]
    candidates = options.find_spellings(name)
    unknown = f"no option of {options.engine} {options.version}"
    why = f"it may be {' or '.join(candidates[:3])}" if len(candidates) > 1 else unknown
    instead = find_own_option(name, options.engine) or find_closest(name, similar, 0.75)
    return replace(finding, verdict="unknown", why=why, instead=instead)


def _check_value(
    option: ParsedOption, finding: LintFinding, options: CliOptions, version: Version
) -> LintFinding:
    """Return the finding about a value that the parser rejects."""
    assert option.option is not None
    known, engine, value = option.option, options.engine, option.words[0] if option.words else ""
    finding = replace(finding, verdict="wrong value", why=option.error.partition(": ")[2])
    if known.kind == "nothing" and value.lower() in ("true", "false"):
        off = (*known.negations, "nothing")[0]
        return replace(finding, instead=known.name if value.lower() == "true" else off)
    versions = list_versions_with_spelling(engine, known.name)
    having = [one for one in versions if value in get_cli_options(engine, one)[known.name].choices]
    if having and max(having) < options.version:
        return judge_presence(finding, having, engine, version, OptionChange()) or finding
    close = (
        find_closest(value, known.choices, 0.6) if value and known.choices and not having else ""
    )
    return replace(finding, instead=close and f"{known.name} {close}")


def find_word_facts(
    command: ServerCommand, parsed: ParsedCommandLine, version: Version
) -> dict[str, Any]:
    """Find what the words are that belong to no option, and how the model is named."""
    words, is_vllm = parsed.positional, command.engine == "vllm"
    is_sglang_serve = command.engine == "sglang" and "model_path" not in parsed.values
    takes_model = command.subcommand or command.engine == "trtllm" or is_sglang_serve
    listed = []
    for number, word in enumerate(words[:50]):
        kinds = {
            "dash": word[:1] in tuple("\u2010\u2011\u2012\u2013\u2014\u2212"),
            "comment": word.startswith("#"),
            "joined": word.startswith("--") and " " in word,
            "serve": word == "serve" and command.container and is_vllm and words[1:] and not number,
            "stray": number >= takes_model and not is_unresolved(word),
        }
        shown = command.shown.show_stray(word)
        name = f"{shown} {number}" if shown == MASK else shown  # each is told
        kind = next((kind for kind, holds in kinds.items() if holds), "")
        listed.append({"kind": kind, "name": name, "shown": shown})
    # the image is `vllm serve` too in these releases
    is_warned = version >= Version(0, 20, 0)
    model = "" if words else str(parsed.values.get("model", ""))
    return {
        "words": listed, "is_warned": is_warned, "model_option": model and command.shown.show_word("", model),
        "is_vllm_serve": is_vllm and command.subcommand and (not command.container or is_warned),
    }  # fmt: skip


def check_environment(command: ServerCommand, version: Version) -> Iterator[LintFinding]:
    """Check each variable of the engine, and secrets in plain text."""
    known, engine = load_recorded_names("environment", command.engine), command.engine
    for name, value in command.environment.items():
        shown = command.shown.show_variable(name, value)
        found = LintFinding("environment", name, f"{name}={shown}", "ok")
        is_placeholder = re.search(r"[$<>{}*]|your|xxx|token", value, re.IGNORECASE)
        if is_secret_name(name) and len(value) > 7 and not is_placeholder:
            instead = "a secret, or a file that only the server reads"
            yield replace(found, verdict="risky", why="a secret in plain text", instead=instead)
        elif name.startswith("VLLM_") and engine == "vllm":
            change = load_engine_changes(engine).environment.get(name) or OptionChange()
            if change.becomes:
                shown = normalize_variable_value(value)
                change = change.model_copy(update={"instead": f"{change.becomes} {shown}"})
            judged = judge_presence(found, known.get(name, ()), engine, version, change)
            close = find_closest(name, known, 0.8)
            why = f"vllm {version} does not read it"  # it warns, and may be somebody else's
            verdict: LintVerdict = "unknown" if close else "useless"
            yield judged or replace(found, verdict=verdict, why=why, instead=close)


def normalize_variable_value(value: str) -> str:
    """Return a variable's value as the option that replaced the variable takes it.

    Attention backends lost a suffix with engine V0.
    """
    return value.removesuffix("_VLLM_V1")


def find_engine_version(engine: str, version: str | Version) -> Engine | None:
    """Return the engine at that version; None if the catalog does not know it."""
    try:
        return engines.get_engine(engine, version)
    except PlannerError:
        return None


def check_metric(name: str, engine: str, version: str | Version) -> LintFinding:
    """Return the verdict on a metric's name, with or without a histogram's or counter's suffix."""
    known, changes = load_recorded_names("metrics", engine), load_engine_changes(engine).metrics
    nearest = get_cli_options(engine, version).version
    spelled = name.replace("_", ":", 1) if name.startswith(f"{engine}_") else name
    bare = re.sub(r"_(bucket|sum|count|created)$", "", spelled)
    spellings = (spelled, bare, f"{bare}_total", re.sub(r"_total$", "", spelled))
    recorded = next((one for one in spellings if one in known or one in changes), spelled)
    found, version = (
        LintFinding("metric", name, name, "ok"),
        parse_engine_version(engine, str(version)),
    )
    if not any(nearest in versions for versions in known.values()):
        return found
    change = changes.get(recorded) or OptionChange()
    judged = judge_presence(found, known.get(recorded, ()), engine, version, change)
    if judged is None:
        why = f"not on /metrics of {engine} {nearest}"
        return replace(found, verdict="unknown", why=why, instead=find_closest(spelled, known, 0.8))
    why = f"{engine} has a colon in the names of its metrics"
    is_wrong = spelled != name and judged.verdict == "ok"
    return replace(judged, verdict="unknown", why=why, instead=spelled) if is_wrong else judged


def check_metrics(
    names: Sequence[str], commands: Sequence[CheckedCommand], version: str | None
) -> list[LintFinding]:
    """Return the verdicts on the metrics that a text names.

    The version is that of the command of the metric's engine, if the text starts one.
    """
    started = {one.command.engine: one.version for one in reversed(commands)}
    engines = ((name, re.split("[:_]", name)[0]) for name in names)
    return [
        check_metric(
            name, engine,
            (version if engine in started or not commands else None)
            or started.get(engine) or load_flag_lists(engine).versions[-1],
        )
        for name, engine in engines
    ]  # fmt: skip
