"""Programs around an engine that take its options and some of their own: NVIDIA's Dynamo, SGLang's router."""

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
    """Programs by the module that `python -m` runs; those without an engine are what several of them share."""
    return load_catalog("flags/wrappers.yaml", EngineWrapper)


def unwrap_command(
    name: str, words: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Any]]:
    """Of the words behind the module `name`: what the engine's launcher would be given, its own, and what it sets."""
    wrapper, shared = load_wrappers()[name], load_wrappers().get(name.partition(".")[0])
    patterns = f"{wrapper.own} {shared.own if shared else ''}".split()
    kept, own, model, settings = list[str](), list[str](), list[str](), dict[str, Any]()
    into = kept
    for word in words:
        option, tied, value = word.partition("=")
        if not word.startswith("--"):
            into.append(word)
        elif option in wrapper.model.split():
            into = model
            model += [value] if tied else []
        elif option in wrapper.settings or any(
            fnmatchcase(option, pattern) for pattern in patterns
        ):
            into = own
            own.append(word)
            settings |= {wrapper.settings[option]: True} if option in wrapper.settings else {}
        else:
            into = kept
            kept.append(f"{wrapper.renamed.get(option, option)}{tied}{value}")
    return (*model[:1], *kept), (*(("--model", *model[:1]) if model else ()), *own), settings
