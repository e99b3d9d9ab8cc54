"""What an engine's release serves: models by its registry (`catalogs/registries.yaml`), weight formats and attention
by GPU (`catalogs/capabilities.yaml`).
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from pydantic import Field

from planner.core.catalog import CATALOG_DIR, SourcedEntry, StrictEntry, load_catalog
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.engine import Engine
from planner.hardware.gpus import Gpu
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


class VersionedEntry(SourcedEntry):
    """An entry about some versions."""

    from_: Version | None = Field(default=None, alias="from")
    before: Version | None = None

    def applies_to(self, version: Version) -> bool:
        """Return whether the entry speaks of this version."""
        return (not self.from_ or version >= self.from_) and (
            not self.before or version < self.before
        )


class CapabilityRule(VersionedEntry):
    """Compute capabilities that a format or an attention runs on; the catalog's head explains them."""

    names: str
    least: float | None = None
    most: float | None = None
    majors: tuple[int, ...] = ()
    why: str = ""

    def explain_refusal(self, gpu: Gpu) -> str | None:
        """Explain what the rule asks for, where the GPU is none of those; None if it is one."""
        if self.least is None and not self.majors:
            return "no GPU runs it there"
        capability = gpu.compute_capability
        if gpu.vendor != "nvidia" or capability is None:
            return None
        if self.majors:
            asked = " and ".join(f"{major}.x" for major in self.majors)
            is_met = int(capability) in self.majors
        else:
            assert self.least is not None
            asked = f"{self.least}" + (f" to {self.most}" if self.most else "")
            is_met = self.least <= capability <= (self.most or capability)
        return None if is_met else f"it needs {asked}" + (f" ({self.why})" if self.why else "")


class EngineCapabilities(StrictEntry):
    """One engine's entry of `catalogs/capabilities.yaml`."""

    formats: tuple[CapabilityRule, ...] = ()
    attention: tuple[CapabilityRule, ...] = ()


def explain_unsupported_format(name: str, gpu: Gpu, engine: Engine) -> str:
    """Explain why an engine does not run a weight format on a GPU; empty if nothing is against it."""
    return _explain_first_refusal("formats", name, f"{name} weights", gpu, engine)


def explain_unsupported_attention(model: Model, gpu: Gpu, engine: Engine) -> str:
    """Explain why an engine has no kernels for a model's attention on a GPU; empty if it has."""
    kinds = sorted({mixer.attention_kind for mixer in model.architecture.attentions} - {""})
    reasons = (
        _explain_first_refusal("attention", kind, f"{kind} latent attention", gpu, engine)
        for kind in kinds
    )
    return next(filter(None, reasons), "")


def _explain_first_refusal(
    kind: Literal["formats", "attention"], name: str, title: str, gpu: Gpu, engine: Engine
) -> str:
    known_rules = load_catalog("capabilities.yaml", EngineCapabilities)
    for rule in getattr(known_rules.get(engine.name, EngineCapabilities()), kind):
        is_about = name in rule.names.split() and rule.applies_to(engine.release)
        if is_about and (reason := rule.explain_refusal(gpu)):
            capability = gpu.compute_capability
            known = f" (compute capability {capability})" if capability else ""
            return f"{engine} does not run {title} on {gpu.name}{known}; {reason}"
    return ""
