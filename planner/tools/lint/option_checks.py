"""A verdict on every option and variable of a command: what a version of its engine makes of it.

What is gone since when follows from `catalogs/flags/ENGINE.csv`; `changes.yaml` and `rules.yaml`
there say the rest.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from planner.core.errors import PlannerError, find_closest
from planner.core.versions import Version
from planner.engines import engine as engines
from planner.engines.cli_options import (
    CliOptions,
    ParsedCommandLine,
    ParsedOption,
    get_cli_options,
    is_unresolved,
    list_versions_with_spelling,
    load_flag_lists,
    load_recorded_names,
)
from planner.engines.engine import Engine
from planner.tools.lint.findings import (
    LintFinding,
    LintVerdict,
    OptionChange,
    is_secret_option,
    load_engine_changes,
)
from planner.tools.lint.rules import apply_option_rules
from planner.tools.lint.server_commands import ServerCommand

VERSIONED_DEFAULTS = {
    "enable_prefix_caching": "prefix_caching", "enable_chunked_prefill": "chunked_prefill",
    "async_scheduling": "async_scheduling", "gpu_memory_utilization": "gpu_memory_utilization",
}  # fmt: skip
"""vLLM's arguments whose defaults `catalogs/engines.yaml` has by version."""
_SECRET_NAME_PATTERN = re.compile(r"(API_KEY|HF_TOKEN|HUGGING_?FACE_HUB_TOKEN|SECRET_KEY)$")


@dataclass(frozen=True)
class CheckedCommand:
    """A command as a version reads it, and what is to be said of it."""

    command: ServerCommand
    options: CliOptions
    version: Version
    as_written: ParsedCommandLine
    as_meant: ParsedCommandLine  # as `asked`, with misspelt options as they were meant
    findings: tuple[LintFinding, ...]

    @property
    def argument_values(self) -> Mapping[str, Any]:
        """Argument -> value, with what else sets them: TGI's environment, and TensorRT-LLM's file, which wins."""
        variables = {name.lower(): value for name, value in self.command.environment.items()}
        own: dict[str, Any] = {}
        if (
            self.command.engine == "tgi"
        ):  # clap reads each option from the variable of its name, too
            cli_options = {
                option
                for option in self.options.by_spelling.values()
                if option.argument in variables
            }
            words = [
                word for option in cli_options for word in (option.name, variables[option.argument])
            ]
            own = {
                **self.options.parse(words).values,
                "prefix_caching": variables.get("prefix_caching"),
            }
        return {**own, **self.as_meant.values, **self.command.config}


def check_command(command: ServerCommand, engine_version: str | Version) -> CheckedCommand:
    """The verdicts on a command at a version of its engine, in the order in which things stand there."""
    cli_options = get_cli_options(command.engine, engine_version)
    version = Version.parse(str(engine_version))
    parsed_command_line = cli_options.parse(command.argv)
    findings = [check_flag(option, cli_options, version) for option in parsed_command_line.options]
    parsed = _correct_misspellings(command, parsed_command_line, findings, cli_options)
    pairs = zip(parsed_command_line.options, parsed.options, strict=True)
    findings += [
        check_flag(meant, cli_options, version)
        for given, meant in pairs
        if meant.error and meant != given
    ]
    findings += check_positional_words(command, parsed, version)
    findings += check_environment(command, version)
    findings += check_settings(command, version)
    said = {(finding.kind, finding.name): at for at, finding in enumerate(findings)}
    for extra in (
        *find_redundant_defaults(parsed, command.engine, version),
        *apply_option_rules(command, parsed, version),
    ):
        at = said.get((extra.kind, extra.name))
        if at is None:
            findings.append(extra)
        elif (findings[at].verdict == "ok" and not findings[at].why) or (
            extra.needs_fix and not findings[at].needs_fix
        ):
            findings[at] = extra
    return CheckedCommand(
        command, cli_options, version, parsed_command_line, parsed, tuple(findings)
    )


