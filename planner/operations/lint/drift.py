"""What another version makes of a command: its verdicts there, and the defaults that it leaves open."""

from collections.abc import Iterator
from typing import Any

from planner.operations.flags import Option, options
from planner.operations.lint.judging import DEFAULTS, Judged, engine_at, judge
from planner.operations.lint.verdicts import Finding


def later(judged: Judged, to: str) -> list[Finding]:
    """What `to` changes for a command: its verdicts, and the defaults that it leaves open."""
    now = {(one.kind, one.name): one for one in judged.findings}
    then = judge(judged.command, to).findings
    changed = [one for one in then if one.verdict != "ok" and one != now.get((one.kind, one.name))]
    listed = list(_listed(judged, to))
    named = {one.name for one in listed}
    return [*changed, *listed, *(one for one in _known(judged, to) if one.name not in named)]


def _listed(judged: Judged, to: str) -> Iterator[Finding]:
    """Defaults that differ between the lists of two versions."""
    old, new = judged.options, options(judged.command.engine, to)
    for name in dict.fromkeys(option.name for option in old.by_spelling.values()):
        if name not in new.by_spelling or old[name].argument in judged.parsed.values or old[name].kind == "json":
            continue
        before, after = old[name].default, new[name].default
        if before != after and before and after:
            yield _changed(name, before, after, _keeping(new[name], before))


def _known(judged: Judged, to: str) -> Iterator[Finding]:
    """Defaults that `catalogs/engines.yaml` has by version."""
    first, second = (engine_at(judged.command.engine, version) for version in (judged.version, to))
    if judged.command.engine != "vllm" or first is None or second is None:
        return
    new = options("vllm", to)
    for argument, fact in DEFAULTS.items():
        name, before, after = f"--{argument.replace('_', '-')}", first.facts[fact], second.facts[fact]
        if argument not in judged.parsed.values and before != after:
            yield _changed(name, _word(before), _word(after), _keeping(new[name], _word(before)))


def _keeping(option: Option, before: Any) -> str:
    """What keeps the default as it was; empty where the option has no words for it."""
    if before == "on":
        return option.name
    return next(iter(option.off), "") if before == "off" else f"{option.name} {before}"


def _changed(name: str, before: Any, after: Any, keep: str) -> Finding:
    why = f"the default is {after}, it was {before}"
    return Finding("flag", name, f"{name} {before} -> {after}", "default changed", why, keep)


def _word(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value
