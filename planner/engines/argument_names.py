"""The planner's argument names and the engine's own."""

from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog


class ArgumentNames(SourcedEntry):
    """What an engine calls what we do: `catalogs/flags/arguments.yaml`, whose head explains every field."""

    arguments: dict[str, str]
    cache: dict[str, str] = Field(default_factory=dict)
    methods: dict[str, str] = Field(default_factory=dict)
    drafting: dict[str, str] = Field(default_factory=dict)

    @property
    def engine_names(self) -> dict[str, str]:
        """Our name of an argument -> the engine's."""
        return {ours: theirs for theirs, ours in self.arguments.items()}


@cache
def load_argument_names(engine: str) -> ArgumentNames:
    """What `engine` calls arguments, and methods of drafting."""
    return load_catalog("flags/arguments.yaml", ArgumentNames)[engine]
