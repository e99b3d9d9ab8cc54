"""What an engine allocates beside weights and KV cache, by version: activation peak, non-torch, graphs, warm-up.

Every constant is an entry of `catalogs/memory.yaml`, fitted to start-up logs, with its spread and
source.
"""

import math
from collections.abc import Mapping
from functools import cache, cached_property

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.intervals import Interval
from planner.core.units import GIB, MIB
from planner.core.versions import Version
from planner.engines.deployment import Deployment
from planner.engines.engine_args import list_cudagraph_sizes
from planner.models.architecture import DenseMlp, LatentAttention, ModelArchitecture, MoeBlock

FLASH_ATTENTION3_SPLITS = 32
"""Partial results per query that FlashAttention-3 keeps in captured graphs, FP32 (Hopper only)."""
PIECEWISE_GRAPH_FRACTION = 0.6
"""Share of a layer's graph memory per size that its piecewise graph takes; the full graph takes the rest."""
MAX_IMAGE_TOKENS = {
    "qwen": 16384,
    "gemma": 256,
    "mistral3": 3025,
    "pixtral": 4096,
    "llava": 2928,
    "llama4": 2465,
}
"""Tokens of the largest image by `model_type` prefix: the encoder's profiling batch holds at least one."""
VISION_PATCHES_PER_TOKEN = {"gemma": 16, "llava": 1}
"""Vision patches pooled into one token; 4 (2 x 2) unless given here."""


class FittedConstant(SourcedEntry):
    """One fitted constant; the heads of `catalogs/memory.yaml` and `catalogs/start_up.yaml` explain the fields."""

    value: float
    unit: str
    sigma: float

    @cached_property
    def as_interval(self) -> Interval:
        """In bytes, for a constant in GiB whose `sigma` is in GiB too."""
        return Interval.from_normal(self.value, self.sigma) * GIB

    @cached_property
    def as_non_negative_interval(self) -> Interval:
        """`spread`, but never below zero."""
        return Interval(max(0.0, self.as_interval.lo), self.as_interval.mid, self.as_interval.hi)

    def multiply(self, items: float) -> Interval:
        """`items` times the constant, whose `sigma` is relative."""
        return Interval.from_normal(self.value * items, self.value * items * self.sigma)


@cache
def _load_constants(
    file: str,
) -> Mapping[str, tuple[tuple[Version, FittedConstant], ...]]:
    known: dict[str, list[tuple[Version, FittedConstant]]] = {}
    for title, constant in load_catalog(file, FittedConstant).items():
        name, _, version = title.partition(" from ")
        known.setdefault(name, []).append(
            (Version.parse(version) if version else Version(0, 0), constant)
        )
    return {name: tuple(sorted(versions, key=lambda v: v[0])) for name, versions in known.items()}


@cache
def get_constant(name: str, version: Version, file: str = "memory.yaml") -> FittedConstant | None:
    """The entry of `name` that holds for the release `version`; None before its first."""
    return next((c for since, c in reversed(_load_constants(file)[name]) if since <= version), None)


def _get_constants_release(deployment: Deployment) -> Version:
    """The vLLM release whose constants hold; other engines are planned with the newest."""
    return deployment.engine.release if deployment.engine.name == "vllm" else Version(99, 0)


def _get_deployment_constant(deployment: Deployment, name: str) -> FittedConstant:
    fitted_constant = get_constant(name, _get_constants_release(deployment))
    assert fitted_constant is not None, name
    return fitted_constant


def uses_model_runner_v2(deployment: Deployment) -> bool:
    """vLLM serves this model with its second model runner (vLLM 0.26.0 config/vllm.py:605)."""
    facts, architecture = deployment.engine.facts.runner_v2, deployment.model.architecture
    dense = not architecture.is_moe and not architecture.is_hybrid
    if facts.others == "all" or (facts.others == "dense" and dense):
        return True
    plain = deployment.model.quantization.method == "none"
    return architecture.model_type in facts.model_types and (facts.quantized or plain)


def estimates_cudagraphs(deployment: Deployment) -> bool:
    """The engine deducts an estimate of its CUDA graphs from the pool; never on AMD (vLLM 0.23.0 gpu_worker.py:420)."""
    estimates = deployment.engine.facts.runner_v2.estimates or not uses_model_runner_v2(deployment)
    return (
        deployment.engine.facts.cudagraph_memory == "estimated"
        and estimates
        and deployment.gpu.vendor != "amd"
    )