def _correct_misspellings(
    command: ServerCommand,
    parsed: ParsedCommandLine,
    findings: Sequence[LintFinding],
    options: CliOptions,
) -> ParsedCommandLine:
    """The command line with its misspelt options as they were meant, so that their values are judged too."""
    unknown = (
        finding
        for finding in findings
        if finding.verdict == "unknown" and finding.instead in options.spellings
    )
    right = {found.written.split()[0]: found.instead for found in unknown}
    parted = [word.partition("=") for word in command.argv]
    meant = options.parse([right.get(name, name) + sign + value for name, sign, value in parted])
    return meant if len(meant.options) == len(parsed.options) else parsed


def check_flag(option: ParsedOption, options: CliOptions, version: Version) -> LintFinding:
    spelt = _normalize_setting_name(option.written, options)
    name = (
        option.option.name
        if option.option and spelt not in load_engine_changes(options.engine).flags
        else spelt
    )
    written = " ".join(
        [
            option.written,
            *(["..."] if is_secret_option(option.written) else map(shlex.quote, option.words)),
        ]
    )[:300]
    change = load_engine_changes(options.engine).flags.get(name) or OptionChange()
    if option.option is None:
        finding = _check_missing_option(name, written, options, version, change)
        return replace(finding, refused=finding.needs_fix)
    if option.error:
        return LintFinding("flag", name, written, *_check_value(option, options), refused=True)
    verdict, why = _check_accepted_option(change, name, version)
    after = next(
        (one for one in options.lists.versions if options.note and one > version),
        options.version,
    )
    if (
        verdict == "ok"
        and option.option.name not in get_cli_options(options.engine, after).spellings
    ):
        verdict, why = "risky", f"in {options.version}, not in {after}: {version} is between them"
    return LintFinding("flag", name, written, verdict, why, change.advice if why else "")


def check_settings(command: ServerCommand, version: Version) -> Iterator[LintFinding]:
    """What is said of the keys of TensorRT-LLM's file, of which any that it does not know ends the start."""
    given = dict(command.config)
    given |= {f"{key}.{inner}": value for key, held in command.config.items() if isinstance(held, Mapping)
              for inner, value in held.items()}  # fmt: skip
    for key, value in given.items():
        change = load_engine_changes(command.engine).settings.get(key)
        if change and change.gone_from and change.gone_from <= version:
            why = f"its file has no {key} since {change.gone_from}, if not before"
            instead = change.instead or f"{change.becomes}: {value}"
            yield LintFinding(
                "setting",
                key,
                f"{key}: {value}"[:300],
                change.verdict,
                why,
                instead[:300],
                refused=True,
            )


def _normalize_setting_name(written: str, options: CliOptions) -> str:
    name = written.partition(".")[0] if written.startswith("-") and "." in written else written
    return name.replace("_", "-") if options.lists.underscores and name.startswith("--") else name


def _check_accepted_option(
    change: OptionChange, name: str, version: Version
) -> tuple[LintVerdict, str]:
    """What is said of an option that is still taken."""
    if change.falls_back and change.falls_back[0] <= version < change.falls_back[1]:
        return (
            "risky",
            "engine V1 does not have it: the server falls back to the slower V0, or ends",
        )
    if change.idle_from and version >= change.idle_from:
        return "useless", f"it does nothing since {change.idle_from}"
    if change.old_from and version >= change.old_from:
        return "renamed", f"it is taken with a warning since {change.old_from}, and will go"
    return "ok", ""


