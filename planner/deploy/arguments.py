"""Arguments with values that are filled in at launch, spelled for each kind of launcher."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass


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

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True)
class SiblingFile:
    """A file in the folder of the launch script."""

    name: str

    def __str__(self) -> str:
        return self.name


ArgumentPart = str | EnvVariable | ReplicaPort | SiblingFile
Argument = tuple[ArgumentPart, ...]
"""One argument: text, and values that are filled in at launch."""
CONTAINER_MOUNT_DIR = "/headroom"
"""Folder in which containers find the sibling files of the launch script."""


def format_for_display(word: Argument) -> str:
    """Format an argument for people, with variables as a shell writes them."""
    return "".join(map(str, word))


def format_for_shell(word: Argument) -> str:
    """Format an argument for a shell: text is quoted, variables are not."""
    return "".join(
        (str(part) if part.is_list else f'"{part}"')
        if isinstance(part, EnvVariable)
        else _quote_part(str(part))
        for part in word
    )


def _quote_part(part: str) -> str:
    """Quote text for a shell, always if it has commas, which look like a slip in an array."""
    return f"'{part}'" if "," in part and shlex.quote(part) == part else shlex.quote(part)


def format_for_script(word: Argument) -> str:
    """Format an argument for `serve.sh`, which sets `replica` and `here`, its own folder."""

    def spell(part: ArgumentPart) -> str:
        if isinstance(part, ReplicaPort):
            return f'"$(({part} + replica{f" * {part.stride}" * (part.stride > 1)}))"'
        return f'"$here"/{part}' if isinstance(part, SiblingFile) else format_for_shell((part,))

    return "".join(map(spell, word))


def format_for_pod(word: Argument, renamed: Mapping[str, str]) -> str:
    """Format an argument for Kubernetes: $(NAME), and $$ for a dollar of the text."""
    return _format_for_container(
        word, lambda variable: f"$({renamed.get(variable.name, variable.name)})"
    )


def format_for_compose(word: Argument) -> str:
    """Format an argument for a compose file: ${NAME:?...}, and $$ for a dollar of the text."""
    return _format_for_container(word, str)


def _format_for_container(word: Argument, name_variable: Callable[[EnvVariable], str]) -> str:
    def spell(part: ArgumentPart) -> str:
        if isinstance(part, SiblingFile):
            return f"{CONTAINER_MOUNT_DIR}/{part}"
        return (
            name_variable(part) if isinstance(part, EnvVariable) else str(part).replace("$", "$$")
        )

    return "".join(map(spell, word))
