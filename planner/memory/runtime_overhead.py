"""Memory beside weights and KV cache by version: activations, non-torch memory, CUDA graphs.

Constants are entries of `catalogs/memory.yaml`, fitted to startup logs, with spread and source.
"""

import math
from collections.abc import Mapping
from functools import cache, cached_property

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.intervals import Interval
from planner.core.units import GIB, MIB
from planner.core.versions import Version
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine
from planner.engines.engine_args import list_cudagraph_sizes
from planner.models.architecture import ModelArchitecture
from planner.models.registry import Model

FLASH_ATTENTION3_SPLITS = 32
"""FP32 partial results per query in the graphs of FlashAttention-3 (Hopper only)."""
LARGEST_FITTED_BATCH = 16_384
"""Most tokens of a step in the logs that constants of activations were fitted to."""
PIECEWISE_GRAPH_FRACTION = 0.6
"""Fraction of a layer's graph memory in its piecewise graph; the rest is in the full graph."""
MAX_IMAGE_TOKENS = {
    "qwen": 16384,
    "gemma": 256,
    "mistral3": 3025,
    "pixtral": 4096,
    "llava": 2928,
    "llama4": 2465,
}
"""Tokens of the largest image by `model_type` prefix; profiling runs at least one image."""
MAX_VIDEO_IMAGES = {"qwen2": 7}
"""Largest images whose tokens a video may have (14 frames), within max_model_len.

Qwen2-VL, Qwen2.5-VL: 98,304 tokens of video are profiled in vLLM 0.8.1, 114,688 in 0.23.0 (logs of
Qwen2.5-VL-7B with 128,000 tokens); videos of later families have fewer than an image.
"""
VISION_PATCHES_PER_TOKEN = {"gemma": 16, "llava": 1}
"""Vision patches per token by `model_type` prefix; 4 (2 x 2) for others."""


class FittedConstant(SourcedEntry):
    """A constant of `catalogs/memory.yaml` or `start_up.yaml`, whose heads explain the fields."""

    value: float
    unit: str
    sigma: float

    @cached_property
    def as_interval(self) -> Interval:
        """In bytes, for a constant and `sigma` in GiB."""
        return Interval.from_normal(self.value, self.sigma) * GIB

    @cached_property
    def as_non_negative_interval(self) -> Interval:
        """`as_interval` with its lower end at 0 or above."""
        return Interval(max(0.0, self.as_interval.lo), self.as_interval.mid, self.as_interval.hi)

    def multiply(self, items: float) -> Interval:
        """Multiply by `items`, for a constant whose `sigma` is relative."""
        return Interval.from_normal(self.value * items, self.value * items * self.sigma)


@cache
def _load_constants(
    file: str,
) -> Mapping[str, tuple[tuple[Version, FittedConstant], ...]]:
    """Load name -> (first release, constant) by ascending release; "NAME from RELEASE" names it."""
    known: dict[str, list[tuple[Version, FittedConstant]]] = {}
    for title, constant in load_catalog(file, FittedConstant).items():
        name, _, version = title.partition(" from ")
        known.setdefault(name, []).append(
            (Version.parse(version) if version else Version(0, 0), constant)
        )
    return {name: tuple(sorted(entries, key=lambda e: e[0])) for name, entries in known.items()}


@cache
def get_constant(name: str, version: Version, file: str = "memory.yaml") -> FittedConstant | None:
    """Get the entry of a constant that holds for a release; None before its first."""
    return next((c for since, c in reversed(_load_constants(file)[name]) if since <= version), None)


def get_deployment_constant(deployment: Deployment, name: str) -> FittedConstant:
    """Get a constant of `catalogs/memory.yaml` for the deployment's engine."""
    fitted_constant = get_constant(name, deployment.engine.constants_release)
    assert fitted_constant is not None, name
    return fitted_constant


