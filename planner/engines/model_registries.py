"""Which models an engine's release knows, by the engines' own registries in `catalogs/registries.yaml`."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from planner.core.catalog import CATALOG_DIR, SourcedEntry, load_catalog
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.engine import Engine
from planner.models.registry import Model

ReleaseSpan = tuple[Version | None, Version, Version | None]
"""The last release read that did not have a class yet, the first that had it, the last that does."""


class ModelRegistry(SourcedEntry):
    """One engine's entry of `catalogs/registries.yaml`, whose head explains every field."""

    releases: tuple[Version, ...]
    since: dict[Version, tuple[str, ...]]
    until: dict[Version, tuple[str, ...]]

    @cached_property
    def spans(self) -> dict[str, ReleaseSpan]:
        """The releases of each class."""
        last = {name: release for release, names in self.until.items() for name in names}
        before = dict(zip(self.releases, (None, *self.releases), strict=False))
        return {
            name: (before[release], release, last.get(name))
            for release, names in self.since.items()
            for name in names
        }


@cache
def load_model_classes() -> dict[str, tuple[str, ...]]:
    """Load `catalogs/model_classes.yaml`: model_type -> the classes that serve it."""
    classes = read_yaml(CATALOG_DIR / "model_classes.yaml")
    return {model_type: tuple(names) for model_type, names in classes.items()}


def list_model_classes(model: Model) -> tuple[str, ...]:
    """List the classes of which an engine has to know one; empty where none is known."""
    shape = model.architecture
    return shape.classes or load_model_classes().get(shape.model_type, ())


@dataclass(frozen=True)
class ModelSupport:
    """Whether a release serves a model, and the sentence that says why not or why nobody knows."""

    state: Literal["known", "unknown", "refused"]
    sentence: str = ""


def judge_model_support(model: Model, engine: Engine) -> ModelSupport:
    """Judge whether an engine's release knows one of the classes that serve a model.

    >>> from planner.engines.engine import get_engine
    >>> from planner.models.registry import load_model
    >>> judge_model_support(load_model("openai/gpt-oss-20b"), get_engine("vllm", "0.8.5")).sentence
    'vllm 0.8.5 does not know GptOssForCausalLM; it is supported since 0.10.1'
    """
    classes = list_model_classes(model)
    registry = load_catalog("registries.yaml", ModelRegistry).get(engine.name)
    if registry is None or not classes:
        missing = "its models by release are" if classes else "the class that serves it is"
        return ModelSupport(
            "unknown",
            f"whether {engine} serves {model.name} is not checked: {missing} not recorded here",
        )
    spans = [(name, registry.spans[name]) for name in classes if name in registry.spans]
    if not spans:
        return ModelSupport(
            "unknown",
            f"{classes[0]} is in no registry of {engine.name} that was read: whether {engine}"
            f" serves {model.name}, as by Transformers' own code, is not known",
        )
    states = ("known", "unknown", "refused")
    verdicts = (_judge_class(name, span, engine) for name, span in spans)
    return min(verdicts, key=lambda verdict: states.index(verdict.state))


def _judge_class(name: str, span: ReleaseSpan, engine: Engine) -> ModelSupport:
    missing, first, last = span
    if last is not None and engine.release > last:
        return ModelSupport(
            "refused", f"{engine} no longer knows {name}; {last} was the last that did"
        )
    if engine.release >= first:
        return ModelSupport("known")
    if missing is not None and engine.release <= missing:
        is_patch = missing.series == first.series and first.patch == missing.patch + 1
        is_next = is_patch or (first.patch == 0 and first.minor == missing.minor + 1)
        latest = "" if is_next else " at the latest"
        return ModelSupport(
            "refused", f"{engine} does not know {name}; it is supported since {first}{latest}"
        )
    earlier = f"{missing} does not, " if missing else ""
    return ModelSupport(
        "unknown", f"whether {engine} knows {name} is not recorded: {earlier}{first} does"
    )
