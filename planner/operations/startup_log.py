"""Read a vLLM start-up log: its figures, the arguments that it names, and how it ended.

Phrases of vLLM 0.6 to 0.33 (v1/worker/gpu_worker.py, v1/worker/gpu_model_runner.py, v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from planner.core.quantities import GIB, PlannerError

_NUMBER = r"(?<![\d.,])(-?\d[\d,]{0,18}(?:\.\d{1,20})?)"
_GAP = r"[^(\n]{0,80}"
_FIGURES: Mapping[str, tuple[str, ...]] = {
    "total": (rf"Free memory on device{_GAP}\([\d.]{{1,20}}/{_NUMBER} GiB\)", rf"total_gpu_memory \({_NUMBER}GiB\)",
              rf"total_memory={_NUMBER}GiB"),
    "free": (rf"Free memory on device{_GAP}\({_NUMBER}/", rf"Initial free memory: {_NUMBER} GiB"),
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
    "cudagraph_actual": (rf"CUDA graph pool memory: {_NUMBER} GiB", rf"Graph capturing .{{0,80}}took {_NUMBER} GiB"),
    "kv_available": (rf"Available KV cache memory: {_NUMBER} GiB", rf"reserved for KV Cache is {_NUMBER}GiB"),
    "kv_tokens": (rf"GPU KV cache size: {_NUMBER} tokens",),
    "num_blocks": (rf"# (?:GPU|cuda) blocks: {_NUMBER}", rf"num_gpu_blocks is: {_NUMBER}"),
    "max_concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x",),
}  # fmt: skip
_PHRASE = {pattern: max(re.split(r"[^\w ]", pattern), key=len) for known in _FIGURES.values() for pattern in known}
"""What stands in every hit of a pattern: the pattern is tried only around it."""
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
_NAMED = f"({'|'.join(_ARGUMENTS)})"
_ARGUMENT = re.compile(
    rf"(?:\b{_NAMED}['\"]?\s*[=:]\s*|Defaulting {_NAMED} to )"
    r"(?='([^']{0,200})'|\"([^\"]{0,200})\"|([\w./+-]{1,200}))"
)
_SPECULATION = {"method": r"'(\w{1,80})'", "model": r"'([^']{1,200})'", "num_spec(?:ulative)?_tokens": r"(\d{1,4})\b"}
_VERSION = (
    r"(?:LLM engine \(v|API server version |vLLM version:? ?|version )v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+]{0,40})"
)


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
        found = next((hits for pattern in patterns if (hits := re.findall(pattern, _near(_PHRASE[pattern], text)))), [])
        if found:
            values = [float(hit.replace(",", "")) for hit in found]
            value = min(values) if name in _SMALLEST else max(values)
            figures[name] = value if name in COUNTS else value * GIB
    if not {"weights", "kv_available", "kv_tokens", "free"} & set(figures):
        raise PlannerError('no vLLM start-up figures found; lines such as "Available KV cache memory: ..." would be')
    arguments: dict[str, Any] = {}
    said: dict[str, str] = {}
    for hit in _ARGUMENT.finditer(text):
        name, word = (group for group in hit.groups() if group is not None)
        said.setdefault(name, word)
    for name, ours in _ARGUMENTS.items():
        if name in said:
            arguments.setdefault(ours, _value(said[name]))
    if match := re.search(_VERSION, text):
        arguments["engine_version"] = match[1]
    if speculative := re.search(r"speculative_config['\"]?\s*[=:]\s*(?:SpeculativeConfig\(|\{)([^)}\n]{0,999})", text):
        found = [re.search(rf"\b{name}['\"]?\s*[=:]\s*{value}", speculative[1]) for name, value in _SPECULATION.items()]
        arguments["speculation"] = tuple(match and match[1] for match in found)
    arguments |= {f"gpu_{name}": round(figures[name]) for name in ("total", "free") if name in figures}
    failures = re.findall(
        r"(?:\b\w{1,80}Error|No available memory|Free memory on device .{0,80} is less|To serve at least).{0,400}", text
    )
    return StartupLog(
        arguments.get("engine_version"),
        figures,
        {name: value for name, value in arguments.items() if value not in (None, "auto")},
        "non-default args" in text,
        failures[-1].strip() if failures else "",
    )


def _near(phrase: str, text: str) -> str:
    """What stands around the first thousand times that `phrase` occurs."""
    hits = islice(re.finditer(re.escape(phrase), text), 1000)
    return "\n".join(text[max(hit.start() - 40, 0) : hit.end() + 200] for hit in hits)


def _value(text: str) -> Any:
    text = text.removeprefix("torch.").removesuffix(".json")
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else float(text) if re.fullmatch(r"\d*\.\d+", text) else text
