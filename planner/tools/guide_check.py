"""Check a guide: its commands by `lint`, its options, and the rules that it states."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner.analysis.guide_judgements import GuideVerdict
from planner.analysis.guide_rules import find_stated_rules, judge_stated, split_sentences
from planner.core.errors import PlannerError
from planner.core.readers import read_text
from planner.core.redaction import redact_json, redact_text
from planner.core.text import escape_to_one_line, format_count
from planner.core.units import MIB
from planner.engines.cli_options import (
    list_versions_with_spelling,
    load_flag_lists,
    parse_engine_version,
)
from planner.tools.lint.findings import LintFinding, format_advice, load_engine_changes
from planner.tools.lint.report import LintReport, ReportVerdict, lint

MAX_GUIDE_BYTES = MIB // 4
"""Maximum size of a guide."""
MAX_COMMANDS = 200
"""Maximum number of different commands of a guide that are checked."""
MAX_FINDINGS = 500
"""Maximum number of findings, of a text that repeats itself."""
ORDER: tuple[GuideVerdict, ...] = ("wrong", "outdated", "risky", "not checkable", "right")
"""Verdicts, those to correct first."""
LINT_VERDICTS: dict[str, GuideVerdict] = {
    "ok": "right", "removed": "outdated", "renamed": "outdated", "default changed": "right",
    "unknown": "wrong", "wrong value": "wrong", "contradicts": "wrong", "useless": "right",
    "risky": "risky", "unread": "not checkable",
}  # fmt: skip
"""The verdict on a guide that follows from one of `lint`."""
_FENCE_PATTERN = re.compile(
    r"^[ \t]*(```++|~~~++)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
"""Of a code block; one that is not closed goes to the end, as in Markdown."""
_COMMAND_PATTERN = re.compile(
    r"^[ \t]*(?:\$ |> )?(?:[A-Z_]+=\S+ )*(?:(?:sudo )?docker run|vllm serve|python3? -m (?:vllm|sglang)\.|"
    r"trtllm-serve|text-generation-launcher|sglang serve)\b(?:.*\\\n)*.*$",
    re.MULTILINE,
)
_CLAIM_PATTERN = re.compile(
    r"\d|\b(?:twice|doubl\w+|half|halv\w+|times|faster|slower|cheaper|always|never|best|linear\w*)\b",
    re.I,
)
"""A figure or a comparison."""
_GONE_PATTERN = re.compile(
    r"\b(?:gone|removed|deprecated|no longer|dropped|obsolete)\b", re.IGNORECASE
)
_OPTION_PATTERN = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)+")


@dataclass(frozen=True)
class GuideFinding:
    """One thing that a guide says, and the verdict on it."""

    kind: Literal["command", "option", "rule"]
    verdict: GuideVerdict
    name: str
    finding: str
    text: str
    remember: str = ""


@dataclass(frozen=True)
class GuideReport:
    """The findings of a guide, those to correct first."""

    findings: tuple[GuideFinding, ...]
    version: str
    unread: tuple[str, ...] = ()  # sentences with figures or comparisons that no rule knows
    dropped: tuple[str, ...] = ()  # what was left out of a text that is too long
    num_plain_sentences: int = 0  # with neither

    @property
    def verdict(self) -> ReportVerdict:
        """`mend`: something is wrong or outdated; `at_risk`: risky, or not checkable, or nothing known."""
        verdicts = {finding.verdict for finding in self.findings}
        if verdicts & {"wrong", "outdated"}:
            return "mend"
        is_whole = not (self.unread or self.dropped)
        return "ok" if verdicts == {"right"} and is_whole else "at_risk"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        report = {
            "verdict": self.verdict,
            "engine_version": self.version,
            "findings": [dict(vars(finding)) for finding in self.findings],
            "unread": list(self.unread),
            "dropped": list(self.dropped),
        }
        return dict(redact_json(report))

    def __str__(self) -> str:
        counts = [
            f"{n} {verdict}"
            for verdict in ORDER
            if (n := sum(finding.verdict == verdict for finding in self.findings))
        ]
        lines = [
            f"{', '.join(counts)} (vLLM {self.version})"
            if counts
            else "No command, option or rule that is known was found."
        ]
        for one in self.findings:
            lines += ["", _show(f"{one.verdict}: {one.finding}")]
            lines += [_show(f"  says: {one.text}", 160)]
            if one.remember and one.verdict != "right":
                lines += [_show(f"  instead: {one.remember}")]
        if self.unread:
            count = format_count(len(self.unread), "sentence")
            lines += ["", _show(f"not read: {count} with claims that no rule knows, first:")]
            lines += [_show(f"  says: {self.unread[0]}", 160)]
        if self.num_plain_sentences:
            count = format_count(self.num_plain_sentences, "sentence")
            lines += ["", f"not checked: {count} without a figure or a comparison"]
        for what in self.dropped:
            lines += ["", f"not read: {what}"]
        return "\n".join(lines)


def check_guide(what: str, version: str | None = None) -> GuideReport:
    """Check the guide in the file `what`, or the text `what`, for a version of vLLM.

    Nothing of it runs. Without `version` it is the newest known. Raises `PlannerError` for a file
    that cannot be read, and for an unknown version.
    """
    text = _read_guide(what)
    newest = str(load_flag_lists("vllm").versions[-1])
    if version is not None:
        parse_engine_version("vllm", version)
    commands, prose = split_commands(text)
    distinct = list(dict.fromkeys(commands))
    found = [
        *(
            finding
            for command in distinct[:MAX_COMMANDS]
            for finding in _check_command(command, version)
        ),
        *_check_options(prose, version or newest),
        *_check_rules(text, version),
    ]
    unique = {(one.kind, one.name, one.finding): one for one in reversed(found[:MAX_FINDINGS])}
    ranked = sorted(reversed(unique.values()), key=lambda one: ORDER.index(one.verdict))
    # a sentence may go on in a block of code; that an option exists says nothing of its numbers
    read = "\n".join(one.text for one in found if (one.kind, one.verdict) != ("option", "right"))
    passed_over = [each for each in split_sentences(prose) if each.strip() and each not in read]
    unread = dict.fromkeys(each for each in passed_over if _CLAIM_PATTERN.search(each))
    dropped = [
        f"{format_count(total - limit, noun)} after the first {limit}"
        for total, limit, noun in (
            (len(distinct), MAX_COMMANDS, "block or line that may start a server"),
            (len(found), MAX_FINDINGS, "finding"),
        )
        if total > limit
    ]
    return GuideReport(
        tuple(ranked), version or newest, tuple(unread), tuple(dropped),
        len({*passed_over} - {*unread}),
    )  # fmt: skip


def split_commands(text: str) -> tuple[list[str], str]:
    """Split a guide into the blocks and lines that may start servers, and its prose."""
    blocks = [match[2] for match in _FENCE_PATTERN.finditer(text)]
    prose = _FENCE_PATTERN.sub("\n\n", text)
    blocks += [match[0].strip().removeprefix("$ ") for match in _COMMAND_PATTERN.finditer(prose)]
    return blocks, _COMMAND_PATTERN.sub("\n\n", prose)


def _read_guide(what: str) -> str:
    if "\n" not in what and len(what) < 4096:
        path = Path(what)
        if path.is_file():
            return read_text(path, MAX_GUIDE_BYTES)
        if re.fullmatch(r"\S+\.(?:md|txt|rst|html?|ya?ml|sh)", what):
            raise PlannerError(f"{what}: no such file. Give a file, or the text in quotes")
    if len(what) > MAX_GUIDE_BYTES:
        raise PlannerError(f"a guide has at most {MAX_GUIDE_BYTES:,} characters, got {len(what):,}")
    return what


def _check_command(command: str, version: str | None) -> Iterator[GuideFinding]:
    """Yield what `lint` finds in a block; nothing if no server starts in it."""
    try:
        report = lint(command, version)
    except PlannerError:
        return
    line = " ".join(command.split())
    bad = [one for one in report.findings if LINT_VERDICTS[one.verdict] != "right"]
    for one in bad:
        yield GuideFinding(
            "command",
            LINT_VERDICTS[one.verdict],
            one.name,
            _describe_lint(one, report),
            one.written,
            format_advice(one.instead),
        )
    if report.commands and not bad:
        named = f"{report.commands[0].checked.command.engine} {report.commands[0].checked.version}"
        yield GuideFinding("command", "right", line[:80], f"{named} takes this command", line)


def _describe_lint(finding: LintFinding, report: LintReport) -> str:
    engine = report.commands[0].checked.command.engine if report.commands else "vllm"
    is_gone = finding.verdict in ("removed", "renamed") and "since" not in finding.why
    since = _find_end(engine, finding.name) if is_gone else ""
    return "; ".join(filter(None, (f"{finding.name} is {finding.verdict}{since}", finding.why)))


def _find_end(engine: str, spelling: str) -> str:
    """Return " since VERSION", the first listed version without an option; empty if it has none."""
    listed, had = load_flag_lists(engine).versions, list_versions_with_spelling(engine, spelling)
    later = [version for version in listed if had and version > had[-1]]
    return f" since {later[0]}, if not before" if later else ""


def _check_options(prose: str, version: str) -> Iterator[GuideFinding]:
    """Yield the options of vLLM that prose names; other programs' options are left alone."""
    asked, sentences = parse_engine_version("vllm", version), list(split_sentences(prose))
    for written in dict.fromkeys(_OPTION_PATTERN.findall(prose)):
        spelling = written.replace("_", "-")
        had = list_versions_with_spelling("vllm", spelling)
        sentence = next((one for one in sentences if written in one), written).strip()
        if not had or (asked not in had and _GONE_PATTERN.search(sentence)):
            continue
        if any(one <= asked for one in had) and had[-1] < asked:
            change = load_engine_changes("vllm").flags.get(spelling)
            advice = format_advice(change.advice) if change else ""
            gone = f"{spelling} is gone{_find_end('vllm', spelling)}"
            yield GuideFinding("option", "outdated", spelling, gone, sentence, advice)
        elif asked in had:
            yield GuideFinding(
                "option", "right", spelling, f"vllm {version} has {spelling}", spelling
            )


def _check_rules(text: str, version: str | None) -> Iterator[GuideFinding]:
    """Yield the rules that a guide states, also in the code of its blocks."""
    for one in find_stated_rules(text):
        found = judge_stated(one, version)
        yield GuideFinding(
            "rule", found.verdict, one.name, found.finding, one.text, one.rule.remember
        )


def _show(line: str, length: int = 400) -> str:
    return redact_text(escape_to_one_line(line))[:length]
