"""Draft methods of speculative decoding: a draft model, extra layers of the target, look-ups."""

from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import Field, NonNegativeFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.versions import Version
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine
from planner.engines.layout import SpeculationConfig
from planner.models.architecture import (
    DecoderLayer,
    ModelArchitecture,
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
    pipeline: dict[str, Version] = Field(default_factory=dict)
    without: tuple[str, ...] = ()


class DraftHostCost(SourcedEntry):
    """One entry of `catalogs/drafting.yaml`, whose head explains every field."""

    step_us: NonNegativeFloat
    pass_us: NonNegativeFloat


_METHOD_SPELLINGS = {
    "nextn": "mtp",
    "eagle_3": "eagle3",
    "prompt_lookup": "ngram",
    "draft": "draft_model",
}
"""Other beginnings of a method's name -> the catalog's name."""


@cache
def load_draft_methods() -> dict[str, DraftMethod]:
    """Load all draft methods by name."""
    return load_catalog("speculation.yaml", DraftMethod)


def normalize_method_name(name: str) -> str:
    """Return the catalog's name of a method, such as "mtp" for "deepseek_mtp" or "nextn"."""
    folded = name.casefold().replace("-", "_")
    prefixes = sorted((*load_draft_methods(), *_METHOD_SPELLINGS), key=len, reverse=True)
    prefix = next(filter(folded.startswith, prefixes), folded)
    method_name = "mtp" if folded.endswith("mtp") else _METHOD_SPELLINGS.get(prefix, prefix)
    if method_name not in load_draft_methods():
        raise make_unknown_name_error(name, load_draft_methods(), "speculative method")
    return method_name


def get_draft_method(name: str) -> DraftMethod:
    """Get the catalog entry of a method by any of its names."""
    return load_draft_methods()[normalize_method_name(name)]


def explain_unsupported_method(name: str, engine: Engine) -> str | None:
    """Explain in one sentence why the engine lacks a draft method; None if it has it."""
    method_name, method = normalize_method_name(name), get_draft_method(name)
    if engine.name in method.without:
        return f"{engine.name} has no speculative method {method_name}"
    spans = method.releases.get(engine.name, ((None, None),))
    for first, last in spans:
        if (first is None or engine.release >= first) and (last is None or engine.release <= last):
            return None
    releases = " and ".join(
        f"{first or 'the first'} to {last or 'the newest'}" for first, last in spans
    )
    return f"{engine} lacks the speculative method {method_name}; releases that have it: {releases}"


def explain_unsupported_pipeline(name: str, engine: Engine) -> str | None:
    """Explain in one sentence why the method does not run under pipeline parallelism; None if it does."""
    method_name, first = (
        normalize_method_name(name),
        get_draft_method(name).pipeline.get(engine.name),
    )
    if first is None:
        return f"{engine.name} is not known to run {method_name} under pipeline parallelism"
    if engine.release < first:
        return f"{engine} does not run {method_name} under pipeline parallelism; {first} is the first that does"
    return None


def explain_missing_draft(speculation: SpeculationConfig, engine: Engine) -> str | None:
    """Explain why the draft's weights must be named now instead of at start; None if they need not.

    TensorRT-LLM reads them from a file, the other engines from a variable.
    """
    can_wait = engine.name != "trtllm" or speculation.head or speculation.draft
    if can_wait or get_draft_method(speculation.method).draft not in ("layer", "heads"):
        return None
    return (
        f"{engine.name} reads what drafts from a file, not from a variable: name the"
        f" {speculation.method} head"
    )


def get_deployment_draft_method(deployment: Deployment) -> DraftMethod:
    """Get the draft method of a deployment; `PlannerError` if its engine lacks it."""
    assert deployment.speculation is not None
    if reason := explain_unsupported_method(deployment.speculation.method, deployment.engine):
        raise PlannerError(reason)
    return get_draft_method(deployment.speculation.method)


@cache
def resolve_draft_model(target: Model, speculation: SpeculationConfig) -> Model | None:
    """Build the draft model from the scenario or the method's own layers; None for look-ups."""
    method, architecture = get_draft_method(speculation.method), target.architecture
    if method.draft == "none" or speculation.draft is not None:
        return speculation.draft
    if method.draft == "model":
        raise PlannerError("method draft_model needs the draft model's name")
    name = f"{target.name} {speculation.method}"
    if method.draft == "mtp":
        mtp, prefix = architecture.mtp_layers, f"mtp.layers.{len(architecture.layers)}."
        # of equal modules only the first, which drafts all tokens
        module_end = next((i for i in range(1, len(mtp)) if mtp[i] == mtp[0]), len(mtp))
        layers = mtp[:module_end] or architecture.layers[-1:]
        # 4-bit checkpoints keep their MTP layers in 16 bit
        is_quantized = any(
            target.quantization.get_weight_format(weight, prefix) for weight in layers[0].weights
        )
        return replace(
            target,
            name=name,
            architecture=replace(architecture, layers=layers, mtp_layers=(), vision_towers=()),
            quantization=target.quantization if is_quantized else UNQUANTIZED,
        )
    return replace(
        load_model(_build_draft_layer_config(architecture, method)), name=name, dtype=target.dtype
    )


def _build_draft_layer_config(
    architecture: ModelArchitecture, method: DraftMethod
) -> dict[str, object]:
    """Build the config.json of a dense one-layer draft as wide as the target's active layers."""
    mlps = [layer.mlp for layer in architecture.layers if layer.mlp]
    dense = [mlp.intermediate for mlp in mlps if not mlp.num_experts]
    sparse = [mlp.num_active_experts * mlp.intermediate + mlp.shared_intermediate for mlp in mlps]
    mixer = next((m for m in architecture.attentions if not m.is_latent), None)
    heads = mixer.heads if mixer else max(1, architecture.hidden // 128)
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": architecture.hidden,
        "intermediate_size": max(dense or sparse or [4 * architecture.hidden]),
        "num_attention_heads": heads,
        "num_key_value_heads": mixer.kv_heads if mixer else heads,
        "head_dim": mixer.rotary_dim if mixer else 128,
        "vocab_size": min(method.head_vocab or architecture.vocab, architecture.vocab),
        "max_position_embeddings": architecture.max_position,
    }  # fmt: skip


def list_draft_layers(deployment: Deployment) -> tuple[DecoderLayer, ...]:
    """List the draft's layers that keep a KV cache; heads and look-ups have none."""
    if (speculation := deployment.speculation) is None or get_draft_method(
        speculation.method
    ).draft == "heads":
        return ()
    draft = resolve_draft_model(deployment.model, speculation)
    return draft.architecture.layers if draft else ()
