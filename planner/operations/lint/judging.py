"""A verdict on every option and variable of a command: what a version of its engine makes of it.

What is gone since when follows from `catalogs/flags/ENGINE.csv`; `changes.yaml` and `rules.yaml` there say the rest.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from planner.core.quantities import PlannerError, closest
from planner.facts import engines
from planner.facts.engines import Engine, release
from planner.operations.flags import Given, Options, Parsed, left_open, listed, lists, options, versions_with
from planner.operations.lint.launching import Command
from planner.operations.lint.rules import applied
from planner.operations.lint.verdicts import Change, Finding, Verdict, changes, secret

DEFAULTS = {
    "enable_prefix_caching": "prefix_caching", "enable_chunked_prefill": "chunked_prefill",
    "async_scheduling": "async_scheduling", "gpu_memory_utilization": "gpu_memory_utilization",
}  # fmt: skip
"""vLLM's arguments whose defaults `catalogs/engines.yaml` has by version."""
_SECRETS = re.compile(r"(API_KEY|HF_TOKEN|HUGGING_?FACE_HUB_TOKEN|SECRET_KEY)$")


@dataclass(frozen=True)
class Judged:
    """A command as a version reads it, and what is to be said of it."""

    command: Command
    options: Options
    version: str
    asked: Parsed
    parsed: Parsed  # as `asked`, with misspelt options as they were meant
    findings: tuple[Finding, ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """Argument -> value, with what else sets them: TGI's environment, and TensorRT-LLM's file, which wins."""
        variables = {name.lower(): value for name, value in self.command.environment.items()}
        own: dict[str, Any] = {}
        if self.command.engine == "tgi":  # clap reads each option from the variable of its name, too
            known = {option for option in self.options.by_spelling.values() if option.argument in variables}
            words = [word for option in known for word in (option.name, variables[option.argument])]
            own = {**self.options.parse(words).values, "prefix_caching": variables.get("prefix_caching")}
        return {**own, **self.parsed.values, **self.command.config}


def judge(command: Command, version: str) -> Judged:
    """The verdicts on a command at a version of its engine, in the order in which things stand there."""
    known = options(command.engine, version)
    asked = known.parse(command.argv)
    findings = [flag(given, known, version) for given in asked.given]
    parsed = _meant(command, asked, findings, known)
    pairs = zip(asked.given, parsed.given, strict=True)
    findings += [flag(meant, known, version) for given, meant in pairs if meant.error and meant != given]
    findings += words(command, parsed, version)
    findings += environment(command, version)
    findings += settings(command, version)
    said = {(found.kind, found.name): at for at, found in enumerate(findings)}
    for extra in (*defaults(parsed, command.engine, version), *applied(command, parsed, version)):
        at = said.get((extra.kind, extra.name))
        if at is None:
            findings.append(extra)
        elif (findings[at].verdict == "ok" and not findings[at].why) or (extra.mend and not findings[at].mend):
            findings[at] = extra
    return Judged(command, known, version, asked, parsed, tuple(findings))


def _meant(command: Command, asked: Parsed, findings: Sequence[Finding], known: Options) -> Parsed:
    """The command line with its misspelt options as they were meant, so that their values are judged too."""
    unknown = (found for found in findings if found.verdict == "unknown" and found.instead in known.spellings)
    right = {found.written.split()[0]: found.instead for found in unknown}
    parted = [word.partition("=") for word in command.argv]
    meant = known.parse([right.get(name, name) + sign + value for name, sign, value in parted])
    return meant if len(meant.given) == len(asked.given) else asked


def flag(given: Given, known: Options, version: str) -> Finding:
    spelt = _folded(given.written, known)
    name = given.option.name if given.option and spelt not in changes(known.engine).flags else spelt
    written = " ".join([given.written, *(["..."] if secret(given.written) else map(shlex.quote, given.words))])[:300]
    change = changes(known.engine).flags.get(name) or Change()
    if given.option is None:
        found = _gone(name, written, known, version, change)
        return replace(found, refused=found.mend)
    if given.error:
        return Finding("flag", name, written, *_wrong_value(given, known), refused=True)
    verdict, why = _still(change, name, version)
    after = next((one for one in known.lists.versions if known.note and release(one) > release(version)), known.version)
    if verdict == "ok" and given.option.name not in options(known.engine, after).spellings:
        verdict, why = "risky", f"in {known.version}, not in {after}: {version} is between them"
    return Finding("flag", name, written, verdict, why, change.advice if why else "")


def settings(command: Command, version: str) -> Iterator[Finding]:
    """What is said of the keys of TensorRT-LLM's file, of which any that it does not know ends the start."""
    given = dict(command.config)
    given |= {f"{key}.{inner}": value for key, held in command.config.items() if isinstance(held, Mapping)
              for inner, value in held.items()}  # fmt: skip
    for key, value in given.items():
        change = changes(command.engine).settings.get(key)
        if change and change.gone_from and release(change.gone_from) <= release(version):
            why = f"its file has no {key} since {change.gone_from}, if not before"
            instead = change.instead or f"{change.becomes}: {value}"
            yield Finding("setting", key, f"{key}: {value}"[:300], change.verdict, why, instead[:300], refused=True)


def _folded(written: str, known: Options) -> str:
    name = written.partition(".")[0] if written.startswith("-") and "." in written else written
    return name.replace("_", "-") if known.lists.underscores and name.startswith("--") else name


def _still(change: Change, name: str, version: str) -> tuple[Verdict, str]:
    """What is said of an option that is still taken."""
    at = release(version)
    if change.falls_back and release(change.falls_back[0]) <= at < release(change.falls_back[1]):
        return "risky", "engine V1 does not have it: the server falls back to the slower V0, or ends"
    if change.idle_from and at >= release(change.idle_from):
        return "useless", f"it does nothing since {change.idle_from}"
    if change.old_from and at >= release(change.old_from):
        return "renamed", f"it is taken with a warning since {change.old_from}, and will go"
    return "ok", ""


def _gone(name: str, written: str, known: Options, version: str, change: Change) -> Finding:
    """An option that this version does not take: gone, not there yet, or never there."""
    had = versions_with(known.engine, name)
    all_versions = lists(known.engine).versions
    at = all_versions.index(known.version)
    later = [one for one in had if all_versions.index(one) > at]
    earlier = [one for one in had if all_versions.index(one) <= at]
    if later and known.note and all_versions.index(later[0]) == at + 1:
        return Finding("flag", name, written, "ok", f"not in {known.version}, in {later[0]}: {version} is between them")
    if earlier:
        first = all_versions[all_versions.index(earlier[-1]) + 1]
        why = f"gone since {first}, if not before; {earlier[-1]} had it"
        return Finding("flag", name, written, change.verdict, why, change.advice or "nothing")
    if change.advice:
        return Finding("flag", name, written, change.verdict, "versions before all lists had it", change.advice)
    if later:
        return Finding("flag", name, written, "unknown", f"it comes with {later[0]}, or shortly before", "")
    alike = [one for one in known.by_spelling if one[2:5] == name[2:5] or one[-5:] == name[-5:]]
    several, none = known.find(name), f"no option of {known.engine} {known.version}"
    why = f"it may be {' or '.join(several[:3])}" if len(several) > 1 else none
    return Finding("flag", name, written, "unknown", why, closest(name, alike, 0.75))


def _wrong_value(given: Given, known: Options) -> tuple[Verdict, str, str]:
    """What is said of a value that the parser refuses."""
    assert given.option is not None
    name, value = given.option.name, given.words[0] if given.words else ""
    why = given.error.partition(": ")[2]
    if given.option.kind == "nothing" and value.lower() in ("true", "false"):
        return "wrong value", why, name if value.lower() == "true" else " or ".join(given.option.off[:1]) or "nothing"
    if "json" in given.option.kind and re.fullmatch(r"\w+=\w+(,\w+=\w+)*", value):
        pairs = (pair.split("=") for pair in value.split(","))
        return "wrong value", why, f"{name} {json.dumps({key: int(v) if v.isdigit() else v for key, v in pairs})}"
    if value and given.option.choices:
        had = [v for v in versions_with(known.engine, name) if value in options(known.engine, v)[name].choices]
        if had:
            gone = release(had[-1]) < release(known.version)
            return "removed", f"{value} was there up to {had[-1]}; {why}" if gone else why, ""
        close = closest(value, given.option.choices, 0.6)
        return "wrong value", why, close and f"{name} {close}"
    return "wrong value", why, ""


def words(command: Command, parsed: Parsed, version: str) -> Iterator[Finding]:
    """What is said of words that belong to no option: one may name the model."""
    takes_model = command.subcommand or command.engine == "trtllm"
    extra = parsed.positional[1:] if takes_model else parsed.positional
    if command.engine == "sglang" and parsed.positional and "model_path" not in parsed.values:
        extra = parsed.positional[1:]  # `sglang serve MODEL`
    behind = len(parsed.positional) - len(extra)
    serve = command.container and command.engine == "vllm" and len(parsed.positional) > 1
    for number, word in enumerate(parsed.positional[:50]):
        said: tuple[Verdict, str, str] | None = None
        if word and word[0] in "\u2010\u2011\u2012\u2013\u2014\u2212":
            said = "unknown", "it begins with a dash that is no hyphen, as word processors make of two", f"--{word[1:]}"
        elif word.startswith("--") and " " in word:
            said = "contradicts", "one word with a blank in it is no option", "two words"
        elif word == "serve" and serve and number == 0:
            why = "the image starts `vllm serve` by itself, and takes this word for the model"
            said = "contradicts", why, "the model first, without serve"
        elif number >= behind and not left_open(word):
            said = "unknown", "it belongs to no option", ""
        if said:
            yield Finding("word", word[:80], word[:300], *said, refused=True)
    serves = command.engine == "vllm" and command.subcommand and not command.container
    if serves and "model" in parsed.values and not parsed.positional and release(version) >= (0, 8, 5):
        why = "`vllm serve` takes the model as its first word; --model is taken with a warning, or not at all"
        yield Finding("flag", "--model", f"--model {parsed.values['model']}"[:300], "ok", why, "")


def environment(command: Command, version: str) -> Iterator[Finding]:
    """The verdict on each variable of the engine, and on secrets."""
    known, engine = listed("environment", command.engine), command.engine
    all_versions, nearest = lists(engine).versions, options(engine, version).version
    at = all_versions.index(nearest)
    for name, value in command.environment.items():
        written = f"{name}={value}"[:300]
        change = changes(engine).environment.get(name) or Change()
        stands_in = re.search(r"[$<>{}*]|your|xxx|token", value, re.IGNORECASE)
        if _SECRETS.search(name) and len(value) > 7 and not stands_in:
            why, instead = "a secret in plain text", "a secret, or a file that only the server reads"
            yield Finding("environment", name, f"{name}=...", "risky", why, instead)
            continue
        if not name.startswith("VLLM_") or engine != "vllm":
            continue
        had = known.get(name, ())
        earlier = [one for one in had if all_versions.index(one) <= at]
        after = all_versions[at + 1 : at + 2]
        if nearest not in had and set(after) & set(had) and release(nearest) != release(version):
            yield Finding("environment", name, written, "ok", f"not read by {nearest}, read by {after[0]}")
        elif nearest in had:
            verdict, why = _still(change, name, version)
            yield Finding("environment", name, written, verdict, why, change.advice if why else "")
        elif earlier:
            first = all_versions[all_versions.index(earlier[-1]) + 1]
            why = f"not read since {first}, if not before; {earlier[-1]} did, now it only warns"
            instead = f"{change.becomes} {current(value)}" if change.becomes else change.instead
            yield Finding("environment", name, written, change.verdict, why, instead or "nothing")
        elif had:
            yield Finding("environment", name, written, "unknown", f"read since {had[0]}, or shortly before", "")
        else:
            why = f"vllm {nearest} does not read it"
            yield Finding("environment", name, written, "unknown", why, closest(name, known, 0.8))


def current(value: str) -> str:
    """The value of a variable as an option takes it: attention backends lost an ending with engine V0."""
    return value.removesuffix("_VLLM_V1")


def engine_at(engine: str, version: str) -> Engine | None:
    """The facts of that version, where the planner knows them."""
    try:
        return engines.engine(engine, version)
    except PlannerError:
        return None


def defaults(parsed: Parsed, engine: str, version: str) -> Iterator[Finding]:
    """Options that say what is so anyway."""
    facts = engine_at(engine, version)
    if engine != "vllm" or facts is None:
        return
    for given in parsed.given:
        fact = DEFAULTS.get(given.option.argument) if given.option and not given.error else None
        if fact and given.option and given.value == facts.facts[fact]:
            since = _since(fact, given.value, version)
            why = f"the default since {since}, if not before" if since else "the default"
            if fact == "prefix_caching" and given.value and not facts.facts["prefix_caching_hybrid"]:
                why += ", but for models with recurrent layers"
            yield Finding("flag", given.option.name, str(given)[:300], "useless", why)


@lru_cache(maxsize=256)
def _since(fact: str, value: Any, version: str) -> str:
    """The first version from which on a default of vLLM is what it is at `version`."""
    first = ""
    for listed_version in lists("vllm").versions:
        known = engine_at("vllm", listed_version)
        if known is None or release(listed_version) > release(version):
            continue
        first = (first or known.facts_version) if known.facts[fact] == value else ""
    return first
