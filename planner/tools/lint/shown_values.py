"""What of a command is shown: the values of known options and of harmless variables."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import find_closest
from planner.core.redaction import is_secret_name, redact_environment, redact_words
from planner.deploy.manifests import EnvVariableEntry
from planner.engines.cli_options import (
    get_cli_options,
    list_versions_with_spelling,
    load_flag_lists,
    load_recorded_names,
)
from planner.tools.lint.findings import load_engine_changes

MIN_MISSPELLING_SIMILARITY = 0.85
"""Similarity from which an unknown option is taken for a known one, whose values are shown."""


class HarmlessEntry(SourcedEntry):
    """One entry of `catalogs/harmless_variables.yaml`, whose head explains every field."""

    names: tuple[str, ...]


@cache
def is_harmless_variable(engine: str, name: str) -> bool:
    """Return whether a variable of this name is known, and known to hold no secret."""
    if is_secret_name(name):
        return False
    known = (
        *(each for entry in load_catalog("harmless_variables.yaml", HarmlessEntry).values()
          for each in entry.names),
        *load_catalog("environment.yaml", EnvVariableEntry),
        *load_engine_changes(engine).environment,
    )  # fmt: skip
    is_recorded = name in load_recorded_names("environment", engine)
    return is_recorded or any(fnmatchcase(name, pattern) for pattern in known)


@cache
def is_known_option(engine: str, written: str) -> bool:
    """Return whether an option is one of the engine's in any version, abbreviated or misspelled."""
    name = written.partition(".")[0] if written.startswith("-") else written
    name = name.replace("_", "-") if name.startswith("--") else name
    newest = get_cli_options(engine, load_flag_lists(engine).versions[-1])
    return bool(
        list_versions_with_spelling(engine, name)
        or newest.find_spellings(name)
        or name in load_engine_changes(engine).flags
        or find_closest(name, newest.spellings, MIN_MISSPELLING_SIMILARITY)
    )


def is_shown_option(engine: str, written: str) -> bool:
    """Return whether the values of an option are shown: it is known, and holds no secret."""
    return not is_secret_name(written) and is_known_option(engine, written)


def show_words(engine: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command; values of unknown and secret options are masked."""
    return redact_words(words, lambda name: is_known_option(engine, name))


def show_variable(engine: str, name: str, value: str) -> str:
    """Return the value of a variable, masked unless its name is known and harmless."""
    harmless = {name} if is_harmless_variable(engine, name) else set[str]()
    return redact_environment({name: value}, harmless)[name]
