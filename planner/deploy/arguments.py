"""Arguments with values that are filled in at launch, spelled for each kind of launcher."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnvVariable:
    """A variable that is set at launch, times a number; `missing` is the message if it is unset.

    A shell splits a list into words. Containers take it as one word.
    """

    name: str
    missing: str
    times: int = 1
    is_list: bool = False

    def __str__(self) -> str:
        value = f"${{{self.name}:?{self.missing}}}"
        return value if self.times == 1 else f"$(({value} * {self.times}))"


@dataclass(frozen=True)
class ReplicaPort:
    """A port of the first replica; the next replica on the node adds `stride`."""

    number: int
    stride: int = 1


@dataclass(frozen=True)
class SiblingFile:
    """A file in the folder of the launch script."""

    name: str


Argument = tuple[str | EnvVariable | ReplicaPort | SiblingFile, ...]
"""One argument: text, and values that are filled in at launch."""
Dialect = Mapping[type, Callable[[Any], str]]
"""How each part of an argument is spelled."""
CONTAINER_MOUNT_DIR = "/headroom"
"""Folder in which containers find the sibling files of the launch script."""


def _quote(text: str) -> str:
    """Quote text for a shell, always if it has commas, which look like a slip in an array."""
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


DISPLAY: Dialect = {
    str: str,
    EnvVariable: str,
    ReplicaPort: lambda port: str(port.number),
    SiblingFile: lambda file: file.name,
}
"""For people, with variables as a shell writes them."""
SHELL: Dialect = {
    **DISPLAY,
    str: _quote,
    EnvVariable: lambda variable: str(variable) if variable.is_list else f'"{variable}"',
}
"""For a shell: text is quoted, variables are not."""
SCRIPT: Dialect = {
    **SHELL,
    ReplicaPort: lambda port: (
        f'"$(({port.number} + replica{f" * {port.stride}" if port.stride > 1 else ""}))"'
    ),
    SiblingFile: lambda file: f'"$here"/{file.name}',
}
"""For `serve.sh`, which sets `replica` and `here`, its own folder."""
COMPOSE: Dialect = {
    **DISPLAY,
    str: lambda text: text.replace("$", "$$"),
    SiblingFile: lambda file: f"{CONTAINER_MOUNT_DIR}/{file.name}",
}
"""For a compose file: ${NAME:?...}, and $$ for a dollar of the text."""


def format_argument(word: Argument, dialect: Dialect = DISPLAY) -> str:
    """Format an argument in a dialect."""
    return "".join(dialect[type(part)](part) for part in word)


def format_for_pod(word: Argument, renamed: Mapping[str, str]) -> str:
    """Format an argument for Kubernetes: $(NAME), and $$ for a dollar of the text."""
    named: Dialect = {
        **COMPOSE,
        EnvVariable: lambda variable: f"$({renamed.get(variable.name, variable.name)})",
    }
    return format_argument(word, named)
