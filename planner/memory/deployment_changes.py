"""Changes of a deployment: one thing changed, what it is called, what it costs, what it gives.

Searches, remedies and proposals choose among these changes, and judge them by their own measures.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from planner.engines.argument_names import load_argument_names
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.models.quantization import parse_quantization
from planner.parallelism.layouts import explain_illegal_layout, list_powers_of_two
from planner.parallelism.start_gate import explain_refused_start

MAX_REMEDY_UTILIZATION = 0.95
"""Largest gpu_memory_utilization to propose; `catalogs/flags/rules.yaml` calls 0.98 risky."""
MIN_REMEDY_MODEL_LEN = 1024
"""Smallest max_model_len to propose."""
MIN_REMEDY_BATCHED_TOKENS = 2048
"""Smallest token budget of a step to propose: vLLM's default on small GPUs."""
MIN_REMEDY_SEQUENCES = 16
"""Smallest max_num_seqs to propose."""
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2")
"""Names of an FP8 KV cache, the more accurate first."""
FORMAT_NAMES = {"fp8": ("FP8", "an FP8"), "awq": ("4 bits (AWQ)", "a 4-bit (AWQ or GPTQ)")}
"""Weight formats to propose: how weights are stored, and the checkpoint that is needed."""


CHANGE_PRICES = {
    "gpu_free_bytes": "the engine has it to itself",
    "gpu_memory_utilization": "leaves less for what else the GPU holds",
    "max_num_seqs": "fewer requests run at once",
    "max_num_batched_tokens": "long prompts take more steps",
    "kv_cache_dtype": "a token takes half the memory, at some accuracy",
    "quantization": "smaller weights, at some accuracy",
    "layout": "more GPUs share the model",
    "max_model_len": "longer requests are rejected; it starts at the low end of the interval too",
}
"""What a change costs users or operators."""
MEMORY_BENEFITS = {
    "gpu_memory_utilization": "the share that is safe",
    "max_num_seqs": "less memory for sampling and graphs",
    "max_num_batched_tokens": "smaller activations",
    "kv_cache_dtype": "half the memory of a token",
    "layout": "more GPUs share the weights",
    "max_model_len": "the longest that fits",
}
"""What a change does for memory."""


@dataclass(frozen=True)
class DeploymentChange:
    """One thing changed: an engine argument, the layout, the weights or the draft."""

    argument: str
    value: Any
    cost: float = 0.0  # relative: what it takes from users, or costs

    def apply(self, deployment: Deployment) -> Deployment:
        """Return the deployment with the change."""
        match self.argument:
            case "layout" | "speculation" | "model":
                return replace(deployment, **{self.argument: self.value})
            case "quantization":
                scheme = parse_quantization(self.value)
                return replace(deployment, model=replace(deployment.model, quantization=scheme))
            case "gpu_free_bytes":
                return replace(deployment, gpu_free_bytes=None, other_tenants_bytes=0)
        return deployment.with_args(**{self.argument: self.value})

    @property
    def instruction(self) -> str:
        """What to do; empty for an argument that is set to the value."""
        match self.argument:
            case "layout":
                return f"spread the model over {self.value}"
            case "quantization":
                return f"store the weights in {FORMAT_NAMES[self.value][0]}"
            case "kv_cache_dtype":
                return f"store the KV cache in FP8 (kv_cache_dtype {self.value})"
        return "stop what else runs on the GPU" if self.argument == "gpu_free_bytes" else ""

    def list_settings(self, deployment: Deployment) -> dict[str, Any]:
        """List the engine's own arguments that change, with their values."""
        names = load_argument_names(deployment.engine.name)
        if self.argument == "layout":
            before, after = vars(deployment.layout), vars(self.value)
            return {
                theirs: after[ours]
                for ours, theirs in names.sizes.items()
                if after[ours] != before[ours]
            }
        return {names.engine_names.get(self.argument, self.argument): self.value}

    def describe(self, deployment: Deployment) -> str:
        """Describe the change by the engine's own names."""
        if self.argument == "quantization":
            return f"{FORMAT_NAMES[self.value][1]} checkpoint of the model"
        if self.argument == "gpu_free_bytes":
            return self.instruction
        settings = self.list_settings(deployment).items()
        gpus = f" ({self.value.num_gpus} GPUs)" if self.argument == "layout" else ""
        return " ".join(f"{name} {value}" for name, value in settings) + gpus

    def describe_price(self, deployment: Deployment) -> str:
        """Describe what the change costs users or operators."""
        price = CHANGE_PRICES[self.argument]
        is_utilization = self.argument == "gpu_memory_utilization"
        if is_utilization and self.value < deployment.args.gpu_memory_utilization:
            return price.replace("less", "more")
        return price


