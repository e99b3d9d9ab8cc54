"""Choose a serving framework by the questions of `catalogs/frameworks.yaml`: the first yes decides."""

from collections.abc import Iterable
from functools import cache
from typing import Literal

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.errors import PlannerError
from planner.hardware.gpus import Gpu

Trait = Literal[
    "structured_or_agentic", "prefix_reuse", "fixed_shapes", "rebuild_acceptable", "portability",
    "one_nvidia_sku",
]  # fmt: skip
"""What may make an answer a yes: a trait of the scenario, or one kind of GPU, which is NVIDIA's."""


class WorkloadTraits(StrictEntry):
    """Traits of a workload and its owner that favour one framework over another."""

    structured_or_agentic: bool = False  # branching programs, tool calls, grammar-bound output
    prefix_reuse: bool = False  # most prompts share a long prefix with earlier ones
    fixed_shapes: bool = False  # one model with known lengths and batch, at scale
    rebuild_acceptable: bool = False  # there is time to tune or rebuild for each model and GPU
    portability: bool = False  # the same deployment should run on another vendor's GPUs


class FrameworkQuestion(SourcedEntry):
    """An entry of `catalogs/frameworks.yaml`: where all of `when` holds, `framework` serves best."""

    question: str
    when: tuple[Trait, ...]
    engine: str
    framework: str
    fact: str


@cache
def load_framework_questions() -> tuple[FrameworkQuestion, ...]:
    """Load the questions in the order in which they are asked; `PlannerError` if the catalog is wrong."""
    return tuple(load_catalog("frameworks.yaml", FrameworkQuestion).values())


def choose_framework(traits: WorkloadTraits, gpus: Iterable[Gpu]) -> FrameworkQuestion:
    """Choose by the first question with a yes; `PlannerError` if nothing serves on the GPUs."""
    gpus = set(gpus)
    held = {trait for trait, applies in traits.model_dump().items() if applies}
    if [gpu.vendor.casefold() for gpu in gpus] == ["nvidia"]:
        held.add("one_nvidia_sku")
    for each in load_framework_questions():
        if held.issuperset(each.when) and any(each.engine in gpu.supported for gpu in gpus):
            return each
    raise PlannerError(f"no known framework serves on {', '.join(gpu.name for gpu in gpus)}")
