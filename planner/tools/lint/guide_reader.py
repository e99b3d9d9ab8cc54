"""Find the commands of a guide: code blocks, code in sentences, and lines that are commands.

Sentences and figures are left alone.
"""

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import PurePath

GUIDE_SUFFIXES = (".md", ".mdx", ".markdown", ".rst")
OTHER_LANGUAGES = {
    "c", "cpp", "css", "diff", "go", "html", "java", "javascript", "js", "log", "mermaid", "output",
    "py", "pycon", "python", "python3", "rust", "sql", "ts", "typescript",
}  # fmt: skip
"""Languages of code blocks in which no server is started by a command."""
_FENCE_PATTERN = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t{.]*([\w+-]*)")
_ANY_FENCE_PATTERN = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_LAUNCH = (
    r"(?:\$ )?(?:[A-Z_][A-Z0-9_]*=\S+ )*(?:vllm serve|python3? -m (?:vllm|sglang)\.[\w.]+|sglang serve"
    r"|trtllm-serve|text-generation-launcher|(?:sudo )?(?:docker|podman|nerdctl) run)\b"
)
_LINE_PATTERN = re.compile(
    rf"^[ \t]*(?:[-*+>] |\d\d?\. )?(?P<code>{_LAUNCH}(?P<rest>(?:[^\n]*\\\n)*[^\n]*))$",
    re.MULTILINE,
)
_SPAN_PATTERN = re.compile(
    rf"(?<!`)(?P<ticks>`{{1,2}})(?P<code>{_LAUNCH}(?P<rest>[^`]*))(?P=ticks)(?!`)"
)


_PLACEHOLDER_PATTERN = re.compile(r"(?<![<\w$])<([A-Za-z][\w.:/ -]{0,60})>")


def is_guide(text: str, name: str) -> bool:
    """Return whether a text is prose around commands: by the name of its file, or by its blocks."""
    suffix = PurePath(name).suffix.lower()
    is_plain = suffix in ("", ".txt") and _ANY_FENCE_PATTERN.search(text)
    return suffix in GUIDE_SUFFIXES or bool(is_plain)


def split_guide(text: str) -> list[tuple[int, str]]:
    """Return the number of the line and the text of all code in which a server may start.

    What a reader fills in, such as <port>, is a shell's variable in it.
    """
    return sorted(
        (line, _PLACEHOLDER_PATTERN.sub(_name_placeholder, code)) for line, code in _find_code(text)
    )


def _name_placeholder(match: re.Match[str]) -> str:
    return "${" + re.sub(r"\W+", "_", match[1]) + "}"


def _find_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the blocks of code, then the commands between them."""
    lines, prose = text.split("\n"), list[str]()
    fence, language, first = "", "", 0
    for number, line in enumerate([*lines, ""], start=1):
        marker = _FENCE_PATTERN.match(line)
        is_end = marker and marker[1].startswith(fence) and not marker[2]
        if fence and (is_end or number > len(lines)):
            code = "\n".join(lines[first : number - 1])
            if language not in OTHER_LANGUAGES:
                yield first + 1, re.sub(r"^[ \t]*\$ ", "", code, flags=re.MULTILINE)
            fence = ""
        elif not fence and marker:
            fence, language, first = marker[1], marker[2].lower(), number
            prose.append("")
            continue
        prose.append("" if fence or is_end else line)
    yield from _find_in_prose("\n".join(prose), list(accumulate(len(one) + 1 for one in prose)))


def _find_in_prose(prose: str, ends: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the commands between a guide's blocks; `ends` are the ends of its lines."""
    for pattern in (_LINE_PATTERN, _SPAN_PATTERN):
        for match in pattern.finditer(prose):
            code, line = match["code"], bisect(ends, match.start("code")) + 1
            if pattern is _LINE_PATTERN and _is_whole_line(code, match["rest"]):
                yield line, code.removeprefix("$ ")
            elif pattern is _SPAN_PATTERN and _names_model(match["rest"]):
                yield line, code.removeprefix("$ ").replace("\n", " ")


def _names_model(rest: str) -> bool:
    """Return whether what follows a launcher makes a command; without a model it is mentioned."""
    words = rest.split()
    is_named = bool(words) and (not words[0].startswith("-") or re.search("/|--model", rest))
    return bool(is_named) and not rest.rstrip().endswith(("...", "\u2026"))


def _is_whole_line(code: str, rest: str) -> bool:
    """Return whether what follows a launcher are its arguments, and not the rest of a sentence."""
    if code.startswith("$ "):
        return True
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "0", rest.replace("\\\n", " "))
    words = re.split(r"\s[|&;>#]", plain)[0].split()
    if not words or words[-1][-1] in ".,:;?!":
        return False
    if not words[0].startswith("-") and (
        not re.search("[/$]", words[0]) or (words[1:] and not words[1].startswith("-"))
    ):
        return False
    return not any(
        re.fullmatch("[a-z]+", one) and re.fullmatch("[a-z]+", other)
        for one, other in pairwise(words)
    )
