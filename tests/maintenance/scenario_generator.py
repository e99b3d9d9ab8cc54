"""Random scenarios as people would write them: seeded, correlated as services are, with a few odd ones between."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from planner.core.versions import Version
from planner.engines.engine import get_engine
from planner.hardware.gpus import Gpu, get_gpu
from planner.models.registry import Model, load_model
from planner.planning.scenario_schema import LengthsEntry, ScenarioEntry, WorkloadEntry

MODELS = (
    "meta-llama/Llama-3.2-1B", "google/gemma-3-1b-it", "Qwen/Qwen2.5-1.5B",
    "ibm-granite/granite-3.3-2b-instruct",
    "Qwen/Qwen3-4B-Instruct-2507", "google/gemma-3-4b-it", "mistralai/Mistral-7B-Instruct-v0.2",
    "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "google/gemma-2-9b-it", "allenai/OLMoE-1B-7B-0125", "google/gemma-3-12b-it", "Qwen/Qwen3-14B",
    "microsoft/phi-4",
    "deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "google/gemma-3-27b-it", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-32B",
    "Qwen/Qwen3-32B-FP8",
    "ibm-granite/granite-4.0-h-small", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1", "meta-llama/Llama-3.1-70B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "zai-org/GLM-4.5-Air",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "openai/gpt-oss-120b", "mistralai/Mistral-Large-Instruct-2407", "mistralai/Mixtral-8x22B-v0.1",
    "Qwen/Qwen3-235B-A22B-FP8", "nvidia/MiniMax-M2.5-NVFP4", "MiniMaxAI/MiniMax-M2",
    "zai-org/GLM-4.6",
    "Qwen/Qwen3.5-397B-A17B", "meta-llama/Llama-3.1-405B-Instruct",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5-FP8",
    "moonshotai/Kimi-K2-Instruct",
    "moonshotai/Kimi-K2-Thinking",
)  # fmt: skip
"""From 1 to 1,000 billion parameters: dense, MoE, MLA, hybrid, sliding windows, quantized checkpoints."""
CONSUMER = ("RTX-3090", "RTX-4090", "RTX-5090", "RTX-A5000")
WORKSTATION = ("RTX-A6000", "RTX-6000-Ada", "RTX-PRO-6000", "RTX-PRO-6000-Server")
CLOUD = (
    "L4",
    "A10G",
    "L40S",
    "A100-SXM-40GB",
    "A100-PCIE-80GB",
    "A100-SXM-80GB",
    "H100-PCIE",
    "H100-SXM",
    "H100-NVL",
)
LARGE = ("A100-SXM-80GB", "H100-SXM", "H200-SXM", "B200", "GB200")
AMD = ("MI300X", "MI325X", "MI355X")
VERSIONS: dict[str, tuple[str | None, ...]] = {
    "vllm": (None, None, "0.8.5", "0.11.1", "0.20.2", "0.20.2", "0.28.0", "0.33.0"),
    "sglang": (None, "0.5.4"), "trtllm": (None, "1.0.0"),
}  # fmt: skip
TASKS = {
    "chat": ((200, 3000), (80, 600)), "rag": ((2000, 12_000), (50, 600)),
    "completion": ((500, 4000), (8, 60)),
    "reasoning": ((100, 1500), (1500, 8000)), "agent": ((4000, 30_000), (60, 500)),
    "labels": ((50, 2000), (1, 4)),
    "documents": ((15_000, 60_000), (100, 1500)), "writing": ((50, 400), (500, 3000)),
}  # fmt: skip
"""Mean prompt and output tokens, from and to."""


class Draw:
    """One scenario's dice."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 0x5CE])

    def of(self, options: Any) -> Any:
        """One of `options`."""
        return options[int(self.rng.integers(len(options)))]

    def some(self, options: Any, most: int) -> list[Any]:
        """One to `most` different `options`."""
        count = min(int(self.rng.integers(1, most + 1)), len(options))
        return [options[k] for k in self.rng.permutation(len(options))[:count]]

    def log(self, low: float, high: float) -> float:
        """Log-uniform in [low, high]."""
        return float(math.exp(self.rng.uniform(math.log(low), math.log(max(high, low)))))

    def happens(self, chance: float) -> bool:
        """With this probability."""
        return bool(self.rng.random() < chance)


