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


_BRACED, _PARENTHESIZED = _build_balanced_pattern("{", "}"), _build_balanced_pattern("(", ")")
_VARIABLE = rf"\$(?:\{{{_BRACED}\}}?|\({_PARENTHESIZED}\)?|[A-Za-z_]\w*|[@*#?\d])?"
_EXPANSION = rf"{_VARIABLE}|`[^`]*`?"
_TOKEN_PATTERN = re.compile(
    rf"""(?P<continuation>\\(?:\r?\n|\Z))
    |(?P<blank>[ \t\r]+|(?<![^\s;&|()<>])\#[^\n]*)
    |(?P<redirection>(?:(?<![^\s;&|()<>])\d+)?[<>][<>&|-]*)
    |(?P<end>[;&|\n])
    |(?P<opening>\()
    |(?P<closing>\))
    |\\(?P<escaped>.?)
    |'(?P<single_quoted>[^']*)'
    |"(?P<double_quoted>(?:{_EXPANSION}|\\.|[^"\\])*+)"
    |(?P<open_quote>['"])
    |(?P<expansion>{_EXPANSION})
    |(?P<plain>[^\s;&|()<>\\'"$`]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_DOUBLE_QUOTED_PATTERN = re.compile(
    rf'(?P<expansion>{_EXPANSION})|\\(?P<escaped>[\\"$`\n])|(?P<plain>[^\\$`]+|\\)'
)
_PART_KINDS = (
    "continuation", "escaped", "single_quoted", "double_quoted", "open_quote", "expansion", "plain",
)  # fmt: skip
"""Tokens that belong to a word."""
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass
class ShellWord:
    """A word, with its variables filled in: several where an unquoted one holds blanks."""

    variables: "Variables"
    prefix: str | None = None  # the text before any quote or expansion
    fields: list[str] = field(default_factory=lambda: [""])
    names: set[str] = field(default_factory=set)  # of the variables in it
    array: list[str] | None = None  # the values of an assignment such as `NAME=(a b)`
    is_quoted: bool = False

    def add(self, match: re.Match[str], kind: str) -> None:
        """Add what a token stands for; raise `PlannerError` for a quote that is not closed."""
        if kind == "open_quote":
            raise PlannerError(
                f"the quote {match[0]} at character {match.start() + 1:,} does not end"
            )
        if self.prefix is None and kind != "continuation":
            self.prefix = match[0] if kind == "plain" else ""
        self.is_quoted |= kind not in ("plain", "expansion", "continuation")
        if kind == "double_quoted":
            for inner in _DOUBLE_QUOTED_PATTERN.finditer(match[kind]):
                if inner["expansion"]:
                    self.expand(inner[0], is_quoted=True)
                else:  # a continued line joins the next
                    self.fields[-1] += (inner["escaped"] or "").strip("\n") or inner["plain"] or ""
        elif kind == "expansion":
            self.expand(match[0])
        elif kind != "continuation":
            self.fields[-1] += match[kind]

    def expand(self, text: str, is_quoted: bool = False) -> None:
        """Add the value of a variable, split at blanks unless it is quoted; `${NAME[@]}` is several."""
        name = re.match(r"\$\{?([A-Za-z_]\w*)", text)
        self.names |= {name[1]} if name else set()
        if name and text.endswith("[@]}") and name[1] in self.variables:
            pieces = self.variables.expand(name[1])
        else:
            value = _expand_variable(text, self.variables)
            is_split = name and not is_quoted and "$(" not in value  # what runs is not known
            pieces = value.split() if is_split else [value]
        self.fields[-1] += "".join(pieces[:1])
        self.fields += pieces[1:]

    @property
    def words(self) -> list[str]:
        """The words of a command that it is."""
        return [value for value in self.fields if value or self.is_quoted]


@dataclass(frozen=True)
class ShellStatement:
    """A command: its words, and its environment as far as the text sets it."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # that the text sets


def parse_statements(
    text: str, environment: Mapping[str, str] | None = None
) -> list[ShellStatement]:
    """Return the commands of `text`, each with the variables that are set before it.

    What a branch of `if` or `case` sets anew is known only where it runs.
    Raises `PlannerError` for a quote that is not closed, and if expansion exceeds the limit.
    """
    exported = dict(environment or {})
    variables = Variables({name: [value] for name, value in exported.items()})
    statements, depth = list[ShellStatement](), 0
    named = dict(exported)
    for words in _split_into_commands(split_here_documents(text)[0], variables):
        expanded, assigned, is_export = list[str](), dict[str, str](), False
        begins_branch = words[0].prefix in ("then", "else", "do", "{")
        keywords = {word.prefix for word in words[: 1 + begins_branch]}
        depth = max(depth + bool(keywords & {"if", "case"}) - bool(keywords & {"fi", "esac"}), 0)
        for word in words:
            if not expanded and (match := _ASSIGNMENT_PATTERN.match(word.prefix or "")):
                name, before = match[1], variables.expand(match[1]) if match[2] else []
                values = [" ".join(before) + " ".join(word.fields)[match.end() :]]
                values = values if word.array is None else [*before, *word.array]
                is_anew = any(variables.get(name, ())) and values != variables[name]
                if (
                    depth
                    and is_anew
                    and name not in word.names
                    and not before
                    and word is words[-1]
                ):
                    values = [f"${{{name}}}"]
                variables[name] = values
                named[name] = assigned[name] = " ".join(values)
            elif not expanded and word.prefix in _COMMAND_PREFIXES:
                is_export |= word.prefix in ("export", "declare", "readonly")
            else:
                expanded += word.words
        if is_export:
            exported |= assigned
            exported |= {
                name: " ".join(variables.expand(name)) for name in expanded if name in variables
            }
        elif expanded:
            known: Mapping[str, str] = {**exported, **assigned}
            if statements and statements[-1].environment == known:
                known = statements[-1].environment  # once in memory
            statements.append(ShellStatement(tuple(expanded), known, named))
        else:
            exported |= {name: value for name, value in assigned.items() if name in exported}
        check_expanded_size(sum(map(len, expanded)))
        if len(variables) > MAX_VARIABLES:
            raise PlannerError(f"the text sets more than {MAX_VARIABLES:,} variables")
    return statements


class Variables(dict[str, list[str]]):
    """The values of a text's variables, and how many characters they were expanded to."""

    num_chars = 0

    def expand(self, name: str) -> list[str]:
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


def expand_variables(text: str, variables: Variables, depth: int = 0) -> str:
    """Fill in `$NAME`, `${NAME}` and `${NAME:-default}`; unknown variables become `${NAME}`."""
    return re.sub(_VARIABLE, lambda match: _expand_variable(match[0], variables, depth), text)


def _expand_variable(text: str, variables: Variables, depth: int = 0) -> str:
    """Return what a variable such as `$NAME` or `${NAME:-default}` stands for, in one piece.

    `${NAME:=value}` sets the variable; `${NAME:+value}` is empty unless the text sets it. What a
    command in `$(...)` says is not known.
    """
    if text.startswith(("`", "$(")):
        return f"$({text[1:].removesuffix('`')})" if text[0] == "`" else text
    inner = text[2:].removesuffix("}") if text.startswith("${") else text[1:] or "$"
    match = re.fullmatch(r"([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?:(:?[-=?+])(.*))?", inner, re.DOTALL)
    if not match:
        return inner if inner.startswith("$") else f"${{{inner}}}"
    name, operator, operand = match[1], match[2] or "", match[3] or ""
    # with a colon an empty variable counts as unset
    is_set = name in variables and (not operator.startswith(":") or any(variables[name]))
    if is_set and not operator.endswith("+"):
        return " ".join(variables.expand(name))
    if operator.endswith("+") and not is_set:
        return ""
    if operator.endswith(("-", "=", "+")) and depth < 4:
        value = expand_variables(operand, variables, depth + 1)
        if operator.endswith("="):
            variables[name] = [value]
        return value
    return "" if name in variables else f"${{{name}}}"


def _split_into_commands(text: str, variables: Variables) -> Iterator[list[ShellWord]]:
    """Yield the words of each command, without comments and redirections.

    A command has the variables that are set when it is asked for.
    """
    position, is_redirection = 0, False
    word, words, array = ShellWord(variables), list[ShellWord](), None
    while position <= len(text):
        match = _TOKEN_PATTERN.match(text, position)
        kind = (match.lastgroup or "") if match else "end"
        position = match.end() if match else position + 1
        if match and kind in _PART_KINDS:
            word.add(match, kind)
            continue
        if word.prefix is not None:
            if array is not None:
                array += word.words
            elif not is_redirection:
                words.append(word)
            word, is_redirection = ShellWord(variables), False
        if kind == "redirection":
            is_redirection = True
        elif kind == "opening" and words and _ASSIGNMENT_PATTERN.fullmatch(words[-1].prefix or ""):
            array = words[-1].array = []
        elif kind == "closing" and array is not None:
            array = None
        elif kind in ("end", "opening", "closing"):
            is_redirection = is_redirection and kind != "end"
            if words and array is None:
                yield words
                words = []
    if words:
        yield words


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
