"""What an engine runs on which GPUs, by `catalogs/capabilities.yaml`: weight formats and attention."""

from typing import Literal

from pydantic import Field

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.versions import Version
from planner.engines.engine import Engine
from planner.hardware.gpus import Gpu
from planner.models.registry import Model


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
