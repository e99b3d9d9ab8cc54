"""The commands of a shell text as words, with its own variables filled in. Nothing is run, and nothing is looked up."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import dedent

from planner.core.errors import PlannerError

MAX_EXPANDED_CHARS = 2**18
"""Characters that the words of one text may grow to, with its variables filled in."""
_PLAIN_WORD_PATTERN = re.compile(r"[^\s;&|()<>\\'\"$`]+")
_VARIABLE_NAME_PATTERN = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_COMMAND_PREFIXES = {"exec", "nohup", "sudo", "time", "then", "do", "else", "if", "!", "{", "export", "declare", "local",
           "readonly"}  # fmt: skip
"""What may stand before a command, or a variable that is set."""


@dataclass(frozen=True)
class WordPart:
    """A stretch of a word: text, or what stands for a variable's value; quoted, or split at its blanks."""

    text: str
    quoted: bool = False
    variable: bool = False


@dataclass
class ShellWord:
    """A word as it was written, in parts."""

    parts: list[WordPart] = field(default_factory=list)

    @property
    def unquoted_prefix(self) -> str:
        """What stands in front of any quote or variable."""
        return (
            self.parts[0].text
            if self.parts and not (self.parts[0].quoted or self.parts[0].variable)
            else ""
        )


@dataclass(frozen=True)
class ShellStatement:
    """A command: its words, and the environment that it would run in as far as the text says."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


def parse_statements(
    text: str, environment: Mapping[str, str] | None = None
) -> list[ShellStatement]:
    """The commands of `text`, each with the variables set before it; `PlannerError` where a quote does not end."""
    exported, variables = (
        dict(environment or {}),
        {name: [value] for name, value in (environment or {}).items()},
    )
    statements = []
    for words in _split_into_commands(text):
        filled, own, exporting, at = list[str](), dict[str, str](), False, 0
        while at < len(words):
            word = words[at]
            at += 1
            match = _ASSIGNMENT_PATTERN.match(word.unquoted_prefix)
            if match and not filled:
                first = [WordPart(word.unquoted_prefix[match.end() :]), *word.parts[1:]]
                many = (
                    at < len(words)
                    and words[at].unquoted_prefix == "("
                    and not word.unquoted_prefix[match.end() :]
                )
                if many:
                    end = next(
                        (i for i in range(at, len(words)) if words[i].unquoted_prefix == ")"),
                        len(words),
                    )
                    value = [
                        text
                        for each in words[at + 1 : end]
                        for text in _expand_word(each.parts, variables)
                    ]
                    at = end + 1
                else:
                    value = ["".join(_expand_part(part, variables) for part in first)]
                variables[match[1]] = (
                    [*variables.get(match[1], []), *value] if match[2] and many else value
                )
                own[match[1]] = " ".join(value)
                continue
            if word.unquoted_prefix in _COMMAND_PREFIXES and not filled:
                exporting |= word.unquoted_prefix in ("export", "declare", "readonly")
                continue
            filled += _expand_word(word.parts, variables)
        if exporting:
            exported |= own | {
                name: " ".join(variables[name]) for name in filled if name in variables
            }
        elif filled:
            statements.append(ShellStatement(tuple(filled), {**exported, **own}))
        else:
            exported |= {name: value for name, value in own.items() if name in exported}
        if (
            sum(map(len, filled)) + sum(len(v) for values in variables.values() for v in values)
            > MAX_EXPANDED_CHARS
        ):
            raise PlannerError(
                f"with its variables filled in the text grows beyond {MAX_EXPANDED_CHARS:,}"
                " characters"
            )
    return statements


def expand_variables(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$NAME`, `${NAME}` and `${NAME:-default}` filled in; unknown ones stay as `${NAME}`."""
    values = {name: [value] for name, value in variables.items()}
    return "".join(_expand_part(part, values) for part in _split_into_parts(text))


