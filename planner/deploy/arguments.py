"""Arguments with what is filled in where they run, spelled for a terminal, a script, a pod and a compose file."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.core.errors import PlannerError


@dataclass(frozen=True)
class EnvVariable:
    """A value that is set where a launch runs, times a number; `missing` says what it is to who has not set it."""

    name: str
    missing: str
    times: int = 1

    def __str__(self) -> str:
        value = f"${{{self.name}:?{self.missing}}}"
        return value if self.times == 1 else f"$(({value} * {self.times}))"


@dataclass(frozen=True)
class ReplicaPort:
    """A port of the first replica; the next one on the same node takes the one that is `each` further."""

    number: int
    stride: int = 1

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True)
class SiblingFile:
    """A file that lies where the launch script does."""

    name: str

    def __str__(self) -> str:
        return self.name


ArgumentPart = str | EnvVariable | ReplicaPort | SiblingFile
Argument = tuple[ArgumentPart, ...]
"""One argument: text, and what is filled in where it runs."""
CONTAINER_MOUNT_DIR = "/headroom"
"""Where containers find the files that lie beside the launch script."""


def format_for_display(word: Argument) -> str:
    """An argument as it is shown: variables as a shell has them."""
    return "".join(map(str, word))


def format_for_shell(word: Argument) -> str:
    """An argument as a shell reads it: text quoted, variables open."""
    return "".join(
        f'"{part}"' if isinstance(part, EnvVariable) else _quote_part(str(part)) for part in word
    )


def _quote_part(part: str) -> str:
    """Text for a shell; with commas always in quotes: in an array they look like a slip."""
    return f"'{part}'" if "," in part and shlex.quote(part) == part else shlex.quote(part)


def format_for_script(word: Argument) -> str:
    """The same within `serve.sh`, which counts ports by `replica` and knows `here`, its own folder."""

    def spelled(part: ArgumentPart) -> str:
        if isinstance(part, ReplicaPort):
            return f'"$(({part} + replica{f" * {part.stride}" * (part.stride > 1)}))"'
        return f'"$here"/{part}' if isinstance(part, SiblingFile) else format_for_shell((part,))

    return "".join(map(spelled, word))


def format_for_pod(word: Argument, renamed: Mapping[str, str] | None = None) -> str:
    """The same as Kubernetes reads an argument: $(NAME), and $$ where the text itself has a dollar."""

    def named(variable: EnvVariable) -> str:
        if variable.times != 1:
            raise PlannerError(
                f"a pod cannot count in {variable.name}: this version needs serve.sh on each node"
            )
        return f"$({(renamed or {}).get(variable.name, variable.name)})"

    return _format_for_container(word, named)


def format_for_compose(word: Argument) -> str:
    """The same as a compose file reads it: ${NAME:?...}, and $$ where the text itself has a dollar."""
    return _format_for_container(word, str)


def _format_for_container(word: Argument, named: Callable[[EnvVariable], str]) -> str:
    def spelled(part: ArgumentPart) -> str:
        if isinstance(part, SiblingFile):
            return f"{CONTAINER_MOUNT_DIR}/{part}"
        return named(part) if isinstance(part, EnvVariable) else str(part).replace("$", "$$")

    return "".join(map(spelled, word))
