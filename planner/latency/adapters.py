"""What LoRA adapters add to a step: each different one in it, each token that one changes, each that is loaded."""

from typing import Any

from planner.facts.deployment import Deployment
from planner.memory.weights import lora_bytes

ADAPTER_S, TOKEN_S = 19e-6, 0.25e-6
"""Seconds per layer of a step for each different adapter in it, and for each token. From mean TPOT of 563 one-hour runs
of vLLM V1 (mid-2025) with Llama-3.1-8B and Qwen2.5-7B on H100 64 GB, ranks 8 to 32, 8 to 384 slots, less the step costs
planned here (GPULLMAdapterOptimization, arXiv 2508.08343, read 2026-11): 18.0 and 20.5 us an adapter in either model
alone, 0.15 and 0.57 us a token. Runs whose adapter rates are held back: 7 % median, 16 % p90. Rank adds less than a
tenth from 16 to 32."""
LOAD_BANDWIDTH = 16e9
"""Bytes/s from host memory into a slot; an assumption (half of a PCIe 5.0 x16 link)."""


def adapter_costs(deployment: Deployment) -> dict[str, Any]:
    """The fields of `simulator.kernel_types.StepTable` that adapters fill, s."""
    layers, args = deployment.model.architecture.layers, deployment.args
    slot = lora_bytes((w for layer in layers for w in layer.weights), deployment.layout, 1, args.max_lora_rank)
    each = len(layers) / deployment.layout.pp
    return {
        "adapter_s": ADAPTER_S * each, "adapter_token_s": TOKEN_S * each, "adapter_load_s": slot / LOAD_BANDWIDTH,
    }  # fmt: skip
