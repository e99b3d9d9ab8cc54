"""What an engine allocates beside weights and KV cache, by version: activation peak, non-torch, graphs, warm-up.

Every constant is an entry of `catalogs/memory.yaml`, fitted to start-up logs, with its spread and source.
"""

import math
from collections.abc import Mapping
from functools import cache, cached_property

from planner.core.catalog import Sourced, entries
from planner.core.quantities import GIB, MIB, Interval
from planner.facts.deployment import Deployment
from planner.facts.engines import cudagraph_sizes, release
from planner.models.architecture import Architecture, Experts, LatentAttention, Mlp

FA3_SPLITS = 32
"""Partial results per query that FlashAttention-3 keeps in captured graphs, FP32 (Hopper only)."""
PIECEWISE = 0.6
"""Share of a layer's graph memory per size that its piecewise graph takes; the full graph takes the rest."""
IMAGE_TOKENS = {"qwen": 16384, "gemma": 256, "mistral3": 3025, "pixtral": 4096, "llava": 2928, "llama4": 2465}
"""Tokens of the largest image by `model_type` prefix: the encoder's profiling batch holds at least one."""
PATCHES_PER_TOKEN = {"gemma": 16, "llava": 1}
"""Vision patches pooled into one token; 4 (2 x 2) unless given here."""


class Constant(Sourced):
    """One fitted constant; the heads of `catalogs/memory.yaml` and `catalogs/start_up.yaml` explain the fields."""

    value: float
    unit: str
    sigma: float

    @cached_property
    def spread(self) -> Interval:
        """In bytes, for a constant in GiB whose `sigma` is in GiB too."""
        return Interval.spread(self.value, self.sigma) * GIB

    @cached_property
    def amount(self) -> Interval:
        """`spread`, but never below zero."""
        return Interval(max(0.0, self.spread.lo), self.spread.mid, self.spread.hi)

    def times(self, items: float) -> Interval:
        """`items` times the constant, whose `sigma` is relative."""
        return Interval.spread(self.value * items, self.value * items * self.sigma)


@cache
def _constants(file: str) -> Mapping[str, tuple[tuple[tuple[int, int, int], Constant], ...]]:
    known: dict[str, list[tuple[tuple[int, int, int], Constant]]] = {}
    for title, constant in entries(file, Constant).items():
        name, _, version = title.partition(" from ")
        known.setdefault(name, []).append((release(version) if version else (0, 0, 0), constant))
    return {name: tuple(sorted(versions, key=lambda v: v[0])) for name, versions in known.items()}


@cache
def constant(name: str, version: tuple[int, int, int], file: str = "memory.yaml") -> Constant | None:
    """The entry of `name` that holds for the release `version`; None before its first."""
    return next((c for since, c in reversed(_constants(file)[name]) if since <= version), None)


def _release(deployment: Deployment) -> tuple[int, int, int]:
    """The vLLM release whose constants hold; other engines are planned with the newest."""
    return deployment.engine.release if deployment.engine.name == "vllm" else (99, 0, 0)


def _of(deployment: Deployment, name: str) -> Constant:
    found = constant(name, _release(deployment))
    assert found is not None, name
    return found


def runner_v2(deployment: Deployment) -> bool:
    """vLLM serves this model with its second model runner (vLLM 0.26.0 config/vllm.py:605)."""
    facts, architecture = deployment.engine.facts["runner_v2"], deployment.model.architecture
    dense = not architecture.is_moe and not architecture.is_hybrid
    if facts["others"] == "all" or (facts["others"] == "dense" and dense):
        return True
    plain = deployment.model.quantization.method == "none"
    return architecture.model_type in facts["model_types"] and (facts["quantized"] or plain)


def graphs_estimated(deployment: Deployment) -> bool:
    """The engine deducts an estimate of its CUDA graphs from the pool; never on AMD (vLLM 0.23.0 gpu_worker.py:420)."""
    estimates = deployment.engine.facts["runner_v2"]["estimates"] or not runner_v2(deployment)
    return deployment.engine.facts["cudagraph_memory"] == "estimated" and estimates and deployment.gpu.vendor != "amd"


