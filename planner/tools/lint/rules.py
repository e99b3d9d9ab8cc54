"""Apply the rules of `catalogs/flags/rules.yaml` about combinations of options and variables."""

import re
from collections.abc import Iterator
from functools import cache
from operator import ge, gt, le, lt
from typing import Any

from pydantic import Field

from planner.core.catalog import SourcedEntry, validate_entry
from planner.core.readers import read_yaml
from planner.core.redaction import is_secret_name
from planner.core.versions import Version
from planner.engines.cli_options import (
    FLAGS_DIR,
    ParsedCommandLine,
    get_cli_options,
    is_unresolved,
    load_flag_lists,
)
from planner.tools.lint.findings import LintFinding, LintVerdict
from planner.tools.lint.server_commands import ServerCommand, is_hub_name


class OptionRule(SourcedEntry):
    """One entry of `catalogs/flags/rules.yaml`, whose head explains every field."""

    when: dict[str, str]
    flag: str | None = None
    verdict: LintVerdict
    say: str
    instead: str = ""
    refuses: bool = False
    from_: Version | None = Field(default=None, alias="from")
    before: Version | None = None


@cache
def load_option_rules(engine: str) -> tuple[OptionRule, ...]:
    """Return the rules for all engines, followed by those of `engine`."""
    data = read_yaml(FLAGS_DIR / "rules.yaml")
    entries = [
        (section, n, entry)
        for section in ("all", engine)
        for n, entry in enumerate(data.get(section, []), start=1)
    ]
    return tuple(
        validate_entry(OptionRule, entry, f"flags/rules.yaml, rule {n} of {section}")
        for section, n, entry in entries
    )


def apply_option_rules(
    command: ServerCommand, parsed: ParsedCommandLine, version: Version
) -> Iterator[LintFinding]:
    """Yield the findings of the rules that match a command."""
    values: dict[str, Any] = dict(command.environment)
    # between two records, what the next recorded version reads
    later = [listed for listed in load_flag_lists(command.engine).versions if listed > version]
    if later and get_cli_options(command.engine, version).note:
        values |= get_cli_options(command.engine, later[0]).parse(command.argv).values
    # With Dynamo its frontend listens, not the engine in the container.
    is_dynamo = command.launched.startswith("python -m dynamo.")
    is_plain_container = command.container and not is_dynamo
    values |= {**parsed.values, "container": is_plain_container, "role": command.role or None}
    models = (values[key] for key in ("model", "model_path") if values.get(key))
    name = str(next(models, next(iter(parsed.positional), "")))
    values["hub"] = None if command.planned_on else is_hub_name(name)  # a plan's file says it
    for rule in load_option_rules(command.engine):
        if (rule.from_ and version < rule.from_) or (rule.before and version >= rule.before):
            continue
        if not all(_matches_test(test, values.get(name)) for name, test in rule.when.items()):
            continue
        name = rule.flag or next(iter(rule.when))
        if name.isupper():
            written = f"{name}={command.shown.show_variable(name, str(values.get(name)))}"
            yield LintFinding(
                "environment", name, written, rule.verdict, rule.say, rule.instead, rule.refuses
            )
            continue
        option = next(
            (
                candidate
                for candidate in reversed(parsed.options)
                if candidate.option and candidate.option.argument == name
            ),
            None,
        )
        shown = option.option.name if option and option.option else f"--{name.replace('_', '-')}"
        written = (
            "(not given)"
            if option is None
            else shown
            if is_secret_name(option.written)
            else command.shown.show_option(option)
        )
        yield LintFinding(
            "flag", shown, written, rule.verdict, rule.say, rule.instead, rule.refuses
        )


def _matches_test(test: str, value: Any) -> bool:
    """Return whether a value passes the test of a rule."""
    if test in ("given", "absent"):
        return (value is not None) == (test == "given")
    if test.startswith("not "):
        return str(value) != test[4:]
    if test in ("on", "off"):
        return value is (test == "on")
    if test.startswith("any of "):
        return str(value) in test.split()[2:]
    if test.startswith("none of "):
        return (
            value is not None
            and not is_unresolved(value)
            and str(value).lower() not in test.lower().split()[2:]
        )
    match = re.fullmatch(r"([<>]=?) ([\d.]+)", test)
    if not match:
        return str(value) == test
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return bool({"<": lt, "<=": le, ">": gt, ">=": ge}[match[1]](value, float(match[2])))