def _check_missing_option(
    name: str, written: str, options: CliOptions, version: Version, change: OptionChange
) -> LintFinding:
    """An option that this version does not take: gone, not there yet, or never there."""
    had = list_versions_with_spelling(options.engine, name)
    all_versions = load_flag_lists(options.engine).versions
    at = all_versions.index(options.version)
    later = [one for one in had if all_versions.index(one) > at]
    earlier = [one for one in had if all_versions.index(one) <= at]
    if later and options.note and all_versions.index(later[0]) == at + 1:
        return LintFinding(
            "flag",
            name,
            written,
            "ok",
            f"not in {options.version}, in {later[0]}: {version} is between them",
        )
    if earlier:
        first = all_versions[all_versions.index(earlier[-1]) + 1]
        why = f"gone since {first}, if not before; {earlier[-1]} had it"
        return LintFinding("flag", name, written, change.verdict, why, change.advice or "nothing")
    if change.advice:
        return LintFinding(
            "flag", name, written, change.verdict, "versions before all lists had it", change.advice
        )
    if later:
        return LintFinding(
            "flag", name, written, "unknown", f"it comes with {later[0]}, or shortly before", ""
        )
    alike = [one for one in options.by_spelling if one[2:5] == name[2:5] or one[-5:] == name[-5:]]
    several, none = options.find_spellings(name), f"no option of {options.engine} {options.version}"
    why = f"it may be {' or '.join(several[:3])}" if len(several) > 1 else none
    return LintFinding("flag", name, written, "unknown", why, find_closest(name, alike, 0.75))


def _check_value(option: ParsedOption, options: CliOptions) -> tuple[LintVerdict, str, str]:
    """What is said of a value that the parser refuses."""
    assert option.option is not None
    name, value = option.option.name, option.words[0] if option.words else ""
    why = option.error.partition(": ")[2]
    if option.option.kind == "nothing" and value.lower() in ("true", "false"):
        return (
            "wrong value",
            why,
            (
                name
                if value.lower() == "true"
                else " or ".join(option.option.negations[:1]) or "nothing"
            ),
        )
    if "json" in option.option.kind and re.fullmatch(r"\w+=\w+(,\w+=\w+)*", value):
        pairs = (pair.split("=") for pair in value.split(","))
        return (
            "wrong value",
            why,
            f"{name} {json.dumps({key: int(v) if v.isdigit() else v for key, v in pairs})}",
        )
    if value and option.option.choices:
        had = [
            v
            for v in list_versions_with_spelling(options.engine, name)
            if value in get_cli_options(options.engine, v)[name].choices
        ]
        if had:
            gone = had[-1] < options.version
            return "removed", f"{value} was there up to {had[-1]}; {why}" if gone else why, ""
        close = find_closest(value, option.option.choices, 0.6)
        return "wrong value", why, close and f"{name} {close}"
    return "wrong value", why, ""


def check_positional_words(
    command: ServerCommand, parsed: ParsedCommandLine, version: Version
) -> Iterator[LintFinding]:
    """What is said of words that belong to no option: one may name the model."""
    takes_model = command.subcommand or command.engine == "trtllm"
    extra = parsed.positional[1:] if takes_model else parsed.positional
    if command.engine == "sglang" and parsed.positional and "model_path" not in parsed.values:
        extra = parsed.positional[1:]  # `sglang serve MODEL`
    behind = len(parsed.positional) - len(extra)
    serve = command.container and command.engine == "vllm" and len(parsed.positional) > 1
    for number, word in enumerate(parsed.positional[:50]):
        said: tuple[LintVerdict, str, str] | None = None
        if word and word[0] in "\u2010\u2011\u2012\u2013\u2014\u2212":
            said = (
                "unknown",
                "it begins with a dash that is no hyphen, as word processors make of two",
                f"--{word[1:]}",
            )
        elif word.startswith("--") and " " in word:
            said = "contradicts", "one word with a blank in it is no option", "two words"
        elif word == "serve" and serve and number == 0:
            why = "the image starts `vllm serve` by itself, and takes this word for the model"
            said = "contradicts", why, "the model first, without serve"
        elif number >= behind and not is_unresolved(word):
            said = "unknown", "it belongs to no option", ""
        if said:
            yield LintFinding("word", word[:80], word[:300], *said, refused=True)
    serves = command.engine == "vllm" and command.subcommand and not command.container
    if (
        serves
        and "model" in parsed.values
        and not parsed.positional
        and version >= Version(0, 8, 5)
    ):
        why = (
            "`vllm serve` takes the model as its first word; --model is taken with a warning, or"
            " not at all"
        )
        yield LintFinding(
            "flag", "--model", f"--model {parsed.values['model']}"[:300], "ok", why, ""
        )


