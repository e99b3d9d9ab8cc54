"""What drafts tokens for speculative decoding: a model of its own, a layer beside the target, or a mere look-up."""

from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import Field, NonNegativeFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.versions import Version
from planner.engines.deployment import Deployment, SpeculationConfig
from planner.engines.engine import Engine
from planner.models.architecture import (
    DecoderLayer,
    DenseMlp,
    GroupedQueryAttention,
    ModelArchitecture,
    MoeBlock,
)
from planner.models.quantization import UNQUANTIZED
from planner.models.registry import Model, load_model


class DraftMethod(SourcedEntry):
    """One entry of `catalogs/speculation.yaml`, whose head explains every field."""

    draft: Literal["model", "layer", "mtp", "heads", "none"]
    passes: Literal["each", "one"]
    head_vocab: int | None = None
    host_us: float = 0.0
    releases: dict[str, tuple[tuple[Version | None, Version | None], ...]] = Field(
        default_factory=dict
    )
    without: tuple[str, ...] = ()


class DraftHostCost(SourcedEntry):
    """One entry of `catalogs/drafting.yaml`, whose head explains every field."""

    step_us: NonNegativeFloat
    pass_us: NonNegativeFloat


@cache
def load_draft_host_costs() -> dict[str, DraftHostCost]:
    """What a speculative step costs the host, by engine."""
    return load_catalog("drafting.yaml", DraftHostCost)


_METHOD_SPELLINGS = {
    "nextn": "mtp",
    "eagle_3": "eagle3",
    "prompt_lookup": "ngram",
    "draft": "draft_model",
}
"""Other beginnings of a method's name, and the catalog's name of its kind."""


@cache
def load_draft_methods() -> dict[str, DraftMethod]:
    """All known methods by the engine's name."""
    return load_catalog("speculation.yaml", DraftMethod)


def normalize_method_name(name: str) -> str:
    """The catalog's name of the method `name`; "EAGLE-2", "ngram_gpu" and "deepseek_mtp" count as their kind."""
    folded = name.casefold().replace("-", "_")
    kinds = (*load_draft_methods(), *_METHOD_SPELLINGS)
    begun = next(
        (kind for kind in sorted(kinds, key=len, reverse=True) if folded.startswith(kind)), folded
    )
    method_name = "mtp" if folded.endswith("mtp") else _METHOD_SPELLINGS.get(begun, begun)
    if method_name not in load_draft_methods():
        raise make_unknown_name_error(name, load_draft_methods(), "speculative method")
    return method_name


def get_draft_method(name: str) -> DraftMethod:
    """How the method drafts that an engine calls `name`."""
    return load_draft_methods()[normalize_method_name(name)]


def explain_unsupported_method(name: str, engine: Engine) -> str | None:
    """Why `engine` cannot draft by the method `name`, in one sentence; None if it can."""
    known, how = normalize_method_name(name), get_draft_method(name)
    if engine.name in how.without:
        return f"{engine.name} has no speculative method {known}"
    spans = how.releases.get(engine.name, ((None, None),))
    for first, last in spans:
        if (first is None or engine.release >= first) and (last is None or engine.release <= last):
            return None
    have = " and ".join(
        f"{first or 'the first'} to {last or 'the newest'}" for first, last in spans
    )
    return f"{engine} lacks the speculative method {known}; releases that have it: {have}"


def explain_missing_draft(speculation: SpeculationConfig, engine: Engine) -> str | None:
    """Why `engine` cannot be told what drafts only where it runs, in one sentence; None if it can, or need not."""
    told_later = engine.name != "trtllm" or speculation.head or speculation.draft
    if told_later or get_draft_method(speculation.method).draft not in ("layer", "heads"):
        return None
    return (
        f"{engine.name} reads what drafts from a file, not from a variable: name the"
        f" {speculation.method} head"
    )


def get_deployment_draft_method(deployment: Deployment) -> DraftMethod:
    """How `deployment` drafts; `PlannerError` where its engine lacks that."""
    assert deployment.speculation is not None
    if reason := explain_unsupported_method(deployment.speculation.method, deployment.engine):
        raise PlannerError(reason)
    return get_draft_method(deployment.speculation.method)


@cache
def resolve_draft_model(target: Model, speculation: SpeculationConfig) -> Model | None:
    """The model that drafts: the scenario's own, or what the method puts beside the target; None for look-ups."""
    how, architecture = get_draft_method(speculation.method), target.architecture
    if how.draft == "none" or speculation.draft is not None:
        return speculation.draft
    if how.draft == "model":
        raise PlannerError("method draft_model needs the draft model's name")
    name = f"{target.name} {speculation.method}"
    if how.draft == "mtp":
        mtp, place = architecture.mtp_layers, f"mtp.layers.{len(architecture.layers)}."
        again = next((i for i in range(1, len(mtp)) if mtp[i] == mtp[0]), len(mtp))
        layers = (
            mtp[:again] or architecture.layers[-1:]
        )  # of equal modules the first, which drafts all tokens
        narrow = any(
            target.quantization.get_weight_format(weight, place) for weight in layers[0].weights
        )
        stored = (
            target.quantization if narrow else UNQUANTIZED
        )  # 4-bit checkpoints keep their MTP layers in 16 bit
        one = replace(architecture, layers=layers, mtp_layers=(), vision_towers=())
        return replace(target, name=name, architecture=one, quantization=stored)
    return replace(
        load_model(_build_draft_layer_config(architecture, how)), name=name, dtype=target.dtype
    )


def _build_draft_layer_config(
    architecture: ModelArchitecture, how: DraftMethod
) -> dict[str, object]:
    """config.json of a dense one-layer draft as wide as the target, with an MLP like those its tokens pass through."""
    mlps = [layer.mlp for layer in architecture.layers]
    dense = [mlp.intermediate for mlp in mlps if isinstance(mlp, DenseMlp)]
    sparse = [
        mlp.num_active_experts * mlp.intermediate + mlp.shared_intermediate
        for mlp in mlps
        if isinstance(mlp, MoeBlock)
    ]
    mixer = next((m for m in architecture.mixers if isinstance(m, GroupedQueryAttention)), None)
    heads = mixer.heads if mixer else max(1, architecture.hidden // 128)
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": architecture.hidden,
        "intermediate_size": max(dense or sparse or [4 * architecture.hidden]),
        "num_attention_heads": heads,
        "num_key_value_heads": mixer.kv_heads if mixer else heads,
        "head_dim": mixer.head_dim if mixer else 128,
        "vocab_size": min(how.head_vocab or architecture.vocab, architecture.vocab),
        "max_position_embeddings": architecture.max_position,
    }  # fmt: skip


def list_draft_layers(deployment: Deployment) -> tuple[DecoderLayer, ...]:
    """The draft's layers, which keep a cache beside the target's; heads and look-ups keep none."""
    if (speculation := deployment.speculation) is None or get_draft_method(
        speculation.method
    ).draft == "heads":
        return ()
    draft = resolve_draft_model(deployment.model, speculation)
    return draft.architecture.layers if draft else ()
