"""Split shell text into commands and fill in the variables that it sets; nothing runs.

The texts are often no valid shell: they hold placeholders such as `<model>` and `{{ .Values.x }}`,
or prompts. bashlex (0.18, GPL) takes those for redirections, and tree-sitter-bash (0.25.1) needs memory that grows
with the square of the text: 12 GB for 60 kB of `a|a|a|...`, and half a minute for as much of `)`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import dedent

from planner.core.errors import PlannerError

MAX_EXPANDED_CHARS = 2**18
"""Maximum number of characters in the words of a command, and in all that variables expand to."""
MAX_VARIABLES = 500
"""Maximum number of variables that a text sets."""
MAX_WORD_CHARS = 2**17
"""Maximum number of characters of a word (MAX_ARG_STRLEN of Linux)."""
_COMMAND_PREFIXES = {
    "exec", "nohup", "sudo", "time", "then", "do", "else", "if", "!", "{",
    "export", "declare", "local", "readonly",
}  # fmt: skip
"""Words that may precede a command or an assignment."""


def _build_balanced_pattern(opening: str, closing: str) -> str:
    """Return a pattern for text in which brackets are balanced, to a depth of five."""
    pattern = ""
    for _ in range(5):
        pattern = rf"(?:[^{opening}{closing}]|\{opening}{pattern}\{closing})*+"
    return pattern


_VARIABLE = (
    rf"\$(?:\{{{_build_balanced_pattern('{', '}')}\}}?|\({_build_balanced_pattern('(', ')')}\)?"
    r"|[A-Za-z_]\w*|[@*#?\d])?"
)
_EXPANSION = rf"{_VARIABLE}|`[^`]*`?"
_QUOTED = rf"'[^']*'|\"(?:{_EXPANSION}|\\.|[^\"\\])*+\""
_PART = rf"\\.|{_QUOTED}|{_EXPANSION}|[^\s;&|()<>\\'\"$`]+|[^\s;&|()<>'\"]"
_COMMENT = r"(?<![^\s;&|()<>])\#[^\n]*"
_TOKEN_PATTERN = re.compile(
    rf"""(?P<blank>(?:[ \t\r]|\\(?:\r?\n|\Z))+|{_COMMENT})
    |(?P<redirection>(?:(?<![^\s;&|()<>])\d+)?[<>][<>&|-]*[ \t]*(?:{_PART})*)
    |(?P<end>[;&|()\n])
    |(?P<word>[A-Za-z_]\w*\+?=\((?:\s|{_COMMENT}|{_PART})*+\)|(?:\\\r?\n|{_PART})+)
    |(?P<quote>['"])""",
    re.VERBOSE | re.DOTALL,
)
_PART_PATTERN = re.compile(_PART, re.DOTALL)
_INNER_PATTERN = re.compile(rf"{_EXPANSION}|\\[\\\"$`\n]|[^\\$`]+|\\", re.DOTALL)
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(\+?)=(?:\((.*)\)\Z)?", re.DOTALL)


@dataclass(frozen=True)
class ShellStatement:
    """A command: its words, and its environment as far as the text sets it."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # that the text sets
    is_background: bool = False


def parse_statements(
    text: str, environment: Mapping[str, str] | None = None
) -> list[ShellStatement]:
    """Return the commands of `text`, each with the variables that are set before it.

    What is set to another value a second time is known only where it runs.
    Raises `PlannerError` for a quote that is not closed, and if expansion exceeds the limit.
    """
    exported = dict(environment or {})
    variables = Variables({name: [value] for name, value in exported.items()})
    statements, named = list[ShellStatement](), dict(exported)
    for raw_words, is_background in _split_into_commands(split_here_documents(text)[0]):
        words, assigned, is_export = list[str](), dict[str, str](), False
        for raw in raw_words:
            if not words and (match := _ASSIGNMENT_PATTERN.match(raw)):
                name, before = match[1], variables.get(match[1], [])
                values = variables.assign(raw, match)
                is_open = (
                    any(before) and values != before and not re.search(rf"\+=|\$\{{?{name}\b", raw)
                )
                variables[name] = [f"${{{name}}}"] if is_open and raw is raw_words[-1] else values
                named[name] = assigned[name] = " ".join(variables[name])
            elif not words and raw in _COMMAND_PREFIXES:
                is_export |= raw in ("export", "declare", "readonly")
            else:
                words += variables.expand_word(raw)
        if is_export:
            exported |= assigned | {
                one: " ".join(variables[one]) for one in words if one in variables
            }
        elif words:
            known: Mapping[str, str] = {**exported, **assigned}
            if statements and statements[-1].environment == known:
                known = statements[-1].environment  # once in memory
            statements.append(ShellStatement(tuple(words), known, named, is_background))
        else:
            exported |= {name: value for name, value in assigned.items() if name in exported}
        check_expanded_size(sum(map(len, words)))
        if len(variables) > MAX_VARIABLES:
            raise PlannerError(f"the text sets more than {MAX_VARIABLES:,} variables")
    return statements


class Variables(dict[str, list[str]]):
    """The values of a text's variables, and how many characters they were expanded to."""

    num_chars = 0

    def assign(self, raw: str, match: re.Match[str]) -> list[str]:
        """Return the values of an assignment such as NAME=value, NAME+=value or NAME=(a b)."""
        before = self._read(match[1]) if match[2] else []
        if match[3] is None:
            return [
                "".join(before) + " ".join(self.expand_word(raw[match.end() :], is_split=False))
            ]
        inner = (raw for words, _ in _split_into_commands(match[3]) for raw in words)
        return [*before, *(value for raw in inner for value in self.expand_word(raw))]

    def expand_word(self, raw: str, is_split: bool = True) -> list[str]:
        """Return a word with its variables filled in: several where an unquoted one holds blanks."""
        several = re.fullmatch(r"\"?\$\{(\w+)\[@\]\}\"?", raw)
        if several and several[1] in self:
            return self._read(several[1])
        fields = [""]
        for part in _PART_PATTERN.findall(raw.replace("\\\r\n", "").replace("\\\n", "")):
            value, pieces = part, list[str]()
            if part[0] == '"':
                inner = _INNER_PATTERN.findall(part[1:-1])
                value = "".join(
                    self.expand(one) if one[0] in "$`" else one[-1:] if one[0] == "\\" else one
                    for one in inner
                )
            elif part[0] in "$`":
                value = self.expand(part)
                if is_split and re.match(r"\$\{?[A-Za-z_]", part) and "$(" not in value:
                    value, *pieces = value.split() or [""]  # what runs is not known
            elif part[0] in "'\\":
                value = part[1:].removesuffix("'" * (part[0] == "'"))
            fields[-1:] = [fields[-1] + value, *pieces]
        return [one for one in fields if one or re.search("['\"\\\\]", raw)]

    def expand(self, text: str, depth: int = 0) -> str:
        """Return what a variable such as `$NAME` or `${NAME:-default}` stands for, in one piece.

        An unknown one is `${NAME}`; what a command in `$(...)` says is not known.
        """
        if text.startswith("`"):
            return f"$({text.strip('`')})"
        pattern = r"\$\{?([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?::?([-=?+])(.*?))?\}?"
        if not (match := re.fullmatch(pattern, text, re.DOTALL)):
            return text
        name, operator, default = match.groups("")
        if operator != "+" and any(self.get(name, ())):
            return " ".join(self._read(name))
        if operator in ("-", "=") and operator and depth < 4:
            return self.expand_text(default, depth + 1)
        return "" if name in self and not operator else f"${{{name}}}"

    def expand_text(self, text: str, depth: int = 0) -> str:
        """Fill in the variables of a text without quotes."""
        return re.sub(_VARIABLE, lambda match: self.expand(match[0], depth), text)

    def _read(self, name: str) -> list[str]:
        """Return the values, if any; raise `PlannerError` if the text grows beyond the limit."""
        values = self.get(name, [])
        self.num_chars += sum(map(len, values))
        check_expanded_size(self.num_chars)
        return values


def split_words(text: str) -> list[str]:
    """Split text as a shell does; where its quotes do not end, at blanks."""
    longest = max(map(len, text.split()), default=0)
    if longest > MAX_WORD_CHARS:
        raise PlannerError(
            f"a word has at most {MAX_WORD_CHARS:,} characters, got one of {longest:,}"
        )
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def check_expanded_size(num_chars: int) -> None:
    """Raise `PlannerError` if the words of a text are too long after expansion."""
    if num_chars > MAX_EXPANDED_CHARS:
        raise PlannerError(
            f"with its variables filled in the text grows beyond {MAX_EXPANDED_CHARS:,} characters"
        )


def _split_into_commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """Yield the words of each command as they stand there, and whether it runs beside the next."""
    words = list[str]()
    for match in _TOKEN_PATTERN.finditer(text):
        if match["quote"]:
            raise PlannerError(
                f"the quote {match[0]} at character {match.start() + 1:,} does not end"
            )
        words += [match["word"]] if match["word"] else []
        if match["end"] and words:
            yield words, match[0] == "&" and text[match.end() : match.end() + 1] not in ("&", ">")
            words = []
    if words:
        yield words, False


def split_here_documents(text: str) -> tuple[str, dict[str, str]]:
    """Return a text without its here-documents, and the files that these write, by name."""
    lines, kept, files, at = text.split("\n"), list[str](), dict[str, str](), 0
    ends = {line.strip(): number for number, line in enumerate(lines)}
    while at < len(lines):
        line = lines[at]
        at += 1
        kept.append(line)
        start = re.search(r"^[^#\n]*(?<!<)<<-?[ \t]*(['\"]?)(\w++)\1", line)
        if start is None or ends.get(start[2], -1) < at:
            continue
        first, at = at, next(n for n in range(at, len(lines)) if lines[n].strip() == start[2]) + 1
        target = re.search(r"(?:(?<![<>\d&])>>?|\btee(?:\s+-a)?)\s*['\"]?([^\s'\"<>|;&]+)", line)
        if target:
            files[target[1].rpartition("/")[2]] = dedent("\n".join(lines[first : at - 1]))
    return "\n".join(kept), files