def list_changes(
    deployment: Deployment,
    utilizations: Iterable[float | None] = (None,),
    lengths: Iterable[int | None] = (None,),
    max_state_sequences: float = math.inf,
) -> dict[str, list[DeploymentChange]]:
    """List the changes that need less memory, by what they change, the mildest first.

    First what costs users nothing, then what costs accuracy, money and long requests. A value of
    gpu_memory_utilization or max_model_len that is None depends on the other changes;
    `max_state_sequences` is a limit of max_num_seqs that the start demands.
    """
    args, layout, model = deployment.args, deployment.layout, deployment.model
    is_shared = deployment.gpu_free_bytes is not None or deployment.other_tenants_bytes
    tokens = max(MIN_REMEDY_BATCHED_TOKENS, args.max_num_seqs)
    bits = model.quantization.weight_bits
    batches = reversed(list_powers_of_two(args.max_num_seqs - 1))
    sequences = [size for size in batches if size >= MIN_REMEDY_SEQUENCES]
    if 0 < max_state_sequences < args.max_num_seqs:
        sequences = sorted({*sequences, int(max_state_sequences)}, reverse=True)
    formats = [
        name
        for name in FORMAT_NAMES
        if parse_quantization(name).weight_bits < bits
        and not explain_refused_start(DeploymentChange("quantization", name).apply(deployment))
    ]
    costs: dict[str, list[tuple[Any, float]]] = {
        "gpu_free_bytes": [(None, 3.0)] if is_shared else [],
        "gpu_memory_utilization": [(share, 1.0) for share in utilizations],
        "max_num_seqs": [(size, max(0.5, 2.0 + 1.5 * math.log2(256 / size))) for size in sequences],
        "max_num_batched_tokens": [
            (size, 8.0)
            for size in reversed(list_powers_of_two(args.max_num_batched_tokens - 1))
            if args.enable_chunked_prefill and size >= tokens
        ],
        "kv_cache_dtype": [(name, 40.0) for name in list_smaller_caches(deployment)],
        "quantization": [(name, 1000.0 * rank) for rank, name in enumerate(formats, start=1)],
        "layout": [
            (
                larger,
                100.0 * math.log2(larger.num_gpus / layout.num_gpus)
                + 10.0 * (larger.pp > layout.pp),
            )
            for larger in _list_larger_layouts(deployment)
        ],
        "max_model_len": [(length, 20.0) for length in lengths],
    }
    return {
        argument: [DeploymentChange(argument, value, cost) for value, cost in values]
        for argument, values in costs.items()
    }


def list_smaller_caches(deployment: Deployment) -> list[str]:
    """List the most accurate FP8 format of the KV cache; empty if it has one or takes none."""
    facts, capability = deployment.engine.facts, deployment.gpu.compute_capability
    is_plain = (deployment.args.kv_cache_dtype or "auto") == "auto"
    takes_fp8 = is_plain and not (capability and capability < facts.fp8_kv_capability)
    known = facts.kv_cache_dtypes or FP8_CACHES
    return [name for name in FP8_CACHES if takes_fp8 and name in known][:1]


def _list_larger_layouts(deployment: Deployment) -> list[ParallelLayout]:
    """List the legal layouts of more ranks: wider, deeper, and both."""
    layout, node = deployment.layout, deployment.gpus_per_node
    wider = [layout.with_tp(tp) for tp in (2, 4, 8) if layout.tp < tp <= node]
    deeper = [replace(layout, pp=pp) for pp in (2, 4, 8) if pp > layout.pp]
    both = [replace(wide, pp=deep.pp) for wide in wider[-1:] for deep in deeper]
    return [
        larger
        for larger in (*wider, *deeper, *both)
        if not explain_illegal_layout(deployment.model, larger, node, deployment.engine)
    ]