def _prefixed(table: Mapping[str, int], model_type: str, default: int) -> int:
    return next((value for prefix, value in table.items() if model_type.startswith(prefix)), default)


def _inner(architecture: Architecture, deployment: Deployment) -> tuple[float, float]:
    """Elements per token of the widest dense block's inner tensors, and of the routed experts' buffers, on one rank."""
    layout = deployment.layout
    dense = experts = 0.0
    for layer in architecture.distinct_layers:
        if isinstance(layer.mlp, Mlp):
            dense = max(dense, layer.mlp.matrices * layer.mlp.intermediate / layout.tp)
        elif isinstance(layer.mlp, Experts):
            inner = layer.mlp.intermediate / (1 if layout.ep > 1 else layout.tp * layout.dp)
            wide = layer.mlp.active * (max((layer.mlp.matrices - 1) * inner, architecture.hidden) + inner)
            experts = max(experts, wide)
            dense = max(dense, layer.mlp.matrices * layer.mlp.shared_intermediate / layout.tp)
    return dense, experts


def _vision(deployment: Deployment) -> tuple[float, float, float]:
    """Bytes that an encoder's profiling batch leaves behind; elements of its inner layers, and of its patch states."""
    architecture, tokens = deployment.model.architecture, deployment.args.max_num_batched_tokens
    blocks = [weight for weight in deployment.towers if weight.copies > 1 and weight.cols > 1]
    if not blocks:
        return 0.0, 0.0, 0.0
    widest = max(blocks, key=lambda weight: weight.rows)
    tokens = max(tokens, _prefixed(IMAGE_TOKENS, architecture.model_type, 0))
    patches = tokens * _prefixed(PATCHES_PER_TOKEN, architecture.model_type, 4)
    pixels = patches * 3 * 14 * 14
    return (
        2.0 * (tokens * architecture.hidden + pixels),
        patches * widest.rows / deployment.layout.tp,
        patches * widest.cols,
    )


def activation(deployment: Deployment, last_stage: bool = True) -> Interval:
    """Peak bytes that the profiling batch adds: the largest of its vision, forward and sampling phases.

    Forward: max_num_batched_tokens tokens through the widest block. Sampling (last pipeline stage only):
    min(max_num_seqs, max_num_batched_tokens) rows of the whole vocabulary, hidden states and expert buffers kept.
    vLLM 0.20.2 v1/worker/gpu_model_runner.py profile_run.
    """
    args, architecture = deployment.args, deployment.model.architecture
    tokens = args.max_num_batched_tokens
    rows = min(args.max_num_seqs, tokens)
    hidden = 2.0 * tokens * architecture.hidden
    dense, experts = _inner(architecture, deployment)
    left, inner, patches = _vision(deployment)
    kept = constant("expert-workspace", _release(deployment))
    marlin = deployment.model.quantization.method == "mxfp4"  # its kernels hold no buffers between layers
    workspace = kept.times(2.0 * tokens * experts) if kept and not marlin else Interval.exactly(0)
    phases = [
        _of(deployment, "forward-copies").times(hidden) + 2.0 * tokens * max(dense, experts) + left,
        _of(deployment, "encoder-copies").times(2.0 * patches) + 2.0 * inner,
    ]
    if last_stage:
        sampler = "sampler-bytes-v2" if runner_v2(deployment) else "sampler-bytes"
        sampling = _of(deployment, sampler).times(float(rows * architecture.vocab))
        added = args.max_loras * deployment.engine.facts["lora_extra_vocabulary"]
        sampling += _of(deployment, "lora-logits").times(float(rows * added))
        phases.append(sampling + _of(deployment, "hidden-copies").times(hidden) + workspace + left)
    peak = max(phases, key=lambda phase: phase.mid)
    return peak + _of(deployment, "activation-base").amount


