"""Read a vLLM start-up log: its figures, the arguments that it names, and how it ended.

Phrases of vLLM 0.6 to 0.33 (v1/worker/gpu_worker.py, v1/worker/gpu_model_runner.py, v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.core.quantities import GIB, PlannerError

_NUMBER = r"(-?[\d.,]*\d)"
_FIGURES: Mapping[str, tuple[str, ...]] = {
    "total": (rf"Free memory on device[^(]*\([\d.]+/{_NUMBER} GiB\)", rf"total_gpu_memory \({_NUMBER}GiB\)",
              rf"total_memory={_NUMBER}GiB"),
    "free": (rf"Free memory on device[^(]*\({_NUMBER}/", rf"Initial free memory: {_NUMBER} GiB"),
    "requested": (rf"Requested memory: [\d.]+ \(util\), {_NUMBER} GiB",
                  rf"utilization (?:is )?\([\d.]+, {_NUMBER} GiB\)",
                  rf"gpu_memory_utilization \([\d.]+\) = {_NUMBER}GiB"),
    "weights": (rf"Model loading took {_NUMBER} Gi?B", rf"Loading model weights took {_NUMBER} Gi?B",
                rf"model weights take {_NUMBER}GiB", rf"{_NUMBER} GiB for weight"),
    "activation": (rf"torch peak memory increase: {_NUMBER}GiB", rf"activation peak memory takes {_NUMBER}GiB",
                   rf"{_NUMBER} GiB for peak activation"),
    "non_torch": (rf"non-torch forward increase memory: {_NUMBER}GiB", rf"non_torch_memory takes {_NUMBER}GiB",
                  rf"{_NUMBER} GiB for non-torch"),
    "cudagraph_estimate": (rf"Estimated CUDA graph memory: {_NUMBER} GiB",),
    "cudagraph_actual": (rf"CUDA graph pool memory: {_NUMBER} GiB", rf"Graph capturing .*took {_NUMBER} GiB"),
    "kv_available": (rf"Available KV cache memory: {_NUMBER} GiB", rf"reserved for KV Cache is {_NUMBER}GiB"),
    "kv_tokens": (rf"GPU KV cache size: {_NUMBER} tokens",),
    "num_blocks": (rf"# (?:GPU|cuda) blocks: {_NUMBER}", rf"num_gpu_blocks is: {_NUMBER}"),
    "max_concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x",),
}  # fmt: skip
COUNTS = ("kv_tokens", "num_blocks", "max_concurrency")
"""Figures that are not bytes."""
_SMALLEST = ("free", "kv_available", *COUNTS)
"""Of several ranks the tightest counts: the smallest of these, the largest of the others."""
_ARGUMENTS = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "decode_context_parallel_size": "dcp", "max_seq_len": "max_model_len", "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens", "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization", "enforce_eager": "enforce_eager", "dtype": "dtype",
    "enable_prefix_caching": "enable_prefix_caching", "kv_cache_dtype": "kv_cache_dtype", "model": "model",
    "quantization": "quantization", "max_loras": "max_loras", "max_lora_rank": "max_lora_rank",
    "enable_lora": "enable_lora", "enable_expert_parallel": "enable_expert_parallel", "device_name": "gpu",
}  # fmt: skip
"""The engine's names of arguments, and ours."""
_SPECULATION = {"method": r"'(\w+)'", "model": r"'([^']+)'", "num_spec(?:ulative)?_tokens": r"(\d+)"}
_VERSION = r"(?:LLM engine \(v|API server version |vLLM version:? ?|version )v?(\d+\.\d+(?:\.\d+)?[\w.+]*)"


@dataclass(frozen=True)
class StartupLog:
    """What a start-up log states: figures (bytes, but counts as they are) and the engine's arguments."""

    version: str | None
    figures: Mapping[str, float]
    arguments: Mapping[str, Any]
    """By our names: model, gpu, tp, engine_version, speculation (method, draft model, tokens) and whatever it names."""
    complete: bool
    """It lists all arguments that are not the engine's defaults."""
    failure: str


def read_log(text: str) -> StartupLog:
    """The figures and arguments in the `text` of a vLLM start-up log; `PlannerError` when it states none of them."""
    figures = {}
    for name, patterns in _FIGURES.items():
        found = next((hits for pattern in patterns if (hits := re.findall(pattern, text))), [])
        if found:
            values = [float(hit.replace(",", "")) for hit in found]
            value = min(values) if name in _SMALLEST else max(values)
            figures[name] = value if name in COUNTS else value * GIB
    if not {"weights", "kv_available", "kv_tokens", "free"} & set(figures):
        raise PlannerError('no vLLM start-up figures found; lines such as "Available KV cache memory: ..." would be')
    arguments: dict[str, Any] = {}
    for name, ours in _ARGUMENTS.items():
        said = rf"(?:\b{name}['\"]?\s*[=:]\s*|Defaulting {name} to )(?:'([^']*)'|\"([^\"]*)\"|([\w./+-]+))"
        if match := re.search(said, text):
            arguments.setdefault(ours, _value(next(group for group in match.groups() if group is not None)))
    if match := re.search(_VERSION, text):
        arguments["engine_version"] = match[1]
    if speculative := re.search(r"speculative_config['\"]?\s*[=:]\s*(?:SpeculativeConfig\(.*?\)|\{.*?\})", text):
        found = [re.search(rf"\b{name}['\"]?\s*[=:]\s*{value}", speculative[0]) for name, value in _SPECULATION.items()]
        arguments["speculation"] = tuple(match and match[1] for match in found)
    arguments |= {f"gpu_{name}": round(figures[name]) for name in ("total", "free") if name in figures}
    failures = re.findall(
        r"^.*?((?:\w+Error|No available memory|Free memory on device .* is less|To serve at least).*)$", text, re.M
    )
    return StartupLog(
        arguments.get("engine_version"),
        figures,
        {name: value for name, value in arguments.items() if value not in (None, "auto")},
        "non-default args" in text,
        failures[-1].strip() if failures else "",
    )


def _value(text: str) -> Any:
    text = text.removeprefix("torch.").removesuffix(".json")
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if text.isdigit() else float(text) if re.fullmatch(r"\d*\.\d+", text) else text