def _match_model_type_prefix(table: Mapping[str, int], model_type: str, default: int) -> int:
    return next(
        (value for prefix, value in table.items() if model_type.startswith(prefix)), default
    )


def _count_inner_elements(
    architecture: ModelArchitecture, deployment: Deployment
) -> tuple[float, float]:
    """Elements per token of the widest dense block's inner tensors, and of the routed experts' buffers, on one rank."""
    layout = deployment.layout
    dense = experts = 0.0
    for layer in architecture.distinct_layers:
        if isinstance(layer.mlp, DenseMlp):
            dense = max(dense, layer.mlp.matrices * layer.mlp.intermediate / layout.tp)
        elif isinstance(layer.mlp, MoeBlock):
            inner = layer.mlp.intermediate / (1 if layout.ep > 1 else layout.tp * layout.dp)
            wide = layer.mlp.num_active_experts * (
                max((layer.mlp.matrices - 1) * inner, architecture.hidden) + inner
            )
            experts = max(experts, wide)
            dense = max(dense, layer.mlp.matrices * layer.mlp.shared_intermediate / layout.tp)
    return dense, experts


def _estimate_vision_bytes(deployment: Deployment) -> tuple[float, float, float]:
    """Bytes that an encoder's profiling batch leaves behind; elements of its inner layers, and of its patch states."""
    architecture, tokens = deployment.model.architecture, deployment.args.max_num_batched_tokens
    blocks = [
        weight
        for weight in deployment.loaded_vision_towers
        if weight.copies > 1 and weight.cols > 1
    ]
    if not blocks:
        return 0.0, 0.0, 0.0
    widest = max(blocks, key=lambda weight: weight.rows)
    tokens = max(tokens, _match_model_type_prefix(MAX_IMAGE_TOKENS, architecture.model_type, 0))
    patches = tokens * _match_model_type_prefix(
        VISION_PATCHES_PER_TOKEN, architecture.model_type, 4
    )
    pixels = patches * 3 * 14 * 14
    return (
        2.0 * (tokens * architecture.hidden + pixels),
        patches * widest.rows / deployment.layout.tp,
        patches * widest.cols,
    )


def estimate_activation(deployment: Deployment, last_stage: bool = True) -> Interval:
    """Peak bytes that the profiling batch adds: the largest of its vision, forward and sampling phases.

    Forward: max_num_batched_tokens tokens through the widest block. Sampling (last pipeline stage
    only): min(max_num_seqs, max_num_batched_tokens) rows of the whole vocabulary, hidden states and
    expert buffers kept. vLLM 0.20.2 v1/worker/gpu_model_runner.py profile_run.
    """
    args, architecture = deployment.args, deployment.model.architecture
    tokens = args.max_num_batched_tokens
    rows = min(args.max_num_seqs, tokens)
    hidden = 2.0 * tokens * architecture.hidden
    dense, experts = _count_inner_elements(architecture, deployment)
    left, inner, patches = _estimate_vision_bytes(deployment)
    kept = get_constant("expert-workspace", _get_constants_release(deployment))
    marlin = (
        deployment.model.quantization.method == "mxfp4"
    )  # its kernels hold no buffers between layers
    workspace = (
        kept.multiply(2.0 * tokens * experts) if kept and not marlin else Interval.from_value(0)
    )
    phases = [
        _get_deployment_constant(deployment, "forward-copies").multiply(hidden)
        + 2.0 * tokens * max(dense, experts)
        + left,
        _get_deployment_constant(deployment, "encoder-copies").multiply(2.0 * patches)
        + 2.0 * inner,
    ]
    if last_stage:
        sampler = "sampler-bytes-v2" if uses_model_runner_v2(deployment) else "sampler-bytes"
        sampling = _get_deployment_constant(deployment, sampler).multiply(
            float(rows * architecture.vocab)
        )
        added = args.max_loras * deployment.engine.facts.lora_extra_vocabulary
        sampling += _get_deployment_constant(deployment, "lora-logits").multiply(
            float(rows * added)
        )
        phases.append(
            sampling
            + _get_deployment_constant(deployment, "hidden-copies").multiply(hidden)
            + workspace
            + left
        )
    peak = max(phases, key=lambda phase: phase.mid)
    return peak + _get_deployment_constant(deployment, "activation-base").as_non_negative_interval


def _get_fabric_suffix(deployment: Deployment) -> str:
    """The suffix of communication constants: none on one GPU, else by link."""
    if deployment.layout.tp * (deployment.layout.dp if deployment.layout.ep > 1 else 1) == 1:
        return ""
    return (
        "-tp"
        if deployment.gpu.vendor == "nvidia" and "nvlink" in deployment.gpu.link
        else "-tp-pcie"
    )


