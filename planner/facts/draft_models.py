"""What drafts tokens for speculative decoding: a model of its own, a layer beside the target, or a mere look-up."""

from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import Field, NonNegativeFloat

from planner.core.catalog import Sourced, entries
from planner.core.quantities import PlannerError, did_you_mean
from planner.facts.deployment import Deployment, Speculation
from planner.facts.engines import Engine, release
from planner.models.architecture import Architecture, Attention, Experts, Layer, Mlp
from planner.models.quantization import NONE
from planner.models.registry import Model, model


class Method(Sourced):
    """One entry of `catalogs/speculation.yaml`, whose head explains every field."""

    draft: Literal["model", "layer", "mtp", "heads", "none"]
    passes: Literal["each", "one"]
    head_vocab: int | None = None
    host_us: float = 0.0
    releases: dict[str, tuple[tuple[str | None, str | None], ...]] = Field(default_factory=dict)
    without: tuple[str, ...] = ()


class HostCost(Sourced):
    """One entry of `catalogs/drafting.yaml`, whose head explains every field."""

    step_us: NonNegativeFloat
    pass_us: NonNegativeFloat


@cache
def host_costs() -> dict[str, HostCost]:
    """What a speculative step costs the host, by engine."""
    return entries("drafting.yaml", HostCost)


_SPELLINGS = {"nextn": "mtp", "eagle_3": "eagle3", "prompt_lookup": "ngram", "draft": "draft_model"}
"""Other beginnings of a method's name, and the catalog's name of its kind."""


@cache
def methods() -> dict[str, Method]:
    """All known methods by the engine's name."""
    return entries("speculation.yaml", Method)


def kind(name: str) -> str:
    """The catalog's name of the method `name`; "EAGLE-2", "ngram_gpu" and "deepseek_mtp" count as their kind."""
    folded = name.casefold().replace("-", "_")
    kinds = (*methods(), *_SPELLINGS)
    begun = next((kind for kind in sorted(kinds, key=len, reverse=True) if folded.startswith(kind)), folded)
    found = "mtp" if folded.endswith("mtp") else _SPELLINGS.get(begun, begun)
    if found not in methods():
        raise did_you_mean(name, methods(), "speculative method")
    return found


def method(name: str) -> Method:
    """How the method drafts that an engine calls `name`."""
    return methods()[kind(name)]


def lacking(name: str, engine: Engine) -> str | None:
    """Why `engine` cannot draft by the method `name`, in one sentence; None if it can."""
    known, how = kind(name), method(name)
    if engine.name in how.without:
        return f"{engine.name} has no speculative method {known}"
    spans = how.releases.get(engine.name, ((None, None),))
    for first, last in spans:
        if (first is None or engine.release >= release(first)) and (last is None or engine.release <= release(last)):
            return None
    have = " and ".join(f"{first or 'the first'} to {last or 'the newest'}" for first, last in spans)
    return f"{engine} lacks the speculative method {known}; releases that have it: {have}"


def unnamed(speculation: Speculation, engine: Engine) -> str | None:
    """Why `engine` cannot be told what drafts only where it runs, in one sentence; None if it can, or need not."""
    told_later = engine.name != "trtllm" or speculation.head or speculation.draft
    if told_later or method(speculation.method).draft not in ("layer", "heads"):
        return None
    return f"{engine.name} reads what drafts from a file, not from a variable: name the {speculation.method} head"


def method_of(deployment: Deployment) -> Method:
    """How `deployment` drafts; `PlannerError` where its engine lacks that."""
    assert deployment.speculation is not None
    if reason := lacking(deployment.speculation.method, deployment.engine):
        raise PlannerError(reason)
    return method(deployment.speculation.method)


@cache
def draft_of(target: Model, speculation: Speculation) -> Model | None:
    """The model that drafts: the scenario's own, or what the method puts beside the target; None for look-ups."""
    how, architecture = method(speculation.method), target.architecture
    if how.draft == "none" or speculation.draft is not None:
        return speculation.draft
    if how.draft == "model":
        raise PlannerError("method draft_model needs the draft model's name")
    name = f"{target.name} {speculation.method}"
    if how.draft == "mtp":
        mtp, place = architecture.mtp, f"mtp.layers.{len(architecture.layers)}."
        again = next((i for i in range(1, len(mtp)) if mtp[i] == mtp[0]), len(mtp))
        layers = mtp[:again] or architecture.layers[-1:]  # of equal modules the first, which drafts all tokens
        narrow = any(target.quantization.scheme(weight, place) for weight in layers[0].weights)
        stored = target.quantization if narrow else NONE  # 4-bit checkpoints keep their MTP layers in 16 bit
        one = replace(architecture, layers=layers, mtp=(), towers=())
        return replace(target, name=name, architecture=one, quantization=stored)
    return replace(model(_layer_config(architecture, how)), name=name, dtype=target.dtype)


def _layer_config(architecture: Architecture, how: Method) -> dict[str, object]:
    """config.json of a dense one-layer draft as wide as the target, with an MLP like those its tokens pass through."""
    mlps = [layer.mlp for layer in architecture.layers]
    dense = [mlp.intermediate for mlp in mlps if isinstance(mlp, Mlp)]
    sparse = [mlp.active * mlp.intermediate + mlp.shared_intermediate for mlp in mlps if isinstance(mlp, Experts)]
    mixer = next((m for m in architecture.mixers if isinstance(m, Attention)), None)
    heads = mixer.heads if mixer else max(1, architecture.hidden // 128)
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": architecture.hidden,
        "intermediate_size": max(dense or sparse or [4 * architecture.hidden]), "num_attention_heads": heads,
        "num_key_value_heads": mixer.kv_heads if mixer else heads, "head_dim": mixer.head_dim if mixer else 128,
        "vocab_size": min(how.head_vocab or architecture.vocab, architecture.vocab),
        "max_position_embeddings": architecture.max_position,
    }  # fmt: skip


def draft_layers(deployment: Deployment) -> tuple[Layer, ...]:
    """The draft's layers, which keep a cache beside the target's; heads and look-ups keep none."""
    if (speculation := deployment.speculation) is None or method(speculation.method).draft == "heads":
        return ()
    draft = draft_of(deployment.model, speculation)
    return draft.architecture.layers if draft else ()