def _split_into_parts(text: str) -> Iterator[WordPart]:
    at = 0
    while at < len(text):
        end = text.find("$", at)
        end = len(text) if end < 0 else end
        if end > at:
            yield WordPart(text[at:end], quoted=True)
        if end < len(text):
            name, end = _read_expansion(text, end)
            yield WordPart(name, quoted=True, variable=True)
        at = end


def _expand_part(part: WordPart, variables: Mapping[str, list[str]], depth: int = 0) -> str:
    """A part with its variable's value, in one piece."""
    if not part.variable:
        return part.text
    match = re.fullmatch(r"([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?:(:?[-=?+])(.*))?", part.text, re.DOTALL)
    if not match:
        return part.text if part.text.startswith("$") else f"${{{part.text}}}"
    name, how, other = match[1], match[2] or "", match[3] or ""
    if name in variables and not how.endswith("+"):
        return " ".join(variables[name])
    if how.endswith(("-", "=")) and depth < 4:
        return "".join(
            _expand_part(inner, variables, depth + 1) for inner in _split_into_parts(other)
        )
    return f"${{{name}}}"


def _expand_word(parts: list[WordPart], variables: Mapping[str, list[str]]) -> list[str]:
    """The words that a word becomes: a variable without quotes is split at its blanks, and an array is its members."""
    made, open_ = [""], False
    for part in parts:
        name = re.match(r"[A-Za-z_]\w*", part.text) if part.variable else None
        if part.variable and part.text.endswith("[@]") and name and name[0] in variables:
            pieces = variables[name[0]]
        elif part.variable and not part.quoted:
            value = _expand_part(part, variables)
            pieces = value.split() if name else [value]
        else:
            pieces = [_expand_part(part, variables)]
        open_ |= part.quoted and not part.variable
        if pieces:
            made[-1] += pieces[0]
            made += pieces[1:]
    return [word for word in made if word or open_]


def _split_into_commands(text: str) -> Iterator[list[ShellWord]]:
    """The words of each command: up to a line's end, or what else ends one."""
    words: list[ShellWord] = []
    inside = False  # of an array's parentheses
    for kind, word in _tokenize(text):
        if kind == "word":
            words.append(word)
        elif (
            kind == "("
            and words
            and _ASSIGNMENT_PATTERN.fullmatch(words[-1].unquoted_prefix)
            and len(words[-1].parts) == 1
        ):
            inside = True
            words.append(ShellWord([WordPart("(")]))
        elif kind == ")" and inside:
            inside = False
            words.append(ShellWord([WordPart(")")]))
        elif kind == "end" and inside:
            continue
        elif words:
            yield words
            words = []
    if words:
        yield words


def _tokenize(text: str) -> Iterator[tuple[str, ShellWord]]:
    """Words, and what stands between commands; comments, redirections and here-documents are left out."""
    at, word, size = 0, ShellWord(), len(text)
    waiting: list[str] = []  # ends of here-documents
    skip = False  # the next word belongs to a redirection
    while at <= size:
        letter = text[at] if at < size else "\n"
        if letter in " \t\r\n;&|()<>" or (letter == "#" and not word.parts):
            if word.parts:
                if not skip and not (letter in "<>" and word.unquoted_prefix.isdigit()):  # 2>&1
                    yield "word", word
                elif waiting and waiting[-1] == "":
                    waiting[-1] = "".join(part.text for part in word.parts) or "\n"
                word, skip = ShellWord(), False
            if letter == "#":
                end = text.find("\n", at)
                at = size if end < 0 else end
                continue
            if letter in "<>":
                if text.startswith("<<", at) and not text.startswith("<<<", at):
                    waiting.append("")
                while at < size and text[at] in "<>&-|":
                    at += 1
                skip = True
                continue
            if letter in "()":
                yield letter, word
            elif letter in ";&|\n" and not (letter == "&" and text[at - 1 : at] == ">"):
                yield "end", word
                skip = False
            at += 1
            if letter == "\n" and waiting:
                at, waiting = _skip_here_documents(text, at, waiting), []
            continue
        if letter == "\\":
            if text.startswith("\\\n", at) or text.startswith("\\\r\n", at):
                at = text.index("\n", at) + 1
                continue
            word.parts.append(WordPart(text[at + 1 : at + 2], quoted=True))
            at += 2
        elif letter == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise PlannerError(f"the quote ' at character {at + 1:,} does not end")
            word.parts.append(WordPart(text[at + 1 : end], quoted=True))
            at = end + 1
        elif letter == '"':
            at = _read_double_quoted(text, at + 1, word)
        elif letter == "$" or letter == "`":
            name, at = _read_expansion(text, at)
            word.parts.append(WordPart(name, variable=True))
        else:
            plain = _PLAIN_WORD_PATTERN.match(text, at)
            stretch = plain[0] if plain else letter
            word.parts.append(WordPart(stretch))
            at += len(stretch)


