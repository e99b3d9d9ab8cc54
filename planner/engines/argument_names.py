"""Argument names of the planner and of each engine."""

import re
from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog


class ArgumentNames(SourcedEntry):
    """One engine's entry of `catalogs/flags/arguments.yaml`, whose head explains every field."""

    arguments: dict[str, str]
    sizes: dict[str, str] = Field(
        default={"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
    )
    cache: dict[str, str] = Field(default_factory=dict)
    methods: dict[str, str] = Field(default_factory=dict)
    drafting: dict[str, str] = Field(default_factory=dict)
    words: dict[str, str] = Field(default_factory=dict)
    decided: dict[str, str] = Field(default_factory=dict)

    @property
    def engine_names(self) -> dict[str, str]:
        """The planner's argument name -> the engine's."""
        return {ours: theirs for theirs, ours in self.arguments.items()}


@cache
def load_argument_names(engine: str) -> ArgumentNames:
    """Load the engine's names of arguments and of speculative methods."""
    return load_catalog("flags/arguments.yaml", ArgumentNames)[engine]


def find_own_option(option: str, engine: str) -> str:
    """Find an engine's option for what another engine calls `option`; empty if there is none.

    >>> find_own_option("--max-batch-size", "vllm"), find_own_option("--max-model-len", "sglang")
    ('--max-num-seqs', '--context-length')
    """
    name = option.removeprefix("--").replace("-", "_")
    names = load_catalog("flags/arguments.yaml", ArgumentNames)
    own = names[engine].engine_names
    meant = (own.get(entry.arguments[name]) for entry in names.values() if name in entry.arguments)
    found = next(filter(None, meant), "")
    return f"--{found.replace('_', '-')}" if found else ""


def translate_arguments(text: str, engine: str) -> str:
    """Return a text with the planner's names of arguments in the engine's words.

    >>> translate_arguments("a lower gpu_memory_utilization", "sglang")
    'a lower mem_fraction_static'
    """
    own = {**load_argument_names(engine).engine_names, **load_argument_names(engine).words}
    pattern = rf"(?<!--)\b({'|'.join(sorted(own, key=len, reverse=True))})\b"
    return re.sub(pattern, lambda match: own[match[1]], text)