def _fabric(deployment: Deployment) -> str:
    """The suffix of communication constants: none on one GPU, else by link."""
    if deployment.layout.tp * (deployment.layout.dp if deployment.layout.ep > 1 else 1) == 1:
        return ""
    return "-tp" if deployment.gpu.vendor == "nvidia" and "nvlink" in deployment.gpu.link else "-tp-pcie"


def non_torch(deployment: Deployment) -> Interval:
    """Bytes outside the torch allocator that loading and profiling add: libraries, NCCL, all-reduce buffers."""
    if deployment.gpu.vendor == "amd":
        return _of(deployment, "non-torch-rocm").amount
    measured = deployment.gpu.architecture == "hopper" or _release(deployment) < (0, 17, 0)
    elsewhere = Interval.exactly(0) if measured else _of(deployment, "non-torch-elsewhere").spread
    found = _of(deployment, "non-torch" + _fabric(deployment)).amount + elsewhere
    return Interval(max(0.0, found.lo), found.mid, found.hi)


def context(deployment: Deployment) -> Interval:
    """Bytes that the driver context and NCCL's set-up hold before the engine measures; outside its budget."""
    return _of(deployment, "context" + _fabric(deployment)).amount


def base_context(deployment: Deployment) -> float:
    """The driver context alone: what NCCL's set-up holds is counted in `non_torch` again once weights are loaded."""
    return _of(deployment, "context").amount.mid


def cudagraph_estimate(deployment: Deployment) -> Interval:
    """The engine's own estimate of its graphs: the first size of a mode in full, the others by the second's growth.

    Piecewise graphs at every size, full ones up to max_num_seqs sequences; the first full graph on Hopper holds
    FlashAttention-3's split results. vLLM 0.20.2 v1/worker/gpu_model_runner.py:5949.
    """
    sizes = cudagraph_sizes(deployment.engine, deployment.args, deployment.gpu, deployment.drafts)
    if not sizes:
        return Interval.exactly(0)
    architecture = deployment.model.architecture
    if architecture.model_type == "gpt_oss" and sizes[-1] == 512:  # vLLM captures up to 1024 for it (0.19.0 logs)
        most = min(1024, deployment.args.max_num_batched_tokens, 2 * deployment.args.max_num_seqs)
        sizes = (*sizes, *range(528, most + 1, 16))
    decode = sum(size <= deployment.args.max_num_seqs * (1 + deployment.drafts) for size in sizes)
    first = _of(deployment, "graph-first-mib").times(MIB)
    if deployment.gpu.compute_capability == 9.0 and _release(deployment) >= (0, 11, 0):
        widths = (m.heads * (m.kv_lora_rank if isinstance(m, LatentAttention) else m.v_head_dim)
                  for m in architecture.attentions)  # fmt: skip
        splits = FA3_SPLITS * max(widths, default=0) // deployment.layout.tp * sizes[-1] * 4
        first = max(first, Interval.exactly(splits), key=lambda interval: interval.mid)
    layers = math.ceil(len(architecture.layers) / deployment.layout.pp)
    per_layer = _of(deployment, "graph-mib-per-moe-layer" if architecture.is_moe else "graph-mib-per-layer")
    full = max(0, decode - 1) if _release(deployment) >= (0, 11, 0) else 0
    return first + per_layer.times(MIB * layers * (PIECEWISE * (len(sizes) - 1) + (1 - PIECEWISE) * full))


def after_pool(deployment: Deployment, graphs: Interval) -> Interval:
    """Bytes wanted once the pool is allocated: graph capture, then the sampler's warm-up on max_num_seqs rows."""
    rows = min(deployment.args.max_num_seqs, deployment.args.max_num_batched_tokens)
    return graphs + _of(deployment, "warmup-bytes").times(float(rows * deployment.model.architecture.vocab))


def cudagraph_actual(deployment: Deployment, estimate: Interval) -> Interval:
    """What capturing the graphs really takes, from the engine's estimate."""
    actual = _of(deployment, "graph-actual")
    return Interval.factor(estimate.mid * actual.value, actual.sigma)