def _read_double_quoted(text: str, at: int, word: ShellWord) -> int:
    """Read up to the closing double quote; where it ends."""
    begun, plain = at, list[str]()
    while True:
        letter = text[at : at + 1]
        if not letter:
            raise PlannerError(f'the quote " at character {begun:,} does not end')
        if letter in '"$`':
            word.parts.append(WordPart("".join(plain), quoted=True))
            plain = []
            if letter == '"':
                return at + 1
            name, at = _read_expansion(text, at)
            word.parts.append(WordPart(name, quoted=True, variable=True))
        elif letter == "\\" and text[at + 1 : at + 2] in ("\\", '"', "$", "`", "\n"):
            plain.append(text[at + 1].replace("\n", ""))
            at += 2
        else:
            plain.append(letter)
            at += 1


def _read_expansion(text: str, at: int) -> tuple[str, int]:
    """The name behind a `$`, or the whole of `$(...)` and a backquote's, which nobody runs; where it ends."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        end = len(text) if end < 0 else end
        return f"$({text[at + 1 : end]})", end + 1
    opened = text[at + 1 : at + 2]
    if opened in ("{", "("):
        depth, end, closed = 0, at + 1, {"{": "}", "(": ")"}[opened]
        while end < len(text):
            depth += (text[end] == opened) - (text[end] == closed)
            end += 1
            if depth == 0:
                break
        inside = text[at + 2 : end - 1]
        return (inside, end) if opened == "{" else (f"$({inside})", end)
    name = _VARIABLE_NAME_PATTERN.match(text, at + 1)
    if name:
        return name[0], name.end()
    return (opened, at + 2) if opened and opened in "@*#?0123456789" else ("$", at + 1)


def extract_here_documents(text: str) -> dict[str, str]:
    """What here-documents write into files, by the file's name: `cat > NAME <<EOF`, `tee NAME <<EOF`."""
    here_documents = {}
    head = re.compile(r"^[^\n#]*<<(-?)[ \t]*(['\"]?)(\w+)\2[^\n]*\n", re.MULTILINE)
    for match in head.finditer(text):
        end = re.compile(rf"^[ \t]*{match[3]}[ \t]*$", re.MULTILINE).search(text, match.end())
        named = re.search(r"(?:(?<![<>\d&])>>?|\btee(?:\s+-a)?)\s*['\"]?([^\s'\"<>|;&]+)", match[0])
        if end and named:
            here_documents[named[1].rpartition("/")[2]] = dedent(text[match.end() : end.start()])
    return here_documents


def _skip_here_documents(text: str, at: int, ends: list[str]) -> int:
    """Behind the here-documents that begin on this line."""
    for end in ends:
        match = re.compile(rf"^\t*{re.escape(end)}\s*$", re.MULTILINE).search(text, at)
        at = min(match.end() + 1, len(text)) if match else len(text)
    return at