def check_environment(command: ServerCommand, version: Version) -> Iterator[LintFinding]:
    """The verdict on each variable of the engine, and on secrets."""
    known, engine = load_recorded_names("environment", command.engine), command.engine
    all_versions, nearest = (
        load_flag_lists(engine).versions,
        get_cli_options(engine, version).version,
    )
    at = all_versions.index(nearest)
    for name, value in command.environment.items():
        written = f"{name}={value}"[:300]
        change = load_engine_changes(engine).environment.get(name) or OptionChange()
        stands_in = re.search(r"[$<>{}*]|your|xxx|token", value, re.IGNORECASE)
        if _SECRET_NAME_PATTERN.search(name) and len(value) > 7 and not stands_in:
            why, instead = (
                "a secret in plain text",
                "a secret, or a file that only the server reads",
            )
            yield LintFinding("environment", name, f"{name}=...", "risky", why, instead)
            continue
        if not name.startswith("VLLM_") or engine != "vllm":
            continue
        had = known.get(name, ())
        earlier = [one for one in had if all_versions.index(one) <= at]
        after = all_versions[at + 1 : at + 2]
        if nearest not in had and set(after) & set(had) and nearest != version:
            yield LintFinding(
                "environment", name, written, "ok", f"not read by {nearest}, read by {after[0]}"
            )
        elif nearest in had:
            verdict, why = _check_accepted_option(change, name, version)
            yield LintFinding(
                "environment", name, written, verdict, why, change.advice if why else ""
            )
        elif earlier:
            first = all_versions[all_versions.index(earlier[-1]) + 1]
            why = f"not read since {first}, if not before; {earlier[-1]} did, now it only warns"
            instead = (
                f"{change.becomes} {normalize_variable_value(value)}"
                if change.becomes
                else change.instead
            )
            yield LintFinding(
                "environment", name, written, change.verdict, why, instead or "nothing"
            )
        elif had:
            yield LintFinding(
                "environment",
                name,
                written,
                "unknown",
                f"read since {had[0]}, or shortly before",
                "",
            )
        else:
            why = f"vllm {nearest} does not read it"
            yield LintFinding(
                "environment", name, written, "unknown", why, find_closest(name, known, 0.8)
            )


def normalize_variable_value(value: str) -> str:
    """The value of a variable as an option takes it: attention backends lost an ending with engine V0."""
    return value.removesuffix("_VLLM_V1")


def find_engine_version(engine: str, version: str | Version) -> Engine | None:
    """The facts of that version, where the planner knows them."""
    try:
        return engines.get_engine(engine, version)
    except PlannerError:
        return None


def find_redundant_defaults(
    parsed: ParsedCommandLine, engine: str, version: Version
) -> Iterator[LintFinding]:
    """Options that say what is so anyway."""
    facts = find_engine_version(engine, version)
    if engine != "vllm" or facts is None:
        return
    for option in parsed.options:
        fact = (
            VERSIONED_DEFAULTS.get(option.option.argument)
            if option.option and not option.error
            else None
        )
        if fact and option.option and option.value == getattr(facts.facts, fact):
            since = _find_default_since(fact, option.value, version)
            why = f"the default since {since}, if not before" if since else "the default"
            if fact == "prefix_caching" and option.value and not facts.facts.prefix_caching_hybrid:
                why += ", but for models with recurrent layers"
            yield LintFinding("flag", option.option.name, str(option)[:300], "useless", why)


@lru_cache(maxsize=256)
def _find_default_since(fact: str, value: Any, version: Version) -> Version | None:
    """The first version from which on a default of vLLM is what it is at `version`."""
    first = None
    for listed_version in load_flag_lists("vllm").versions:
        engine = find_engine_version("vllm", listed_version)
        if engine is None or listed_version > version:
            continue
        first = (first or engine.facts_version) if getattr(engine.facts, fact) == value else None
    return first