def uses_model_runner_v2(engine: Engine, model: Model) -> bool:
    """Return whether vLLM uses model runner V2 for the model (vLLM 0.26.0 config/vllm.py:605)."""
    facts, architecture = engine.facts.runner_v2, model.architecture
    is_dense = not architecture.is_moe and not architecture.is_hybrid
    if facts.others == "all" or (facts.others == "dense" and is_dense):
        return True
    is_unquantized = model.quantization.method == "none"
    return architecture.model_type in facts.model_types and (facts.quantized or is_unquantized)


def offloads_weights(engine: Engine, model: Model) -> bool:
    """Return whether the engine heeds --cpu-offload-gb for the model."""
    return engine.facts.runner_v2.offloads or not uses_model_runner_v2(engine, model)


def estimates_cudagraphs(deployment: Deployment) -> bool:
    """Return whether the engine deducts an estimate of its CUDA graphs from the KV cache pool.

    Never on AMD (vLLM 0.23.0 gpu_worker.py:420).
    """
    facts = deployment.engine.facts
    return (
        facts.cudagraph_memory == "estimated"
        and (
            facts.runner_v2.estimates
            or not uses_model_runner_v2(deployment.engine, deployment.model)
        )
        and deployment.gpu.vendor != "amd"
    )


def _match_model_type_prefix(table: Mapping[str, int], model_type: str, default: int) -> int:
    return next(
        (value for prefix, value in table.items() if model_type.startswith(prefix)), default
    )


def _count_inner_elements(
    architecture: ModelArchitecture, deployment: Deployment
) -> tuple[float, float]:
    """Count elements per token on a rank: of the widest dense block, and of routed experts."""
    layout = deployment.layout
    dense = experts = 0.0
    for mlp in filter(None, (layer.mlp for layer in architecture.distinct_layers)):
        dense = max(dense, mlp.matrices * mlp.dense_width / layout.tp)
        inner = mlp.intermediate / (1 if layout.ep > 1 else layout.tp * layout.dp)
        width = max((mlp.matrices - 1) * inner, architecture.hidden) + inner
        experts = max(experts, mlp.num_active_experts * width)
    return dense, experts


def _estimate_vision_bytes(deployment: Deployment) -> tuple[float, float, float]:
    """Estimate bytes left by the encoder's profiling, and its elements: inner and input, patches.

    A gated inner layer has gate, up and their product at once; a patch of the input has two frames.
    """
    architecture, tokens = deployment.model.architecture, deployment.args.max_num_batched_tokens
    blocks = [
        weight
        for weight in deployment.loaded_vision_towers
        if weight.copies > 1 and weight.cols > 1
    ]
    if not blocks or not deployment.takes_vision:
        return 0.0, 0.0, 0.0
    widest = max(blocks, key=lambda weight: weight.rows)
    inner_copies = 3 if any("gate_proj" in weight.name for weight in blocks) else 1
    item = _match_model_type_prefix(MAX_IMAGE_TOKENS, architecture.model_type, 0)
    if item and deployment.media_limits.get("video", 1):
        fitting = (deployment.args.max_model_len or architecture.max_position) // item
        longest = _match_model_type_prefix(MAX_VIDEO_IMAGES, architecture.model_type, 1)
        item *= max(1, min(longest, fitting))
    tokens = max(tokens, item)
    patches = tokens * _match_model_type_prefix(
        VISION_PATCHES_PER_TOKEN, architecture.model_type, 4
    )
    pixels = patches * 3 * 14 * 14
    return (
        2.0 * (tokens * architecture.hidden + pixels),
        inner_copies * patches * widest.rows / deployment.layout.tp + 2 * pixels,
        patches * widest.cols,
    )


