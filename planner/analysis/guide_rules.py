"""Rules of circulating guides (`catalogs/guide_rules.yaml`): recognize them in prose, and judge them.

The lesson and `headroom check-guide` read the same entries, so that they never differ.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field, field_validator

from planner.analysis.guide_judgements import JUDGES, Judgement
from planner.core.catalog import StrictEntry, load_catalog
from planner.core.errors import PlannerError

RULES_FILE = "guide_rules.yaml"
MAX_SENTENCE_LENGTH = 1000
"""Characters that are searched at once; longer sentences are cut."""
MACROS = {
    "%model%": r"(?P<model>(?<![A-Za-z])(?!bit\b)(?:Meta-|gpt-)?"
    r"[A-Z][A-Za-z]+(?:[- ]?v?\d+(?:\.\d+)?)?[- ]\d+(?:\.\d+)?B\b(?:-Instruct)?"
    r"|(?<![\w.-])\d+(?:\.\d+)?B\b)",
    "%gpu%": r"(?P<gpu>(?:RTX[- ]?)?(?:A10G?|A100(?:[- ]?(?:SXM|PCIe))?(?:[- ]?[48]0\s?GB)?"
    r"|H100(?:[- ]?(?:SXM|PCIe|NVL))?|H200|B200|L4|L40S?|T4|3090|4090))\b",
    "%count%": r"(?:(?P<count>\d+|an?|one|two|four|eight|single)\s*(?:[x\u00d7*]\s*)?)",
    "%number%": r"\d+(?:,\d{3})*(?:\.\d+)?",
    "%near%": r"(?:[^.;|\n]|\.(?=\d)){0,60}?",
    "%weights%": r"(?:(?!KV\b|cache|tokens?\b)[^.;|\n]|\.(?=\d)){0,60}?",
    "%far%": r"[^;\n]{0,160}?",
}
"""What patterns abbreviate: a model, a GPU, a number of them, a number, text in between."""
NUMBER_WORDS = {"a": 1, "an": 1, "one": 1, "single": 1, "two": 2, "four": 4, "eight": 8}
_BREAK_PATTERN = re.compile(
    r"\n\s*\n|\n(?=\s*(?:[-*+]\s|\d+\.\s|#|\||>))|(?<=[.!?])\s+(?=[A-Z\"“`*(])"
)

_DENIAL_PATTERN = re.compile(r"\b(?:not|never|cannot)\b|n['\u2019]t\b", re.IGNORECASE)
_DENIAL_BEFORE_PATTERN = re.compile(
    r"(?:\b(?:not|never|cannot|avoid|(?:myth|wrong|false|mistaken)(?: to \w+)? that)|n['\u2019]t)\s(?:\w+\s)?$",
    re.IGNORECASE,
)

Stated = dict[str, float | str]
"""What a claim states, by the names of its pattern's groups."""


class GuideRule(StrictEntry):
    """One entry of `catalogs/guide_rules.yaml`, whose head explains every field."""

    topic: Literal["memory", "batches", "speed", "operation"]
    claim: str
    judge: str
    states: dict[str, float | str] = Field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    remember: str

    @field_validator("judge")
    @classmethod
    def _check_judge(cls, name: str) -> str:
        if name not in JUDGES:
            raise ValueError(f"expected one of {', '.join(JUDGES)}")
        return name

    @field_validator("patterns")
    @classmethod
    def _check_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                compile_pattern(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r}: {error}") from None
        return patterns


@dataclass(frozen=True)
class StatedRule:
    """A rule that a text states, with what the text says of it."""

    name: str
    rule: GuideRule
    text: str
    stated: Stated


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of the catalog, its macros filled in."""
    for macro, meaning in MACROS.items():
        pattern = pattern.replace(macro, meaning)
    return re.compile(pattern, re.IGNORECASE)


@cache
def load_guide_rules() -> Mapping[str, GuideRule]:
    """Load the catalog of rules, by name."""
    return load_catalog(RULES_FILE, GuideRule)


def judge_rule(name: str, stated: Stated | None = None, version: str | None = None) -> Judgement:
    """Judge a rule, or what a text states of it, for a version of vLLM (None: the newest known)."""
    rule = load_guide_rules()[name]
    return JUDGES[rule.judge]({**rule.states, **(stated or {})}, version)


def split_sentences(text: str) -> list[str]:
    """Split prose into sentences, items and rows of tables, each on one line."""
    parts = (" ".join(part.split()) for part in _BREAK_PATTERN.split(text))
    return [
        part[k : k + MAX_SENTENCE_LENGTH]
        for part in parts
        for k in range(0, len(part), MAX_SENTENCE_LENGTH)
    ]


def find_stated_rules(text: str) -> Iterator[StatedRule]:
    """Yield the rules that a text states, each place by each rule once."""
    for sentence in split_sentences(text):
        plain = re.sub(r"[`*_]{1,3}(?=\W|$)|(?<!\w)[`*_]{1,3}", "", sentence)
        for name, rule in load_guide_rules().items():
            end = 0
            matches = (m for one in rule.patterns for m in compile_pattern(one).finditer(plain))
            for match in sorted(matches, key=lambda match: match.start()):
                if match.start() >= end and not _is_denied(match):
                    yield StatedRule(name, rule, sentence, _read_groups(match))
                    end = match.end()


def judge_stated(one: StatedRule, version: str | None = None) -> Judgement:
    """Judge what a text states; what cannot be computed is not checkable."""
    try:
        return judge_rule(one.name, one.stated, version)
    except PlannerError as error:
        return Judgement("not checkable", str(error))


def _read_groups(match: re.Match[str]) -> Stated:
    """Return the groups of a match: numbers as numbers, words of numbers too."""
    stated: Stated = {"sentence": match.string}
    for name, word in match.groupdict().items():
        if word is None:
            continue
        number = word.replace(",", "").rstrip(".")
        if re.fullmatch(r"\d+(\.\d+)?", number):
            stated[name] = float(number)
        else:
            stated[name] = NUMBER_WORDS.get(word.lower(), word) if name == "count" else word
    return stated


def _is_denied(match: re.Match[str]) -> bool:
    """Return whether the sentence denies what matched, or advises against it."""
    if "negated" in match.re.groupindex:
        return False
    denied_before = _DENIAL_BEFORE_PATTERN.search(match.string[: match.start()])
    return bool(denied_before) or (
        re.search(r"\bnot\b", match.re.pattern) is None and bool(_DENIAL_PATTERN.search(match[0]))
    )
