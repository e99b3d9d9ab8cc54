"""Split shell text into commands and fill in the variables that it sets; nothing runs.

The texts are often no valid shell: they hold placeholders such as `<model>` and `{{ .Values.x }}`,
or prompts. bashlex (0.18, GPL) takes those for redirections, and tree-sitter-bash (0.25.1) needs memory that grows
with the square of the text: 12 GB for 60 kB of `a|a|a|...`, and half a minute for as much of `)`.
"""

import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import NamedTuple

from planner.core.errors import PlannerError

MAX_HERE_DOCUMENT_CHARS = 2**22
"""Maximum number of characters in the here-documents of one text."""
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
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(\+?)=")


class WordPart(NamedTuple):
    """A stretch of a word: text, or an expansion such as `NAME`, `NAME:-default` or `$(command)`."""

    text: str
    is_quoted: bool = False
    is_expansion: bool = False


@dataclass
class ShellWord:
    """A word as it was written; `array` holds the values of an assignment such as `NAME=(a b)`."""

    parts: list[WordPart]
    array: list["ShellWord"] | None = None

    @property
    def unquoted_prefix(self) -> str:
        """The text before any quote or expansion."""
        first = self.parts[0]
        return "" if first.is_quoted or first.is_expansion else first.text


@dataclass(frozen=True)
class ShellStatement:
    """A command: its words, and its environment as far as the text sets it."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    branched: tuple[str, ...] = ()  # variables that a branch would set anew
    variables: Mapping[str, str] = field(default_factory=dict)  # that the text sets


def parse_statements(
    text: str, environment: Mapping[str, str] | None = None
) -> list[ShellStatement]:
    """Return the commands of `text`, each with the variables that are set before it.

    What a branch of `if` or `case` sets anew is not known to be set: the first value holds.
    Raises `PlannerError` for a quote that is not closed, and if expansion exceeds the limit.
    """
    exported = dict(environment or {})
    variables = Variables({name: [value] for name, value in exported.items()})
    statements, depth, branched = list[ShellStatement](), 0, dict[str, None]()
    named = dict(exported)
    for words in _split_into_commands(text):
        expanded, assigned, is_export = list[str](), dict[str, str](), False
        begins_branch = words[0].unquoted_prefix in ("then", "else", "do", "{")
        keywords = {word.unquoted_prefix for word in words[: 1 + begins_branch]}
        depth = max(depth + bool(keywords & {"if", "case"}) - bool(keywords & {"fi", "esac"}), 0)
        for word in words:
            prefix = word.unquoted_prefix
            if not expanded and (match := _ASSIGNMENT_PATTERN.match(prefix)):
                name, values = match[1], list[str]()
                if word.array is None:
                    value = "".join(_expand_part(part, variables) for part in word.parts)
                    before = " ".join(variables.expand(name)) if match[2] else ""
                    values.append(before + value[match.end() :])
                else:
                    values += variables.expand(name) if match[2] else []
                    values += [v for item in word.array for v in _expand_word(item, variables)]
                is_own = name in {part.text for part in word.parts if part.is_expansion} or match[2]
                if depth and any(variables.get(name, ())) and not is_own and word is words[-1]:
                    branched |= {name: None} if values != variables[name] else {}
                    continue
                variables[name] = values
                named[name] = " ".join(values)
                assigned[name] = " ".join(values)
            elif not expanded and prefix in _COMMAND_PREFIXES:
                is_export |= prefix in ("export", "declare", "readonly")
            else:
                expanded += _expand_word(word, variables)
        if is_export:
            exported |= assigned
            exported |= {
                name: " ".join(variables.expand(name)) for name in expanded if name in variables
            }
        elif expanded:
            known: Mapping[str, str] = {**exported, **assigned}
            if statements and statements[-1].environment == known:
                known = statements[-1].environment  # once in memory
            statements.append(ShellStatement(tuple(expanded), known, tuple(branched), named))
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
    return re.sub(
        _VARIABLE, lambda match: _expand_part(_parse_expansion(match[0]), variables, depth), text
    )


def _expand_part(part: WordPart, variables: Variables, depth: int = 0) -> str:
    """Return the text of a part, with the value of its variable in one piece.

    `${NAME:=value}` sets the variable; `${NAME:+value}` is empty unless the text sets it.
    """
    if not part.is_expansion:
        return part.text
    match = re.fullmatch(r"([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?:(:?[-=?+])(.*))?", part.text, re.DOTALL)
    if not match:
        return part.text if part.text.startswith("$") else f"${{{part.text}}}"
    name, operator, operand = match[1], match[2] or "", match[3] or ""
    # with a colon an empty variable counts as unset
    is_set = name in variables and (not operator.startswith(":") or any(variables[name]))
    if operator.endswith("+"):
        return expand_variables(operand, variables, depth + 1) if is_set and depth < 4 else ""
    if is_set:
        return " ".join(variables.expand(name))
    if operator.endswith(("-", "=")) and depth < 4:
        value = expand_variables(operand, variables, depth + 1)
        if operator.endswith("="):
            variables[name] = [value]
        return value
    return "" if name in variables else f"${{{name}}}"


def _expand_word(word: ShellWord, variables: Variables) -> list[str]:
    """Return the words that `word` expands to.

    An unquoted variable is split at blanks, and `${NAME[@]}` becomes the values of the array.
    """
    expanded, is_quoted = [""], False
    for part in word.parts:
        name = re.match(r"[A-Za-z_]\w*", part.text) if part.is_expansion else None
        if name and part.text.endswith("[@]") and name[0] in variables:
            pieces = variables.expand(name[0])
        else:
            value = _expand_part(part, variables)
            is_split = name and not part.is_quoted and "$(" not in value  # what runs is not known
            pieces = value.split() if is_split else [value]
        is_quoted |= part.is_quoted and not part.is_expansion
        expanded[-1] += "".join(pieces[:1])
        expanded += pieces[1:]
    return [value for value in expanded if value or is_quoted]


def _split_into_commands(text: str) -> Iterator[list[ShellWord]]:
    """Yield the words of each command, without comments, redirections and here-documents."""
    position, is_redirection = 0, False
    parts, words, markers = list[WordPart](), list[ShellWord](), list[str]()
    array: list[ShellWord] | None = None
    while position <= len(text):
        match = _TOKEN_PATTERN.match(text, position)
        kind = (match.lastgroup or "") if match else "end"
        if match and (added := _parse_parts(match, kind)) is not None:
            parts += added
            position = match.end()
            continue
        position = match.end() if match else position + 1
        if parts:
            if not is_redirection:
                (words if array is None else array).append(ShellWord(parts))
            elif markers and not markers[-1]:
                markers[-1] = "".join(part.text for part in parts) or "\n"
            parts, is_redirection = [], False
        if kind == "redirection":
            is_redirection = True
            if match and match[0].lstrip("0123456789").startswith("<<") and "<<<" not in match[0]:
                markers.append("")
        elif (
            kind == "opening" and words and _ASSIGNMENT_PATTERN.fullmatch(words[-1].unquoted_prefix)
        ):
            array = words[-1].array = []
        elif kind == "closing" and array is not None:
            array = None
        elif kind in ("end", "opening", "closing"):
            is_redirection = is_redirection and kind != "end"
            if words and array is None:
                yield words
                words = []
            if match and match[0] == "\n":
                for marker in markers:
                    end = re.compile(rf"^\t*{re.escape(marker)}\s*$", re.MULTILINE).search(
                        text, position
                    )
                    position = end.end() + 1 if end else len(text) + 1
                markers = []
    if words:
        yield words


def _parse_parts(match: re.Match[str], kind: str) -> list[WordPart] | None:
    """Return what a token adds to a word; None for a token that ends it.

    Raises `PlannerError` for a quote that is not closed.
    """
    if kind == "open_quote":
        raise PlannerError(f"the quote {match[0]} at character {match.start() + 1:,} does not end")
    if kind == "continuation":
        return []
    if kind == "expansion":
        return [_parse_expansion(match[0])]
    if kind == "double_quoted":
        parts = [WordPart("", is_quoted=True)]
        for inner in _DOUBLE_QUOTED_PATTERN.finditer(match[kind]):
            if inner["expansion"]:
                parts.append(_parse_expansion(inner[0], is_quoted=True))
            else:
                escaped = (inner["escaped"] or "").strip("\n")  # a continued line joins the next
                parts.append(WordPart(escaped or inner["plain"] or "", is_quoted=True))
        return parts
    if kind in ("escaped", "single_quoted", "plain"):
        return [WordPart(match[kind], is_quoted=kind != "plain")]
    return None


def _parse_expansion(text: str, is_quoted: bool = False) -> WordPart:
    if text.startswith("`"):
        text = f"$({text[1:].removesuffix('`')})"
    elif text.startswith("${"):
        text = text[2:].removesuffix("}")
    elif not text.startswith("$("):
        text = text[1:] or "$"
    return WordPart(text, is_quoted, is_expansion=True)


def extract_here_documents(text: str) -> dict[str, str]:
    """Return the files that here-documents write, by name: `cat > NAME <<EOF`, `tee NAME <<EOF`."""
    here_documents, num_chars = dict[str, str](), 0
    head = re.compile(r"^[^\n#]*<<-?[ \t]*(['\"]?)(\w++)\1[^\n]*(?:\n|\Z)", re.MULTILINE)
    ends: dict[str, list[int]] = {}  # where the lines start that hold nothing but this word
    for line in re.finditer(r"^[ \t]*(\w+)[ \t]*$", text, re.MULTILINE):
        ends.setdefault(line[1], []).append(line.start())
    for match in head.finditer(text):
        after = ends.get(match[2], [])
        at = bisect_left(after, match.end())
        target = re.search(
            r"(?:(?<![<>\d&])>>?|\btee(?:\s+-a)?)\s*['\"]?([^\s'\"<>|;&]+)", match[0]
        )
        if at < len(after) and target:
            content = text[match.end() : after[at]]
            num_chars += len(content)
            if num_chars > MAX_HERE_DOCUMENT_CHARS:  # of some within others
                raise PlannerError(
                    f"its here-documents hold more than {MAX_HERE_DOCUMENT_CHARS:,} characters"
                )
            here_documents[target[1].rpartition("/")[2]] = dedent(content)
    return here_documents
