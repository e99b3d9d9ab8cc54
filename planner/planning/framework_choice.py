"""Choose a serving framework by points for the facts in `catalogs/frameworks.yaml`.

A project that has ended is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache

from pydantic import field_validator

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.errors import PlannerError
from planner.engines.engine import Engine, get_engine
from planner.hardware.gpus import Gpu


@dataclass(frozen=True)
class WorkloadTraits:
    """Traits of a workload and its owner that favour one framework over another."""

    structured_or_agentic: bool = False  # branching programs, tool calls, grammar-bound output
    prefix_reuse: bool = False  # most prompts share a long prefix with earlier ones
    fixed_shapes: bool = False  # one model with known lengths and batch, at scale
    rebuild_acceptable: bool = False  # there is time to tune or rebuild for each model and GPU
    hugging_face_stack: bool = False  # already in place
    portability: bool = False  # the same deployment should run on another vendor's GPUs


GPU_TRAITS = ("one_nvidia_sku", "beyond_nvidia")
"""Words besides the traits that a rule may use; they follow from the candidate GPUs."""


class FrameworkRule(SourcedEntry):
    """`points` for a framework that count if every word of `when` applies."""

    when: tuple[str, ...]
    points: int
    fact: str

    @field_validator("when")
    @classmethod
    def _check_words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        known = (*WorkloadTraits.__dataclass_fields__, *GPU_TRAITS)
        for word in words:
            if word not in known:
                raise ValueError(
                    f"{word!r} is neither a trait nor a fact of the GPUs; known: {', '.join(known)}"
                )
        return words


class Framework(StrictEntry):
    """One entry of `catalogs/frameworks.yaml`."""

    title: str
    rules: tuple[FrameworkRule, ...]


@cache
def load_frameworks() -> dict[str, Framework]:
    """Load all known frameworks by name; `PlannerError` if the catalog is wrong."""
    return load_catalog("frameworks.yaml", Framework)


@dataclass(frozen=True)
class FrameworkScore:
    """The points of a framework and their rules; `ruled_out` is why it cannot be chosen, or ""."""

    name: str
    title: str
    points: int
    reasons: tuple[FrameworkRule, ...]
    ruled_out: str = ""


@dataclass(frozen=True)
class FrameworkChoice:
    """Frameworks from best to worst for a workload and its candidate GPUs."""

    ranked: tuple[FrameworkScore, ...]

    @property
    def chosen(self) -> FrameworkScore:
        """The framework with most points."""
        return self.ranked[0]

    @property
    def reasons(self) -> tuple[str, ...]:
        """The facts for the chosen framework, those with most points first."""
        return tuple(
            rule.fact for rule in sorted(self.chosen.reasons, key=lambda rule: -rule.points)
        )

    def __str__(self) -> str:
        totals = ", ".join(
            f"{s.title} {'ruled out' if s.ruled_out else s.points}" for s in self.ranked
        )
        return f"{self.chosen.title} ({totals}): {self.reasons[0]}"


def choose_framework(traits: WorkloadTraits, gpus: Iterable[Gpu]) -> FrameworkChoice:
    """Score every framework for the traits and the GPUs; `PlannerError` if none serves on them."""
    gpus = tuple(gpus)
    if not gpus:
        raise PlannerError("no candidate GPU given: name at least one")
    words = {trait for trait, applies in asdict(traits).items() if applies}
    vendors = {gpu.vendor.casefold() for gpu in gpus}
    words |= (
        {"beyond_nvidia"}
        if vendors != {"nvidia"}
        else {"one_nvidia_sku"}
        if len(set(gpus)) == 1
        else set()
    )
    scores = []
    for name, framework in load_frameworks().items():
        reasons = tuple(rule for rule in framework.rules if words.issuperset(rule.when))
        serves = any(name in gpu.supported for gpu in gpus)
        missing = f"does not serve on {', '.join(gpu.name for gpu in gpus)}"
        ruled_out = get_engine(name).facts.ended if serves else missing
        scores.append(
            FrameworkScore(
                name, framework.title, sum(rule.points for rule in reasons), reasons, ruled_out
            )
        )
    ranked = sorted(scores, key=lambda score: (score.ruled_out != "", -score.points))
    if ranked[0].ruled_out:
        raise PlannerError(f"no known framework serves on {', '.join(gpu.name for gpu in gpus)}")
    return FrameworkChoice(tuple(ranked))


def explain_engines(
    traits: WorkloadTraits, gpus: Iterable[Gpu], engines: Iterable[Engine]
) -> tuple[str, ...]:
    """Explain which engine the traits favour beside `engines`, and by which facts; empty without any trait."""
    held = [trait for trait, applies in asdict(traits).items() if applies]
    if not held:
        return ()
    try:
        choice = choose_framework(traits, gpus)
    except PlannerError as error:
        return (str(error),)
    best, scores = choice.chosen, [score for score in choice.ranked if not score.ruled_out]
    is_planned = best.name in {engine.name for engine in engines}
    points = ", ".join(f"{score.title} {score.points}" for score in scores)
    outcome = f"which `engine: {best.name}` plans (points: {points})"
    named = ", ".join(held).replace("_", " ")
    facts = (
        f"{score.title} {rule.points:+d}: {rule.fact}"
        for score in scores
        for rule in score.reasons
        if not set(held).isdisjoint(rule.when)
    )
    note = f"{named}: best served by {best.title}, {'which is planned' if is_planned else outcome}"
    return (note, *facts)
