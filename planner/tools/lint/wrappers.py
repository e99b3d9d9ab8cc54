"""Programs that wrap an engine and have options of their own: NVIDIA Dynamo, SGLang's router."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog


class EngineWrapper(SourcedEntry):
    """One entry of `catalogs/flags/wrappers.yaml`, whose head explains every field."""

    engine: str = ""
    own: str = ""
    model: str = ""
    renamed: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)


@cache
def load_wrappers() -> Mapping[str, EngineWrapper]:
    """Return the wrappers by the module that `python -m` runs.

    Entries without an engine hold the options that several wrappers share.
    """
    return load_catalog("flags/wrappers.yaml", EngineWrapper)


def unwrap_command(
    name: str, words: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Any]]:
    """Split the words after module `name` into the engine's words, the wrapper's and settings."""
    wrapper, shared = load_wrappers()[name], load_wrappers().get(name.partition(".")[0])
    patterns = f"{wrapper.own} {shared.own if shared else ''}".split()
    engine_words, wrapper_words, model, settings = (
        list[str](),
        list[str](),
        list[str](),
        dict[str, Any](),
    )
    target = engine_words
    for word in words:
        option, equals, value = word.partition("=")
        if not word.startswith("--"):
            target.append(word)
        elif option in wrapper.model.split():
            target = model
            model += [value] if equals else []
        elif option in wrapper.settings or any(
            fnmatchcase(option, pattern) for pattern in patterns
        ):
            target = wrapper_words
            wrapper_words.append(word)
            settings |= {wrapper.settings[option]: True} if option in wrapper.settings else {}
        else:
            target = engine_words
            engine_words.append(f"{wrapper.renamed.get(option, option)}{equals}{value}")
    return (
        (*model[:1], *engine_words),
        (*(("--model", *model[:1]) if model else ()), *wrapper_words),
        settings,
    )
