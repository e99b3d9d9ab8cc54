"""Arguments with what is filled in where they run, spelled for a terminal, a script, a pod and a compose file."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.core.quantities import PlannerError


@dataclass(frozen=True)
class Variable:
    """A value that is set where a launch runs, times a number; `missing` says what it is to who has not set it."""

    name: str
    missing: str
    times: int = 1

    def __str__(self) -> str:
        value = f"${{{self.name}:?{self.missing}}}"
        return value if self.times == 1 else f"$(({value} * {self.times}))"


@dataclass(frozen=True)
class Port:
    """A port of the first replica; the next one on the same node takes the one that is `each` further."""

    number: int
    each: int = 1

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True)
class Beside:
    """A file that lies where the launch script does."""

    name: str

    def __str__(self) -> str:
        return self.name


Part = str | Variable | Port | Beside
Word = tuple[Part, ...]
"""One argument: text, and what is filled in where it runs."""
MOUNTED = "/headroom"
"""Where containers find the files that lie beside the launch script."""


def text(word: Word) -> str:
    """An argument as it is shown: variables as a shell has them."""
    return "".join(map(str, word))


def shell(word: Word) -> str:
    """An argument as a shell reads it: text quoted, variables open."""
    return "".join(f'"{part}"' if isinstance(part, Variable) else _quoted(str(part)) for part in word)


def _quoted(part: str) -> str:
    """Text for a shell; with commas always in quotes: in an array they look like a slip."""
    return f"'{part}'" if "," in part and shlex.quote(part) == part else shlex.quote(part)


def script(word: Word) -> str:
    """The same within `serve.sh`, which counts ports by `replica` and knows `here`, its own folder."""

    def spelled(part: Part) -> str:
        if isinstance(part, Port):
            return f'"$(({part} + replica{f" * {part.each}" * (part.each > 1)}))"'
        return f'"$here"/{part}' if isinstance(part, Beside) else shell((part,))

    return "".join(map(spelled, word))


def pod(word: Word, renamed: Mapping[str, str] | None = None) -> str:
    """The same as Kubernetes reads an argument: $(NAME), and $$ where the text itself has a dollar."""

    def named(variable: Variable) -> str:
        if variable.times != 1:
            raise PlannerError(f"a pod cannot count in {variable.name}: this version needs serve.sh on each node")
        return f"$({(renamed or {}).get(variable.name, variable.name)})"

    return _contained(word, named)


def compose(word: Word) -> str:
    """The same as a compose file reads it: ${NAME:?...}, and $$ where the text itself has a dollar."""
    return _contained(word, str)


def _contained(word: Word, named: Callable[[Variable], str]) -> str:
    def spelled(part: Part) -> str:
        if isinstance(part, Beside):
            return f"{MOUNTED}/{part}"
        return named(part) if isinstance(part, Variable) else str(part).replace("$", "$$")

    return "".join(map(spelled, word))