def estimate_activation(deployment: Deployment, last_stage: bool = True) -> Interval:
    """Estimate the peak bytes of profiling: the largest of its vision, forward and sampling phases.

    Forward: max_num_batched_tokens tokens through the widest block. Sampling (last pipeline stage
    only): min(max_num_seqs, max_num_batched_tokens) rows of the whole vocabulary, beside hidden
    states and expert buffers. vLLM 0.20.2 v1/worker/gpu_model_runner.py profile_run.
    """
    args, architecture = deployment.args, deployment.model.architecture
    tokens = args.max_num_batched_tokens
    rows = min(args.max_num_seqs, tokens)
    hidden = 2.0 * tokens * architecture.hidden
    dense, experts = _count_inner_elements(architecture, deployment)
    left, inner, patches = _estimate_vision_bytes(deployment)
    expert_workspace = get_constant("expert-workspace", deployment.engine.constants_release)
    workspace = Interval.from_value(0)
    # kernels for MXFP4 (Marlin) keep no buffers between layers
    if expert_workspace and deployment.model.quantization.method != "mxfp4":
        workspace = expert_workspace.multiply(2.0 * tokens * experts)
    phases = [
        get_deployment_constant(deployment, "forward-copies").multiply(hidden)
        + 2.0 * tokens * max(dense, experts)
        + left,
        get_deployment_constant(deployment, "encoder-copies").multiply(2.0 * patches) + 2.0 * inner,
    ]
    if last_stage:
        is_v2 = uses_model_runner_v2(deployment.engine, deployment.model)
        sampler = "sampler-bytes-v2" if is_v2 else "sampler-bytes"
        extra_vocab = args.max_loras * deployment.engine.facts.lora_extra_vocabulary
        phases.append(
            get_deployment_constant(deployment, sampler).multiply(float(rows * architecture.vocab))
            + get_deployment_constant(deployment, "lora-logits").multiply(float(rows * extra_vocab))
            + get_deployment_constant(deployment, "hidden-copies").multiply(hidden)
            + workspace
            + left
        )
    peak = max(phases, key=lambda phase: phase.mid)
    if architecture.is_hybrid:
        beyond = 1 - min(1.0, LARGEST_FITTED_BATCH / tokens)
        factor = get_deployment_constant(deployment, "hybrid-batch").value
        peak = Interval(peak.lo, peak.mid, peak.hi + beyond * (factor - 1) * peak.mid)
    return peak + get_deployment_constant(deployment, "activation-base").as_non_negative_interval


def _get_fabric_suffix(deployment: Deployment) -> str:
    """Get the suffix of communication constants: none on one GPU, else by link."""
    if deployment.layout.tp * (deployment.layout.dp if deployment.layout.ep > 1 else 1) == 1:
        return ""
    return (
        "-tp"
        if deployment.gpu.vendor == "nvidia" and "nvlink" in deployment.gpu.link
        else "-tp-pcie"
    )


def estimate_non_torch(deployment: Deployment) -> Interval:
    """Estimate bytes outside torch's allocator: libraries, NCCL and all-reduce buffers."""
    if deployment.gpu.vendor == "amd":
        name = "non-torch-rocm" + "-tp" * (
            deployment.layout.tp > 1 and "fabric" in deployment.gpu.link
        )
        held = get_deployment_constant(deployment, name).as_non_negative_interval
        if any(m.attention_kind == "compressed" for m in deployment.model.architecture.attentions):
            more = get_deployment_constant(deployment, "compressed-rocm")
            held = held + more.as_non_negative_interval
        return held
    elsewhere = Interval.from_value(0)
    if not deployment.gpu.is_hopper:
        elsewhere = get_deployment_constant(deployment, "non-torch-elsewhere").as_interval
    elif deployment.layout.tp > 4:
        elsewhere = get_deployment_constant(deployment, "non-torch-wide").as_interval
    base = get_deployment_constant(deployment, "non-torch" + _get_fabric_suffix(deployment))
    interval = base.as_non_negative_interval + elsewhere
    return Interval(max(0.0, interval.lo), interval.mid, interval.hi)