def generate(seed: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """(name, content of the scenario's YAML) for `seed`; a trace that it names is written to `folder`."""
    dice = Draw(seed)
    odd = dice.happens(0.1)
    size = dice.log(1e9, 1.1e12)
    name = dice.of(
        sorted(
            MODELS,
            key=lambda name: abs(math.log(load_model(name).architecture.params_total / size)),
        )[:6]
    )
    served = load_model(name)
    served_by = dice.of(("vllm",) * 7 + ("sglang", "sglang", "trtllm"))
    tasks = [
        task for task in TASKS if odd or TASKS[task][0][0] * 3 < served.architecture.max_position
    ]
    task = dice.of(tasks + [task for task in tasks if task != "labels"])
    (prompt_low, prompt_high), outputs = TASKS[task]
    longest = served.architecture.max_position / (1.5 if odd else 4)
    prompt = dice.log(prompt_low, max(min(prompt_high, longest), prompt_low))
    output = max(1.0, min(dice.log(*outputs), longest))
    cards = _cards(dice, served, served_by, odd)
    busy = dice.log(0.3, 24)  # GPUs of the first kind that the traffic keeps busy, very roughly
    rate = float(np.clip(busy * _rate_of_one(served, cards[0], prompt, output), 0.1, 200))
    data: dict[str, Any] = {
        "question": f"{task}{', odd' if odd else ''}: seed {seed}?",
        "model": name,
        "quantization": _formats(dice, served),
        "kv_cache_dtype": dice.of(
            (["auto"], ["auto"], ["auto", "fp8_e4m3" if served_by == "sglang" else "fp8"])
        ),
        "gpus": [
            {"gpu": card.name, "at_most": _at_most(dice, served, card, busy)} for card in cards
        ],
        "engine": served_by,
        "workload": _workload(dice, task, prompt, output, rate, seed, folder),
    }
    if version := dice.of(VERSIONS[served_by]):
        data["engine_version"] = version
    if "requests" not in data["workload"] or dice.happens(0.2):
        data["service_level"] = _level(dice, prompt, output)
    _extras(dice, data, served, cards)
    return f"random-{seed}", data


def small(seed: int) -> tuple[str, dict[str, Any]]:
    """The same for a model of 1 to 9 billion parameters on one to four GPUs of a kind, so that all can be tried."""
    dice = Draw(seed)
    name, task = dice.of(MODELS[:10]), dice.of(("chat", "rag", "completion", "writing"))
    prompt, output = (dice.log(*bounds) for bounds in TASKS[task])
    card = get_gpu(dice.of(("L4", "A10G", "L40S", "RTX-4090", "A100-SXM-80GB", "H100-SXM")))
    rate = dice.log(0.5, 3) * _rate_of_one(load_model(name), card, prompt, output)
    pace = (
        dice.log(1, 4)
        * 2
        * load_model(name).architecture.params_total
        / card.memory_bandwidth
        * 1e3
    )
    return f"small-{seed}", {
        "question": f"{task}: seed {seed}?", "model": name,
        "quantization": dice.of((["checkpoint"], ["fp8"])),
        "kv_cache_dtype": dice.of((["auto"], ["auto", "fp8"])),
        "gpus": [{"gpu": card.name, "at_most": 4}],
        "workload": {
            "prompt_tokens": {"mean": round(prompt), "p95": round(prompt * dice.log(1.5, 3))},
            "output_tokens": {"mean": round(output), "p95": round(output * dice.log(1.5, 3))},
            "rate": round(rate, 3),
        },
        "service_level": {
            "ttft": {"p95": round(dice.log(300, 5000))},
            dice.of(("tpot", "itl")): {"p95": round(pace + 10)},
        },
        "headroom": dice.of((0, 0.2)),
    }  # fmt: skip


def _bytes(served: Model) -> float:
    return served.architecture.params_total * served.quantization.weight_bits / 8


def _cards(dice: Draw, served: Model, served_by: str, odd: bool) -> list[Gpu]:
    """One to four kinds of GPU that such a model is served on; an odd scenario takes any."""
    gib = _bytes(served) / 2**30
    pool = {*CLOUD, *CONSUMER, *WORKSTATION} if gib < 40 else {*CLOUD[3:], *WORKSTATION[2:], *LARGE}
    pool = pool if gib < 150 else {*LARGE}
    if gib > 20 and served_by != "trtllm":
        pool |= {*AMD} if served_by == "vllm" else {AMD[0]}
    if odd:
        pool = {*CONSUMER, *WORKSTATION, *CLOUD, *LARGE, *AMD}
    return [get_gpu(name) for name in dice.some(sorted(pool), 4)]


def _rate_of_one(served: Model, card: Gpu, prompt: float, output: float) -> float:
    """Requests/s that one GPU might serve: a third of its 16-bit peak for prompts, a tenth of that for outputs."""
    flops = card.peak_flops.get("bf16", card.peak_flops["fp16"]) / 3
    return flops / (2 * served.architecture.params_active * (prompt + 10 * output))


def _at_most(dice: Draw, served: Model, card: Gpu, busy: float) -> int:
    """GPUs that may be had: mostly enough for one copy and for the traffic, sometimes scarce."""
    copy = _bytes(served) * 1.3 / (0.9 * card.memory_bytes)
    wanted = max(copy, busy) * dice.log(0.7, 4)
    return int(min(2 ** math.ceil(math.log2(max(wanted, 1))), 64))


def _formats(dice: Draw, served: Model) -> list[str]:
    if served.quantization.method != "none":
        return ["checkpoint"]
    return list(
        dice.of(
            (["checkpoint"], ["checkpoint", "fp8"], ["fp8"], ["checkpoint", "fp8", "awq"], ["awq"])
        )
    )


def _lengths(dice: Draw, mean: float) -> dict[str, float]:
    """Lengths around `mean`, told as a mean, with p95, with p50, p95 and max, or exactly."""
    sigma, how = dice.rng.uniform(0.3, 1.2), dice.of(("mean", "p95", "all", "all", "exactly"))
    told: dict[str, float] = {"mean": round(mean, 1)}
    p50, p95 = mean * math.exp(-(sigma**2) / 2), mean * math.exp(1.645 * sigma - sigma**2 / 2)
    if how == "exactly" and "exactly" in LengthsEntry.model_fields:
        return {"exactly": round(mean)}
    if how == "p95" and mean > 5:
        told["p95"] = round(p95, 1)
    if how == "all" and p50 > 2:
        told |= {"p50": round(p50, 1), "p95": round(p95, 1), "max": math.ceil(p95 * dice.log(2, 4))}
    return told


def _workload(
    dice: Draw, task: str, prompt: float, output: float, rate: float, seed: int, folder: Path
) -> dict[str, Any]:
    traffic: dict[str, Any] = {
        "prompt_tokens": _lengths(dice, prompt),
        "output_tokens": _lengths(dice, output),
    }
    kind = dice.of(("rate",) * 7 + ("offline", "trace", "concurrency"))
    if kind == "trace":
        traffic = {"trace": _trace(dice, prompt, output, rate, seed, folder)}
        if dice.happens(0.4):
            traffic["rate"] = round(rate * dice.log(0.5, 2), 3)
    elif kind == "offline":
        hours = round(dice.log(0.5, 48), 2)
        traffic |= {"requests": max(round(rate * hours * 3600), 1), "within_hours": hours}
    elif kind == "concurrency" and "concurrency" in WorkloadEntry.model_fields:
        traffic["concurrency"] = max(1, round(rate * (1 + 0.03 * output)))
    else:
        traffic["rate"] = float(f"{rate:.3g}")
        if dice.happens(0.5):
            traffic["burstiness"] = round(dice.log(0.2, 2), 2)
    if task in ("rag", "agent", "chat") and kind != "trace" and dice.happens(0.5):
        traffic["shared_prefix"] = {
            "tokens": int(prompt * dice.rng.uniform(0.1, 0.7)),
            "hit_rate": 0.9,
        }
    return traffic


def _trace(dice: Draw, prompt: float, output: float, rate: float, seed: int, folder: Path) -> str:
    """Some minutes of traffic as an Azure CSV or a plain one."""
    n = int(np.clip(rate * dice.log(120, 900), 200, 3000))
    arrival = np.cumsum(dice.rng.gamma(0.7, 1 / (0.7 * rate), n))
    prompts, outputs = (
        np.maximum(np.rint(mean * dice.rng.lognormal(-0.32, 0.8, n)), 1)
        for mean in (prompt, output)
    )
    prompts, outputs = (
        np.minimum(prompts, 4 * prompt).astype(int),
        np.minimum(outputs, 4 * output).astype(int),
    )
    outputs = np.maximum(outputs, 1)
    path = folder / f"trace-{seed}.csv"
    if dice.happens(0.5):
        stamps = np.datetime64("2023-11-16T18:15:46.000000") + (arrival * 1e6).astype(
            "timedelta64[us]"
        )
        rows = [
            f"{str(t).replace('T', ' ')},{p},{o}"
            for t, p, o in zip(stamps, prompts, outputs, strict=True)
        ]
        head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    else:
        rows = [f"{t:.4f},{p},{o}" for t, p, o in zip(arrival, prompts, outputs, strict=True)]
        head = "arrival,prompt_tokens,output_tokens"
    path.write_text("\n".join((head, *rows)) + "\n")
    return path.name


def _level(dice: Draw, prompt: float, output: float) -> dict[str, dict[str, int]]:
    """One to three limits, from tight to loose, each at one or two percentiles."""
    ttft = (150 + 0.15 * prompt) * dice.log(1, 10)
    tpot = dice.log(12, 150)
    usual = {"ttft": ttft, "tpot": tpot, "itl": tpot * 1.5, "e2e": (ttft + tpot * output) * 1.3}
    wider = {"mean": 0.8, "p50": 0.8, "p95": 1.3, "p99": 2.0}
    metrics = (
        ("ttft", "e2e") if output < 5 else tuple(usual)
    )  # hardly anybody promises a pace for three tokens
    points = {name: dice.some(list(wider), 2) for name in dice.some(metrics, 3)}
    return {
        name: {at: max(round(usual[name] * wider[at]), 5) for at in ats}
        for name, ats in points.items()
    }


def _extras(dice: Draw, data: dict[str, Any], served: Model, cards: list[Gpu]) -> None:
    """What some people add."""
    if "headroom" in ScenarioEntry.model_fields:
        data["headroom"] = dice.of((0, 0.2, 0.2, 0.4))
    if dice.happens(0.1):
        data["other_tenants_gib"] = dice.of((0.5, 2, 6))
    if dice.happens(0.25):
        data["prices"] = {card.name: round(dice.log(0.3, 8), 2) for card in cards}
    if dice.happens(0.2):
        data["engine_args"] = dice.of((
            {"max_num_seqs": 64}, {"gpu_memory_utilization": 0.85},
            {"max_num_batched_tokens": 4096},
            {"enable_prefix_caching": False}, {"max_num_seqs": 256, "gpu_memory_utilization": 0.95},
        ))  # fmt: skip
    if dice.happens(0.2):
        method = (
            "mtp"
            if served.architecture.is_mla and dice.happens(0.6)
            else dice.of(("eagle3", "ngram"))
        )
        rate = round(dice.rng.uniform(0.3, 0.85), 2)
        data["speculation"] = {"method": method, "num_speculative_tokens": dice.of((1, 2, 3, 5)),
                               "acceptance_rate": rate, "allowed": dice.happens(0.7)}  # fmt: skip
    started = get_engine(data["engine"], data.get("engine_version"))
    if all(
        card.supported.get(started.name, (Version(99, 0), None))[0] > started.release
        for card in cards
    ):
        data.pop("engine_version", None)  # nobody asks for GPUs that all came after their engine