def estimate_non_torch(deployment: Deployment) -> Interval:
    """Bytes outside the torch allocator that loading and profiling add: libraries, NCCL, all-reduce buffers."""
    if deployment.gpu.vendor == "amd":
        return _get_deployment_constant(deployment, "non-torch-rocm").as_non_negative_interval
    measured = deployment.gpu.architecture == "hopper" or _get_constants_release(
        deployment
    ) < Version(0, 17)
    elsewhere = (
        Interval.from_value(0)
        if measured
        else _get_deployment_constant(deployment, "non-torch-elsewhere").as_interval
    )
    interval = (
        _get_deployment_constant(
            deployment, "non-torch" + _get_fabric_suffix(deployment)
        ).as_non_negative_interval
        + elsewhere
    )
    return Interval(max(0.0, interval.lo), interval.mid, interval.hi)


def estimate_driver_context(deployment: Deployment) -> Interval:
    """Bytes that the driver context and NCCL's set-up hold before the engine measures; outside its budget."""
    return _get_deployment_constant(
        deployment, "context" + _get_fabric_suffix(deployment)
    ).as_non_negative_interval


def get_base_driver_context(deployment: Deployment) -> float:
    """The driver context alone: what NCCL's set-up holds is counted in `non_torch` again once weights are loaded."""
    return _get_deployment_constant(deployment, "context").as_non_negative_interval.mid


def estimate_cudagraph_budget(deployment: Deployment) -> Interval:
    """The engine's own estimate of its graphs: the first size of a mode in full, the others by the second's growth.

    Piecewise graphs at every size, full ones up to max_num_seqs sequences; the first full graph on
    Hopper holds FlashAttention-3's split results. vLLM 0.20.2 v1/worker/gpu_model_runner.py:5949.
    """
    sizes = list_cudagraph_sizes(
        deployment.engine, deployment.args, deployment.gpu, deployment.num_draft_tokens
    )
    if not sizes:
        return Interval.from_value(0)
    architecture = deployment.model.architecture
    if (
        architecture.model_type == "gpt_oss" and sizes[-1] == 512
    ):  # vLLM captures up to 1024 for it (0.19.0 logs)
        most = min(1024, deployment.args.max_num_batched_tokens, 2 * deployment.args.max_num_seqs)
        sizes = (*sizes, *range(528, most + 1, 16))
    decode = sum(
        size <= deployment.args.max_num_seqs * (1 + deployment.num_draft_tokens) for size in sizes
    )
    first = _get_deployment_constant(deployment, "graph-first-mib").multiply(MIB)
    if deployment.gpu.compute_capability == 9.0 and _get_constants_release(deployment) >= Version(
        0, 11
    ):
        widths = (m.heads * (m.kv_lora_rank if isinstance(m, LatentAttention) else m.v_head_dim)
                  for m in architecture.attentions)  # fmt: skip
        splits = (
            FLASH_ATTENTION3_SPLITS * max(widths, default=0) // deployment.layout.tp * sizes[-1] * 4
        )
        first = max(first, Interval.from_value(splits), key=lambda interval: interval.mid)
    layers = math.ceil(len(architecture.layers) / deployment.layout.pp)
    per_layer = _get_deployment_constant(
        deployment, "graph-mib-per-moe-layer" if architecture.is_moe else "graph-mib-per-layer"
    )
    full = max(0, decode - 1) if _get_constants_release(deployment) >= Version(0, 11) else 0
    return first + per_layer.multiply(
        MIB
        * layers
        * (PIECEWISE_GRAPH_FRACTION * (len(sizes) - 1) + (1 - PIECEWISE_GRAPH_FRACTION) * full)
    )


def estimate_after_pool(deployment: Deployment, graphs: Interval) -> Interval:
    """Bytes wanted once the pool is allocated: graph capture, then the sampler's warm-up on max_num_seqs rows."""
    rows = min(deployment.args.max_num_seqs, deployment.args.max_num_batched_tokens)
    return graphs + _get_deployment_constant(deployment, "warmup-bytes").multiply(
        float(rows * deployment.model.architecture.vocab)
    )


def estimate_cudagraph_actual(deployment: Deployment, estimate: Interval) -> Interval:
    """What capturing the graphs really takes, from the engine's estimate."""
    actual = _get_deployment_constant(deployment, "graph-actual")
    return Interval.from_lognormal(estimate.mid * actual.value, actual.sigma)
