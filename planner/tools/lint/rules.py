"""One engine for the rules of lint: rules over facts, each an entry of a catalog that findings name."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jinja2
from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog, validate_entry
from planner.core.readers import read_yaml
from planner.core.text import format_count
from planner.core.versions import Version
from planner.engines.cli_options import (
    FLAGS_DIR,
    ParsedCommandLine,
    get_cli_options,
    is_unresolved,
    load_flag_lists,
)
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.server_commands import ServerCommand, is_hub_name


class Rule(SourcedEntry):
    """A rule of `catalogs/flags/place.yaml` or of the files beside it, whose heads explain every field."""

    when: str | dict[str, str] = "true"
    each: str = ""
    item: str = ""
    kind: str = "environment"
    written: str | None = None
    verdict: str
    why: str
    instead: str | dict[str, str] = ""
    refuses: bool | str = False
    from_: Version | None = Field(default=None, alias="from")
    before: Version | None = None


_TEXTS = jinja2.Environment()
_TEXTS.filters |= {
    "plural": format_count,
    "startup": lambda one: f"{one.total.mid:.0f} s ({one.total.lo:.0f}-{one.total.hi:.0f})",
}
_compile = cache(_TEXTS.compile_expression)
_parse = cache(_TEXTS.from_string)


_TESTS = {
    "given": "value is not none",
    "absent": "value is none",
    "on": "value is true",
    "off": "value is false",
    "no multiple of (\\d+)": "value is number and value is not boolean and value % (word | int)",
    "not (.+)": "value | string != word",
    "any of .+": "value | string | lower in words",
    "none of .+": "value is not none and not open and value | string | lower not in words",
    **{
        f"{sign} ([-\\d.]+)": f"value is number and value is not boolean and value {sign} word | float"
        for sign in ("<", "<=", ">", ">=")
    },
    ".*": "value | string == word",
}
"""Tests of a value, and what they mean."""


@cache
def load_rules(file: str) -> Mapping[str, Rule]:
    """Return the rules of a file of `catalogs/flags`, by name."""
    return load_catalog(f"flags/{file}.yaml", Rule)


@cache
def load_option_rules(engine: str) -> Mapping[str, Rule]:
    """Return the rules of `rules.yaml` for all engines, followed by those of `engine`."""
    data = read_yaml(FLAGS_DIR / "rules.yaml")
    entries = {
        f"{n} of {section}": entry
        for section in ("all", engine)
        for n, entry in enumerate(data.get(section, []), start=1)
    }
    return {
        name: validate_entry(Rule, entry, f"flags/rules.yaml, rule {name}")
        for name, entry in entries.items()
    }


def apply_rules(
    rules: Mapping[str, Rule], facts: Mapping[str, Any], version: Version,
    write: Callable[[str], tuple[str, str, str]] = lambda item: ("environment", item, ""),
) -> Iterator[LintFinding]:  # fmt: skip
    """Yield the findings of the rules that hold; `write` says what an item without a text is."""
    for name, rule in rules.items():
        if (rule.from_ and version < rule.from_) or (rule.before and version >= rule.before):
            continue
        each: Iterable[Any] = facts[rule.each] if rule.each else (None,)
        for known in ({**facts, "it": it} for it in each):
            if not _holds(rule.when, known):
                continue
            advice = rule.instead
            chosen = advice if isinstance(advice, str) else advice[known["runtime"]]
            texts = (
                rule.item,
                rule.written or "",
                rule.verdict,
                rule.why,
                chosen,
                str(rule.refuses),
            )
            item, written, verdict, why, instead, refuses = (
                _parse(text).render(known) if "{" in text else text for text in texts
            )
            kind = rule.kind
            if rule.written is None:
                kind, item, written = write(item or next(iter(rule.when)))
            yield LintFinding(kind, item, written, verdict, why, instead, refuses == "True", name)  # type: ignore[arg-type]


def _holds(when: str | Mapping[str, str], facts: Mapping[str, Any]) -> bool:
    """Return whether a condition holds: an expression over the facts, or a test for each of some."""
    if isinstance(when, str):
        return bool(_compile(when)(**facts))
    return all(bool(_find_test(test)(value=facts.get(name))) for name, test in when.items())


@cache
def _find_test(test: str) -> Callable[..., Any]:
    """Find the expression over a value that a test such as `given`, `> 1` or `any of a b` stands for."""
    for pattern, expression in _TESTS.items():
        if match := re.fullmatch(pattern, test):
            words = tuple(test.lower().split()[2:])
            compiled = _compile(expression)
            return lambda value: compiled(
                value=value,
                word=match[match.lastindex or 0],
                words=words,
                open=is_unresolved(value),
            )
    raise AssertionError(test)


def describe_item(
    command: ServerCommand, parsed: ParsedCommandLine, item: str
) -> tuple[str, str, str]:
    """Return kind, name and text of a variable, a setting or an argument of a command."""
    if item.isupper():
        shown = command.shown.show_variable(item, str(command.environment.get(item)))
        return "environment", item, f"{item}={shown}"
    if item.partition(".")[0] in command.config:
        return "setting", item, item  # whose value may hold anything
    given = [one for one in parsed.options if one.option and one.option.argument == item]
    name = f"--{item.replace('_', '-')}"
    name = given[-1].option.name if given and given[-1].option else name
    return "flag", name, command.shown.show_option(given[-1]) if given else "(not given)"


def apply_option_rules(
    command: ServerCommand, parsed: ParsedCommandLine, version: Version
) -> Iterator[LintFinding]:
    """Yield the findings of the rules about options and variables that match a command."""
    values: dict[str, Any] = dict(command.environment)
    # between two records, what the next recorded version reads
    later = [listed for listed in load_flag_lists(command.engine).versions if listed > version]
    if later and get_cli_options(command.engine, version).note:
        values |= get_cli_options(command.engine, later[0]).parse(command.argv).values
    values |= {
        f"{key}.{inner}": value for key, one in command.config.items() if isinstance(one, Mapping)
        for inner, value in one.items()
    }  # fmt: skip
    values |= {
        **command.config,
        **parsed.values,
        "container": command.container,
        "role": command.role or None,
    }
    models = (values[key] for key in ("model", "model_path") if values.get(key))
    name = str(next(models, next(iter(parsed.positional), "")))
    values["hub"] = None if command.planned_on else is_hub_name(name)  # a plan's file says it

    write = partial(describe_item, command, parsed)
    yield from apply_rules(load_option_rules(command.engine), values, version, write)