def estimate_start_spread(deployment: Deployment) -> Interval:
    """Estimate how far starts of the same command differ, by what no log of the constants has.

    Zero in the middle: several GPUs, a vendor's builds other than NVIDIA's, recurrent layers, a
    model runner or a format on a generation of which few starts were seen.
    """
    model, gpu = deployment.model, deployment.gpu
    of_format = f"spread-{model.quantization.method}-{gpu.architecture}"
    cases = {
        "spread-tp": deployment.layout.tp > 1,
        "spread-vendor": gpu.vendor != "nvidia",
        "spread-hybrid": model.architecture.is_hybrid,
        "spread-runner-v2": uses_model_runner_v2(deployment.engine, model),
        of_format: of_format in _load_constants("memory.yaml"),
    }
    spreads = [get_deployment_constant(deployment, name) for name, holds in cases.items() if holds]
    return sum((spread.as_interval for spread in spreads), Interval.from_value(0))


def estimate_driver_context(deployment: Deployment) -> Interval:
    """Estimate bytes of driver context and NCCL set-up, which are outside the engine's budget."""
    return get_deployment_constant(
        deployment, "context" + _get_fabric_suffix(deployment)
    ).as_non_negative_interval


def estimate_cudagraph_budget(deployment: Deployment) -> Interval:
    """Estimate graph memory as the engine does: one size of a mode in full, others by the growth.

    Piecewise graphs at every size, full ones up to max_num_seqs sequences; the first full graph on
    Hopper has FlashAttention-3's split results. vLLM 0.20.2 v1/worker/gpu_model_runner.py:5949.
    """
    sizes = list_cudagraph_sizes(
        deployment.engine, deployment.args, deployment.gpu, deployment.num_draft_tokens
    )
    if not sizes:
        return Interval.from_value(0)
    architecture = deployment.model.architecture
    # vLLM captures up to 1024 for gpt-oss (0.19.0 logs)
    if architecture.model_type == "gpt_oss" and sizes[-1] == 512:
        largest = min(
            1024, deployment.args.max_num_batched_tokens, 2 * deployment.args.max_num_seqs
        )
        sizes = (*sizes, *range(528, largest + 1, 16))
    decode = sum(
        size <= deployment.args.max_num_seqs * (1 + deployment.num_draft_tokens) for size in sizes
    )
    first = get_deployment_constant(deployment, "graph-first-mib").multiply(MIB)
    has_full_graphs = get_deployment_constant(deployment, "full-graphs").value
    if deployment.gpu.is_hopper and has_full_graphs:
        widths = (mixer.heads * mixer.output_width for mixer in architecture.attentions)
        splits = (
            FLASH_ATTENTION3_SPLITS * max(widths, default=0) // deployment.layout.tp * sizes[-1] * 4
        )
        first = max(first, Interval.from_value(splits), key=lambda interval: interval.mid)
    layers = math.ceil(len(architecture.layers) / deployment.layout.pp)
    per_layer = get_deployment_constant(
        deployment, "graph-mib-per-moe-layer" if architecture.is_moe else "graph-mib-per-layer"
    )
    full = has_full_graphs * max(0, decode - 1)
    return first + per_layer.multiply(
        MIB
        * layers
        * (PIECEWISE_GRAPH_FRACTION * (len(sizes) - 1) + (1 - PIECEWISE_GRAPH_FRACTION) * full)
    )


def estimate_after_pool(deployment: Deployment, graphs: Interval) -> Interval:
    """Estimate bytes after the pool's allocation: graphs, sampler warm-up on max_num_seqs rows."""
    rows = min(deployment.args.max_num_seqs, deployment.args.max_num_batched_tokens)
    return graphs + get_deployment_constant(deployment, "warmup-bytes").multiply(
        float(rows * deployment.model.architecture.vocab)
    )


def estimate_cudagraph_actual(deployment: Deployment, estimate: Interval) -> Interval:
    """Estimate the memory that graphs really take from the engine's estimate."""
    actual = get_deployment_constant(deployment, "graph-actual")
    return Interval.from_lognormal(estimate.mid * actual.value, actual.sigma)
