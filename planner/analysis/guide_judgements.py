"""Judge the rules of circulating guides, each by what the planner computes for it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.text import format_count
from planner.core.units import GIB
from planner.engines.cli_options import (
    list_versions_with_spelling,
    load_flag_lists,
    load_recorded_names,
    parse_engine_version,
)
from planner.engines.deployment import Deployment, SpeculationConfig, deploy_on
from planner.engines.engine import EngineFacts, get_engine
from planner.hardware.gpus import get_gpu, list_gpus
from planner.latency.speculative_decoding import build_step_model, find_break_even_acceptance
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import MemoryPlan, get_memory_plan, plan_memory
from planner.memory.weights import compute_bytes_per_parameter
from planner.models.registry import list_model_names, load_model, resolve_repository
from planner.planning.capacity import PREFIX_CACHE_OVERHEAD_FRACTION, compute_rejected_fraction
from planner.planning.deployment_builder import choose_max_model_len
from planner.planning.evaluation import saturate_workload
from planner.planning.prediction import evaluate, evaluate_batch
from planner.planning.scenario import list_scenarios, load_scenario
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

GuideVerdict = Literal["right", "outdated", "wrong", "risky", "not checkable"]
LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"
CASES = ((LLAMA_8B, "L4", 1), (LLAMA_8B, "H100", 1), (LLAMA_70B, "H100", 4))
"""Model, GPU and ranks for rules that leave them out: small, large, several."""
MODELS_BY_SIZE = {
    "7b": "meta-llama/Llama-2-7b-hf", "8b": LLAMA_8B, "13b": "meta-llama/Llama-2-13b-hf",
    "32b": "Qwen/Qwen3-32B", "70b": LLAMA_70B, "72b": "Qwen/Qwen2.5-72B-Instruct",
}  # fmt: skip
"""What guides mean by a size alone."""
FORMATS = {
    "fp8": "fp8", "int8": "w8a8", "8-bit": "fp8", "awq": "awq", "gptq": "gptq", "int4": "awq", "4-bit": "awq",
}  # fmt: skip
"""Formats as guides write them; any other is 16 bits."""
SIZE_TOLERANCE, SPEED_TOLERANCE = 0.05, 0.25
"""Relative error of a size, and of a gain in speed, that still is right."""
MAX_MODEL_LEN_TOKENS, CONTEXT_TOKENS = 8192, 1000
_FORMAT_PATTERN = re.compile(
    r"\b(?:FP16|BF16|FP8(?!.KV)|INT8|INT4|AWQ|GPTQ|4-bit|8-bit)\b", re.IGNORECASE
)
_FP8_KV_PATTERN = re.compile(r"FP8[- ]KV|KV[- ]cache (?:in|at|with) FP8", re.IGNORECASE)


@dataclass(frozen=True)
class Judgement:
    """A verdict on a claim, and the computed figures that it rests on."""

    verdict: GuideVerdict
    finding: str


Stated = Mapping[str, Any]
JUDGES: dict[str, Callable[[Stated, str | None], Judgement]] = {}


def _declare_judge(
    judge: Callable[[Stated, str | None], Judgement],
) -> Callable[[Stated, str | None], Judgement]:
    """Register a judge under its name without `judge_`."""
    JUDGES[judge.__name__.removeprefix("judge_")] = judge
    return judge


def find_guide_model(name: str) -> str:
    """Find the model that a guide names, by its size alone too; `PlannerError` if none is known."""
    # "a 70B", "and 70B" and "Llama 70B" are the size alone
    bare = re.sub(r"^(?:[a-z]+|A|The|Llama)[- ](?=[\d.]+B$)", "", name.strip()).replace(" ", "-")
    if (sized := MODELS_BY_SIZE.get(bare.lower())) is not None:
        return sized
    known = set(list_model_names())
    for candidate in (bare, f"Meta-{bare}", f"{bare}-hf", f"{bare}-Instruct", f"{bare}-v0.3"):
        if candidate in known or (resolve_repository(candidate) in known):
            return resolve_repository(candidate)
    raise PlannerError(f"{name}: no model of the catalog; `headroom models` lists them")


def _deploy(
    model: str, gpu: str, tp: int = 1, version: str | None = None, **options: Any
) -> Deployment:
    return deploy_on(
        model, gpu, tp=tp, engine_version=version,
        **{"max_model_len": MAX_MODEL_LEN_TOKENS, **options},
    )  # fmt: skip


def _read_placement(stated: Stated) -> tuple[str, str, int]:
    """Return the model, the GPU and how many of it are stated."""
    return find_guide_model(str(stated["model"])), str(stated["gpu"]), _read_ranks(stated)


def _deploy_cases(version: str | None, **options: Any) -> list[Deployment]:
    return [_deploy(*case, version, **options) for case in CASES]


def _build_chat(**options: Any) -> Workload:
    """Build chats of 1,000 + 300 tokens on average."""
    return Workload(
        LengthDistribution.from_lognormal(1000, p95=2500),
        LengthDistribution.from_lognormal(300, p95=800),
        **(options or {"rate": 1}),
    )


def _compute_decode_s(deployment: Deployment, batch: int, context: int = CONTEXT_TOKENS) -> float:
    return float(build_step_model(deployment).estimate_step([], [context] * batch).seconds)


def _compute_prefill_s(deployment: Deployment, tokens: int, cached: int = 0) -> float:
    return float(build_step_model(deployment).estimate_prompt(tokens, cached).seconds)


def _compute_saturated_tps(deployment: Deployment, workload: Workload) -> float | None:
    found = evaluate(deployment, saturate_workload(deployment, workload)).performance
    return found.output_tps.mid if found else None


def _format_span(values: Iterable[float], unit: str = "") -> str:
    """Format the least and the most of some numbers."""
    low, *_, high = (format_number(value, 2) for value in sorted([*values] * 2))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _describe_error(stated: float, low: float, high: float) -> str:
    """Say by how much a number is wrong."""
    near = low if stated < low else high
    ratio = max(stated, near) / max(min(stated, near), 1e-9)
    side = "low" if stated < low else "high"
    if ratio >= 2:
        return f"too {side} by a factor of {format_number(ratio, 2)}"
    return f"{format_number(abs(stated / near - 1) * 100, 2)}% too {side}"


def _judge_number(
    stated: float, low: float, high: float, finding: str, tolerance: float
) -> Judgement:
    """Judge a stated number by the computed range."""
    if low * (1 - tolerance) <= stated <= high * (1 + tolerance):
        return Judgement("right", finding)
    return Judgement("wrong", f"{finding}; the claim is {_describe_error(stated, low, high)}")


def _judge_size(stated: Stated, key: str, unit: str, computed: float, finding: str) -> Judgement:
    """Judge a stated size by the computed bytes, in the unit that the text writes.

    Who writes GB may mean GiB, so that the unit alone makes no claim wrong; GiB are GiB.
    """
    prefix = unit[0].upper()
    power = {"K": 1, "M": 2, "G": 3}.get(prefix, 0)
    decimal, binary = computed / 1000**power, computed / 1024**power
    written = binary if "i" in unit else decimal
    value, low = float(stated[key]), written if "i" in unit else binary
    if low * (1 - SIZE_TOLERANCE) <= value <= written * (1 + SIZE_TOLERANCE):
        return Judgement("right", finding)
    return Judgement("wrong", f"{finding}; the claim is {_describe_error(value, written, written)}")


def _format_bytes(size: float) -> str:
    """Format a size in the decimal and the binary unit of its magnitude."""
    power, prefix = next(
        ((n, name) for n, name in ((3, "G"), (2, "M"), (1, "k")) if size >= 1000**n), (0, "")
    )
    if not power:
        return f"{size:,.0f} bytes"
    binary = f"{format_number(size / 1024**power)} {prefix.upper()}iB"
    return f"{format_number(size / 1000**power)} {prefix}B ({binary})"


def _read_format(stated: Stated) -> str | None:
    """Return the format of the weights: the claim's, or the only one that its sentence names."""
    named = {word.lower() for word in _FORMAT_PATTERN.findall(str(stated.get("sentence", "")))}
    written = str(stated.get("format", named.pop() if len(named) == 1 else "")).lower()
    return FORMATS.get(written)


def _name_format(deployment: Deployment, stated: Stated) -> str:
    """Name the format of the weights; `PlannerError` if the claim means another one."""
    method = deployment.model.quantization.method
    if method != "none" and re.search("16", str(stated.get("format", ""))):
        raise PlannerError(f"{deployment.model.name} is stored in {method}, not in 16 bits")
    return "BF16" if method == "none" else method.upper()


def _read_kv_dtype(stated: Stated) -> str | None:
    """Return the KV cache's format where the claim's sentence names one."""
    return "fp8" if _FP8_KV_PATTERN.search(str(stated.get("sentence", ""))) else None


def _read_ranks(stated: Stated) -> int:
    return int(stated.get("count", 1))


# Memory


@_declare_judge
def judge_weight_size(stated: Stated, version: str | None) -> Judgement:
    """Judge how many GB a model's weights take."""
    form = _read_format(stated)
    model = find_guide_model(str(stated["model"]))
    deployment = _deploy(model, "B200", 1, version, quantization=form, max_model_len=2048)
    total = compute_bytes_per_parameter(deployment) * deployment.model.architecture.params_total
    form_name = _name_format(deployment, stated)
    finding = f"{model} in {form_name}: {_format_bytes(total)} of weights"
    return _judge_size(stated, "gb", str(stated.get("unit", "GB")), total, finding)


@_declare_judge
def judge_bytes_per_parameter(stated: Stated, version: str | None) -> Judgement:
    """Judge the bytes that a parameter takes in a format."""
    form = _read_format(stated)
    found = [
        compute_bytes_per_parameter(
            _deploy(model, "B200", 1, version, quantization=form, max_model_len=2048)
        )
        for model in (LLAMA_8B, LLAMA_70B)
    ]
    finding = f"{(form or 'BF16').upper()}: {_format_span(found)} bytes per parameter of Llama-3.1-70B and 8B"
    return _judge_number(float(stated["bytes"]), min(found), max(found), finding, SIZE_TOLERANCE)


@_declare_judge
def judge_kv_per_token(stated: Stated, version: str | None) -> Judgement:
    """Judge the bytes of KV cache per token, on each GPU if ranks are given."""
    model, tp = find_guide_model(str(stated["model"])), _read_ranks(stated)
    dtype = _read_kv_dtype(stated)
    per_token = get_memory_plan(
        _deploy(model, "B200", tp, version, max_model_len=2048, kv_cache_dtype=dtype)
    ).layout.kv_bytes_per_token
    each = f"{per_token:,.0f} bytes ({format_number(per_token / 1024)} KiB) per token"
    finding = (
        f"{model}{f', TP{tp}' if tp > 1 else ''}: {each}{' and GPU' if tp > 1 else ''},"
        f" cache in {dtype.upper() if dtype else '16 bits'}"
    )
    unit = str(stated.get("unit", "B"))
    return _judge_size(stated, "value", "B" if unit == "bytes" else unit, per_token, finding)


@_declare_judge
def judge_kv_total(stated: Stated, version: str | None) -> Judgement:
    """Judge the KV cache of some requests of a length."""
    model, requests = find_guide_model(str(stated["model"])), int(stated["requests"])
    requests = 1 if "single" in stated else requests
    tokens = float(stated["tokens"]) * (1024 if stated.get("kilo") else 1)
    layout = get_memory_plan(
        _deploy(
            model, "B200", 1, version, max_model_len=2048, kv_cache_dtype=_read_kv_dtype(stated)
        )
    ).layout
    total = layout.kv_bytes_per_token * tokens * requests
    finding = f"{model}: {_format_bytes(total)} of KV cache for {requests:,} x {tokens:,.0f} tokens"
    return _judge_size(stated, "gb", str(stated["unit"]), total, finding)


@_declare_judge
def judge_kv_replicated(stated: Stated, version: str | None) -> Judgement:
    """Judge whether each rank holds the whole KV cache."""
    model = (
        find_guide_model(str(stated["model"]))
        if "/" not in str(stated["model"])
        else str(stated["model"])
    )
    one, eight = (
        get_memory_plan(
            _deploy(model, "B200", tp, version, max_model_len=2048)
        ).layout.kv_bytes_per_token
        for tp in (1, 8)
    )
    finding = f"{model}: {one:,.0f} bytes per token on one GPU, {eight:,.0f} on each of eight"
    return Judgement("right" if eight == one else "wrong", finding)


@_declare_judge
def judge_utilization_is_kv(stated: Stated, version: str | None) -> Judgement:
    """Judge whether gpu_memory_utilization is the share of the KV cache alone."""
    plans = [get_memory_plan(deployment) for deployment in _deploy_cases(version)]
    shares = [plan.kv_available.mid / plan.total_bytes * 100 for plan in plans]
    share = plans[0].deployment.args.gpu_memory_utilization * 100
    return Judgement(
        "wrong" if min(shares) < share - 5 else "right",
        f"at {share:.0f}% the KV cache gets {_format_span(shares, '%')} of the GPU; weights,"
        " activations and the rest come first",
    )


@_declare_judge
def judge_model_len_reserves(stated: Stated, version: str | None) -> Judgement:
    """Judge whether a lower max_model_len frees memory."""
    long, short = (
        get_memory_plan(_deploy(LLAMA_70B, "H100", 8, version, max_model_len=tokens)).pool
        for tokens in (32768, 16384)
    )
    finding = (
        f"Llama-3.1-70B, 8 x H100: the pool has {format_number(long.reported_tokens)} tokens at"
        f" max_model_len 32,768 and {format_number(short.reported_tokens)} at 16,384"
    )
    changed = abs(short.reported_tokens / long.reported_tokens - 1) > SIZE_TOLERANCE
    return Judgement("right" if changed else "wrong", finding)


@_declare_judge
def judge_long_prefill(stated: Stated, version: str | None) -> Judgement:
    """Judge whether a long prompt runs out of memory by its length."""
    peaks = [
        get_memory_plan(
            _deploy(
                LLAMA_8B, "H100", 1, version, max_num_batched_tokens=budget, max_model_len=length
            )
        ).activation.mid
        / GIB
        for budget, length in ((8192, 8192), (8192, 40000), (32768, 40000))
    ]
    short, long, wide = (format_number(peak, 2) for peak in peaks)
    return Judgement(
        "wrong" if peaks[1] < peaks[0] * (1 + SIZE_TOLERANCE) else "right",
        f"at max_num_batched_tokens 8,192 a step takes {short} GiB with prompts of up to 8,192 tokens"
        f" and {long} GiB with up to 40,000; at 32,768 it takes {wide} GiB, measured at startup",
    )


def _describe_room(memory: MemoryPlan) -> str:
    if not memory.can_start:
        short = -memory.kv_available.mid / GIB
        return (
            f"does not start, {format_number(short, 2)} GiB short"
            if short > 0
            else "does not start"
        )
    return f"starts, with a pool of {format_number(memory.pool.reported_tokens)} tokens"


@_declare_judge
def judge_fits(stated: Stated, version: str | None) -> Judgement:
    """Judge whether a model starts on some GPUs."""
    form = _read_format(stated)
    model, ranks = find_guide_model(str(stated["model"])), _read_ranks(stated)
    card = {24: "RTX-4090", 48: "L40S", 80: "H100", 141: "H200"}
    gpu = str(stated["gpu"]) if "gpu" in stated else card.get(int(stated["card_gb"]), "")
    if not gpu:
        raise PlannerError(f"a card of {stated['card_gb']:g} GB: which one is not said")
    memory = plan_memory(_deploy(model, gpu, ranks, version, quantization=form, max_model_len=4096))
    finding = f"{model} in {_name_format(memory.deployment, stated)} on {ranks} x {gpu}: {_describe_room(memory)}"
    if not memory.can_start:
        tight = plan_memory(
            memory.deployment.with_args(gpu_memory_utilization=0.95, max_num_seqs=256)
        )
        finding += (
            f" with default arguments; at 0.95 with max_num_seqs 256 it {_describe_room(tight)}"
        )
        if tight.can_start and "negated" not in stated:
            return Judgement("risky", finding)
    claimed = "negated" not in stated
    return Judgement("right" if memory.can_start == claimed else "wrong", finding)


@_declare_judge
def judge_model_len_percentile(stated: Stated, version: str | None) -> Judgement:
    """Judge max_model_len at a percentile of the requests' lengths."""
    chat, quantile = _build_chat(), float(stated["percentile"]) / 100
    limit = int(chat.compute_total_tokens_quantile(quantile))
    pools = [
        get_memory_plan(_deploy(LLAMA_8B, "H100", 1, version, max_model_len=tokens)).pool
        for tokens in (limit, MAX_MODEL_LEN_TOKENS)
    ]
    gain = (pools[0].reported_tokens / pools[1].reported_tokens - 1) * 100
    refused = compute_rejected_fraction(chat, limit) * 100
    cut = (1 - quantile) * 100 - refused
    return Judgement(
        "wrong" if gain < 100 * SIZE_TOLERANCE else "right",
        f"chats of 1,000 + 300 tokens, limit {limit:,}: {format_number(refused, 2)}% are rejected"
        f" and {format_number(max(cut, 0), 2)}% cut short, while the pool changes by"
        f" {abs(gain):.1f}%",
    )


@_declare_judge
def judge_prefix_saves_memory(stated: Stated, version: str | None) -> Judgement:
    """Judge the share of the KV cache that shared prefixes save."""
    prefix, rest, users = 1000, 1300, 64
    memory = get_memory_plan(_deploy(LLAMA_8B, "H100", 1, version))
    count = memory.layout.count_request_blocks
    savings = [
        100 * (users - 1) * count(tokens) / (users * count(tokens + rest))
        for tokens in (0, prefix // 4, prefix, 4 * prefix)
    ]
    low, high = float(stated["low"]), float(stated["high"])
    finding = (
        f"{users} requests of {rest:,} tokens of their own behind the same 0, 250, 1,000 or 4,000"
        f" tokens save {', '.join(f'{saved:.0f}' for saved in savings)}% of the KV cache"
    )
    return Judgement("wrong" if savings[0] < low or savings[-1] > high else "right", finding)


@_declare_judge
def judge_block_size(stated: Stated, version: str | None) -> Judgement:
    """Judge the gain of larger KV blocks."""
    held = {
        size: get_memory_plan(_deploy(LLAMA_8B, "H100", 1, version, block_size=size))
        for size in (16, 32, 128)
    }
    counts = {
        size: [memory.pool.count_sequences(tokens) for tokens in (130, 1300)]
        for size, memory in held.items()
    }
    listed = "; ".join(f"{size}: {short:,} and {chat:,}" for size, (short, chat) in counts.items())
    gained = any(large > small * 1.05 for large, small in zip(counts[128], counts[16], strict=True))
    return Judgement(
        "right" if gained else "wrong",
        f"requests of 130 and 1,300 tokens that fit on an H100, by block size: {listed}",
    )


# Batches


@_declare_judge
def judge_starting_sequences(stated: Stated, version: str | None) -> Judgement:
    """Judge a starting value of max_num_seqs for a model on some GPUs."""
    model, gpu, ranks = _read_placement(stated)
    memory = get_memory_plan(
        _deploy(
            model, gpu, ranks, version, max_model_len=4096, max_num_seqs=int(stated["sequences"])
        )
    )
    name = f"{model} on {ranks} x {gpu}"
    if not memory.can_start:
        return Judgement("wrong", f"{name}: {_describe_room(memory)}")
    value, carried = float(stated["sequences"]), find_safe_max_num_seqs(memory, _build_chat())
    finding = (
        f"{name}: memory carries {format_count(carried, 'chat')} of 1,000 + 300 tokens; {value:,.0f} need requests"
        f" of at most {memory.pool.reported_tokens / value:,.0f} tokens"
    )
    if value > carried * (1 + SIZE_TOLERANCE):
        return Judgement("wrong", f"{finding}; the claim is {_describe_error(value, 0, carried)}")
    return Judgement("right", finding)


@_declare_judge
def judge_concurrency(stated: Stated, version: str | None) -> Judgement:
    """Judge how many requests of a length fit at once."""
    model, gpu, ranks = _read_placement(stated)
    tokens = int(float(stated["tokens"]) * (1024 if stated.get("kilo") else 1))
    memory = get_memory_plan(
        _deploy(
            model,
            gpu,
            ranks,
            version,
            max_model_len=max(tokens, 2048),
            quantization=_read_format(stated),
            kv_cache_dtype=_read_kv_dtype(stated),
        )
    )
    name = f"{model} on {ranks} x {gpu}"
    if not memory.can_start:
        return Judgement("wrong", f"{name}: {_describe_room(memory)}")
    held, value = memory.pool.count_sequences(tokens), float(stated["sequences"])
    finding = (
        f"{name}: the KV cache holds {format_count(held, 'request')} of {tokens:,} tokens at once"
    )
    if value > held * 1.1:
        return Judgement("wrong", f"{finding}; the claim is {_describe_error(value, 0, held)}")
    return Judgement("right", finding)


@_declare_judge
def judge_prefix_threshold(stated: Stated, version: str | None) -> Judgement:
    """Judge the reuse from which prefix caching pays."""
    deployment = _deploy(LLAMA_8B, "L4", 1, version)
    reuse = (0.0, 0.05, float(stated["percent"]) / 100)
    plain, little, much = (
        _compute_saturated_tps(deployment, _build_chat(rate=1, prefix_hit_rate=share)) or math.nan
        for share in reuse
    )
    pays = little / plain - 1 > PREFIX_CACHE_OVERHEAD_FRACTION
    return Judgement(
        "wrong" if pays and float(stated["percent"]) > 10 else "right",
        f"Llama-3.1-8B on an L4: {100 * (little / plain - 1):.1f}% more throughput at 5% reuse,"
        f" {100 * (much / plain - 1):.0f}% at {stated['percent']:g}%",
    )


@_declare_judge
def judge_prefix_ttft(stated: Stated, version: str | None) -> Judgement:
    """Judge how much of a prompt's time a hit saves."""
    by_share = {
        share: [
            100 * (1 - _compute_prefill_s(deployment, tokens - cached, cached) / whole)
            for deployment in _deploy_cases(version)
            for tokens in (1000, 4000)
            for cached, whole in [(int(tokens * share), _compute_prefill_s(deployment, tokens))]
        ]
        for share in (0.3, 0.8, 0.95)
    }
    finding = "prompts of 1,000 and 4,000 tokens: " + ", ".join(
        f"{_format_span(values, '%')} less at {share:.0%} found"
        for share, values in by_share.items()
    )
    low = float(stated["low"])
    every = min(map(min, by_share.values())) >= low
    return Judgement("right" if every else "wrong", finding)


@_declare_judge
def judge_chunking_off(stated: Stated, version: str | None) -> Judgement:
    """Judge chunked prefill switched off for short prompts."""
    on, off = (
        get_memory_plan(
            _deploy(LLAMA_8B, "L4", 1, version, max_model_len=16384, enable_chunked_prefill=chunked)
        )
        for chunked in (True, False)
    )
    lost = 100 * (1 - off.pool.reported_tokens / on.pool.reported_tokens)
    return Judgement(
        "wrong" if lost >= 0 else "right",
        "a prompt shorter than max_num_batched_tokens"
        f" ({on.deployment.args.max_num_batched_tokens:,}) is one step either way; without chunking"
        f" that has to be {off.deployment.args.max_num_batched_tokens:,}, which takes"
        f" {lost:.0f}% of an 8B's KV cache on an L4",
    )


@_declare_judge
def judge_preemption_alert(stated: Stated, version: str | None) -> Judgement:
    """Judge an alert at a fixed share of preempted requests."""
    deployment, percent = _deploy(LLAMA_8B, "L4", 1, version), float(stated["percent"])
    memory, chat = get_memory_plan(deployment), _build_chat()
    safe, tight = (find_safe_max_num_seqs(memory, chat, risk) for risk in (percent / 100, 0.2))
    again = _compute_prefill_s(deployment, 1150)
    busy = _compute_prefill_s(deployment, 1000) + 300 * _compute_decode_s(deployment, safe) / safe
    return Judgement(
        "not checkable",
        f"what is too many depends on the plan: for an 8B on an L4, {percent:g}% recomputed once cost"
        f" {format_number(percent * again / busy, 2)}% of the GPU's time, and {safe} and {tight} slots"
        f" preempt at {percent:g}% and 20% of moments",
    )


# Speed


@_declare_judge
def judge_utilization_gain(stated: Stated, version: str | None) -> Judgement:
    """Judge the throughput that a larger gpu_memory_utilization brings."""
    low, high = sorted(float(stated[name]) for name in ("low", "high"))
    gain = float(stated["gain"])
    chat, gains = _build_chat(), []
    for case in CASES:
        tps = []
        for share in (low, high):
            deployment = _deploy(*case, version, gpu_memory_utilization=share)
            carried = find_safe_max_num_seqs(get_memory_plan(deployment), chat)
            slots = max(1, min(carried, deployment.args.max_num_seqs))
            tps.append(
                _compute_saturated_tps(deployment.with_args(max_num_seqs=slots), chat) or math.nan
            )
        gains.append((tps[1] / tps[0] - 1) * 100)
    finding = f"from {low:g} to {high:g}: " + ", ".join(
        f"{value:+.0f}% for {model.split('-')[-1]} on {count} x {gpu}"
        for value, (model, gpu, count) in zip(gains, CASES, strict=True)
    )
    near = all(abs(value - gain) <= SPEED_TOLERANCE * gain for value in gains)
    return Judgement("right" if near else "wrong", finding)


@_declare_judge
def judge_format_speed(stated: Stated, version: str | None) -> Judgement:
    """Judge how many times as fast narrower weights are."""
    form, ratio = FORMATS.get(str(stated["format"]).lower(), "fp8"), float(stated["ratio"])
    wide, narrow = (_deploy(LLAMA_8B, "H100", 1, version, quantization=one) for one in (None, form))
    gains = [
        _compute_decode_s(wide, 1) / _compute_decode_s(narrow, 1),
        _compute_decode_s(wide, 256) / _compute_decode_s(narrow, 256),
        _compute_prefill_s(wide, 8000) / _compute_prefill_s(narrow, 8000),
    ]
    finding = (
        f"Llama-3.1-8B on an H100, {form}: {gains[0]:.1f} times as fast at batch 1, {gains[1]:.1f} at"
        f" batch 256, {gains[2]:.1f} for a prompt of 8,000"
    )
    return Judgement("wrong" if min(gains) < ratio * 0.8 else "right", finding)


@_declare_judge
def judge_tp_linear(stated: Stated, version: str | None) -> Judgement:
    """Judge whether speed grows in proportion to the ranks of tensor parallelism."""
    speedups = {}
    for gpu in ("H100", "L40S"):
        one, eight = (_deploy(LLAMA_8B, gpu, tp, version) for tp in (1, 8))
        speedups[gpu] = (
            _compute_decode_s(one, 64) / _compute_decode_s(eight, 64),
            _compute_prefill_s(one, 8000) / _compute_prefill_s(eight, 8000),
        )
    finding = "an 8B on eight GPUs instead of one: " + "; ".join(
        f"{gpu} {decode:.1f} times in decode, {prefill:.1f} in prefill"
        for gpu, (decode, prefill) in speedups.items()
    )
    least = min(min(pair) for pair in speedups.values())
    return Judgement("wrong" if least < 8 * (1 - SPEED_TOLERANCE) else "right", finding)


@_declare_judge
def judge_tp_microseconds(stated: Stated, version: str | None) -> Judgement:
    """Judge a fixed time per layer for tensor parallelism."""
    times = []
    for gpu in ("H100", "L40S"):
        for tp in (2, 8):
            deployment = _deploy(LLAMA_70B, gpu, tp, version, quantization="fp8")
            cost = build_step_model(deployment).estimate_step([], [CONTEXT_TOKENS] * 64)
            num_layers = len(deployment.model.architecture.layers)
            times.append(cost.seconds_by_part["collectives"] / num_layers * 1e6)
    return Judgement(
        "not checkable",
        f"64 sequences of a 70B: {_format_span(times)} µs per layer, by link and number of GPUs",
    )


@_declare_judge
def judge_pipeline_bubble(stated: Stated, version: str | None) -> Judgement:
    """Judge the idle share of a pipeline by the number of its stages."""
    stages, equal = 4, Workload(
        LengthDistribution.from_constant(1000), LengthDistribution.from_constant(300), rate=1
    )  # fmt: skip
    layouts = [
        deploy_on(
            LLAMA_70B, "H200", tp=tp, pp=stages // tp, engine_version=version, max_num_seqs=512,
            max_model_len=MAX_MODEL_LEN_TOKENS,
        )
        for tp in (stages, 1)
    ]  # fmt: skip
    alone, many = (
        [replace(equal, rate=None, concurrency=flight) for _ in layouts] for flight in (1, 256)
    )
    tps = [
        found.performance.output_tps.mid if found.performance else math.nan
        for found in evaluate_batch(zip(layouts * 2, alone + many, strict=True))
    ]
    shares = [tps[1] / tps[0], tps[3] / tps[2]]
    return Judgement(
        "wrong" if shares[1] > 1.5 / stages else "right",
        f"a 70B on four H200: four stages do {shares[0]:.0%} of TP4's work for one request, and"
        f" {shares[1]:.0%} with 256 in flight; (p - 1)/p would leave {1 / stages:.0%}",
    )


@_declare_judge
def judge_speculation_threshold(stated: Stated, version: str | None) -> Judgement:
    """Judge the acceptance rate from which speculation pays."""
    drafting = _deploy(
        LLAMA_8B, "H100", 1, version, speculation=SpeculationConfig("eagle3", 2), max_num_seqs=512
    )
    needed = [find_break_even_acceptance(drafting, batch, CONTEXT_TOKENS) for batch in (1, 512)]
    shown = " and ".join("none" if one is None else f"{one:.0%}" for one in needed)
    limit = float(stated["percent"]) / 100
    near = all(one is not None and abs(one - limit) <= 0.1 for one in needed)
    return Judgement(
        "right" if near else "wrong",
        f"EAGLE-3 with two drafts on an 8B, H100: breaks even at {shown} for batches of 1 and 512",
    )


@_declare_judge
def judge_fp8_kv_emulated(stated: Stated, version: str | None) -> Judgement:
    """Judge whether an FP8 KV cache gains nothing on GPUs without FP8 arithmetic."""
    parts, gains = [], []
    for gpu in ("A100", "L40S", "H100"):
        wide, narrow = (
            _deploy(LLAMA_8B, gpu, 1, version, kv_cache_dtype=one) for one in ("auto", "fp8")
        )
        pools = [get_memory_plan(one).pool.reported_tokens for one in (wide, narrow)]
        speed = _compute_decode_s(wide, 64, 8000) / _compute_decode_s(narrow, 64, 8000)
        gains.append(speed)
        native = "with" if "fp8" in get_gpu(gpu).peak_flops else "without"
        parts.append(
            f"{gpu} ({native} FP8 arithmetic) {pools[1] / pools[0]:.1f} times the tokens,"
            f" {speed:.1f} times the pace"
        )
    finding = f"64 sequences of 8,000 tokens of an 8B: {'; '.join(parts)}. Quality is not computed"
    return Judgement("wrong" if min(gains) > 1.05 else "right", finding)


@_declare_judge
def judge_sglang_gain(stated: Stated, version: str | None) -> Judgement:
    """Judge how much faster SGLang serves agents than vLLM."""
    low, high = float(stated["low"]), float(stated["high"])
    gains = []
    for model, gpu in ((LLAMA_8B, "H100"), ("Qwen/Qwen3-32B", "H100"), (LLAMA_8B, "A100")):
        load = Workload(
            LengthDistribution.from_constant(8000), LengthDistribution.from_constant(200),
            concurrency=32, prefix_hit_rate=0.95,
        )  # fmt: skip
        found = [
            evaluate(
                deploy_on(model, gpu, engine=engine, engine_version=one, max_model_len=16384), load
            ).performance
            for engine, one in (("vllm", version), ("sglang", None))
        ]
        if found[0] and found[1]:
            gains.append((found[1].output_tps.mid / found[0].output_tps.mid - 1) * 100)
            sigma = found[0].output_tps
    finding = (
        f"prompts of 8,000 tokens, 95% found: {_format_span(gains)}% more, by model and GPU; one"
        f" prediction's interval spans {sigma.lo / sigma.mid - 1:+.0%} to {sigma.hi / sigma.mid - 1:+.0%}"
    )
    beyond = low > max(gains) + 50 or high < min(gains) - 50
    return Judgement("wrong" if beyond else "not checkable", finding)


@_declare_judge
def judge_defaults(stated: Stated, version: str | None) -> Judgement:
    """Judge the share of the possible throughput that an engine's defaults give."""
    shares = {}
    for name in list_scenarios():
        scenario = load_scenario(name)
        gpu, tuned, default = scenario.gpus[-1].gpu, [], None
        longest = load_model(scenario.model).architecture.max_position
        model_len = choose_max_model_len(scenario.workload, scenario.context_buffer, longest)
        for tp in (1, 2, 4, 8):
            plain = deploy_on(
                scenario.model, gpu, tp=tp, engine_version=version, max_model_len=model_len
            )
            if get_memory_plan(plain).can_start:
                default = _compute_saturated_tps(plain, scenario.workload)
                break
        for share in (None, 0.95):
            for slots in (64, 256, 1024):
                for tokens in (8192, 16384):
                    knobs = {"max_num_seqs": slots, "max_num_batched_tokens": tokens}
                    tuned.append(
                        plain.with_args(
                            **knobs, **({"gpu_memory_utilization": share} if share else {})
                        )
                    )
        best = max(
            (_compute_saturated_tps(one, scenario.workload) or 0 for one in tuned), default=0
        )
        if default and best:
            shares[name] = 100 * default / max(best, default)
    stated_share = float(stated["low"])
    finding = (
        "same GPUs and formats, no limit of latency: of the best setting the defaults give "
        + ", ".join(f"{share:.0f}% ({name})" for name, share in shares.items())
    )
    near = all(abs(share - stated_share) <= 15 for share in shares.values())
    return Judgement("right" if near else "wrong", finding)


# Operation


def _list_defaults(option: str) -> dict[str, set[str]]:
    """List the defaults of an option by version of vLLM, over all GPUs; empty if not recorded."""

    def read(facts: EngineFacts) -> set[Any]:
        values: dict[str, set[Any]] = {
            "gpu_memory_utilization": {facts.gpu_memory_utilization},
            "max_num_seqs": {tier.max_num_seqs for tier in facts.limits},
            "max_num_batched_tokens": {tier.max_num_batched_tokens for tier in facts.limits},
            "block_size": {facts.block_size},
            "enable_prefix_caching": {facts.prefix_caching},
            "enable_chunked_prefill": {facts.chunked_prefill},
        }
        return values.get(option, set())

    return {
        str(version): {
            _normalize_default(value) for value in read(get_engine("vllm", version).facts)
        }
        for version in load_flag_lists("vllm").versions
    }


def _normalize_default(value: object) -> str:
    text = str(value).lower().replace(",", "")
    text = {"enabled": "true", "on": "true", "disabled": "false", "off": "false"}.get(text, text)
    return f"{float(text):g}" if re.fullmatch(r"\d+(\.\d+)?", text) else text


@_declare_judge
def judge_option_default(stated: Stated, version: str | None) -> Judgement:
    """Judge the default of an option, by version."""
    option = str(stated["option"]).lstrip("-").replace("-", "_").lower()
    value, defaults = _normalize_default(stated["value"]), _list_defaults(option)
    if not any(defaults.values()):
        raise PlannerError(f"the defaults of {option} are not recorded")
    versions, listed = list(defaults), load_flag_lists("vllm").versions
    asked = listed[-1] if version is None else parse_engine_version("vllm", version)
    current = str(max((one for one in listed if one <= asked), default=listed[0]))
    now = " or ".join(sorted(defaults[current]))
    if value in defaults[current]:
        return Judgement("right", f"{option} at vLLM {current}: {now}")
    had = [one for one in versions[: versions.index(current)] if value in defaults[one]]
    if had:
        since = versions[versions.index(had[-1]) + 1]
        return Judgement(
            "outdated",
            f"{option} is {now} at vLLM {current}; {value} until {had[-1]}, changed by {since}",
        )
    return Judgement(
        "wrong", f"{option} is {now} at vLLM {current}, and was {value} in no recorded version"
    )


@_declare_judge
def judge_flashinfer_prefix(stated: Stated, version: str | None) -> Judgement:
    """Judge the variable by which FlashInfer is chosen for prefix caching."""
    had = load_recorded_names("environment", "vllm")["VLLM_ATTENTION_BACKEND"]
    listed = load_flag_lists("vllm").versions
    later = [one for one in listed if one > had[-1]]
    flagged = list_versions_with_spelling("vllm", "--attention-backend")
    default_on = next(one for one in listed if get_engine("vllm", one).facts.prefix_caching)
    finding = (
        f"prefix caching is on by default, whatever the backend, from {default_on} on; the variable is"
        f" gone since {later[0]}, and --attention-backend is there from {flagged[0]} on"
    )
    asked = listed[-1] if version is None else get_engine("vllm", version).release
    return Judgement("outdated" if asked >= default_on else "right", finding)


@_declare_judge
def judge_warm_up(stated: Stated, version: str | None) -> Judgement:
    """Judge whether a p99 wants a warm-up."""
    users, requests = 64, 1000
    ratios = [
        _compute_prefill_s(deployment, 1000) * users / _compute_decode_s(deployment, users)
        for deployment in _deploy_cases(version)
    ]
    return Judgement(
        "right",
        f"the first wave of {users} users is {users / requests:.1%} of {requests:,} requests, more than"
        f" a p99 leaves out, and its last prompt waits as long as {_format_span(ratios)} decode steps",
    )


@_declare_judge
def judge_topology(stated: Stated, version: str | None) -> Judgement:
    """Judge whether the link between GPUs is worth a look before tensor parallelism."""
    wired, plugged = (
        _deploy(LLAMA_70B, "H100", 8, version, quantization="fp8", interconnect=link)
        for link in (None, "pcie5")
    )
    slower = [
        _compute_decode_s(plugged, 64) / _compute_decode_s(wired, 64),
        _compute_prefill_s(plugged, 8000) / _compute_prefill_s(wired, 8000),
    ]
    return Judgement(
        "right" if min(slower) > 1.1 else "wrong",
        f"a 70B on eight H100 over PCIe 5 instead of NVLink: a decode step takes {slower[0]:.1f} times"
        f" as long, a prompt {slower[1]:.1f} times",
    )


@_declare_judge
def judge_gpu_busy(stated: Stated, version: str | None) -> Judgement:
    """Judge whether a busy GPU is a full one."""
    deployment = _deploy(LLAMA_8B, "H100", 1, version)
    rates = [batch / _compute_decode_s(deployment, batch) for batch in (1, 64)]
    return Judgement(
        "wrong" if rates[1] > 2 * rates[0] else "right",
        "a GPU that runs one sequence is as busy as one that runs 64, which gives"
        f" {rates[1] / rates[0]:.0f} times the tokens (8B, H100)",
    )


@_declare_judge
def judge_bandwidth(stated: Stated, version: str | None) -> Judgement:
    """Judge the memory bandwidth of a GPU."""
    gpu, value = get_gpu(str(stated["gpu"])), float(stated["tbs"]) * 1e12
    family = gpu.name.split("-")[0]
    speeds = [
        one.memory_bandwidth
        for one in list_gpus()
        if one.name.split("-")[0] == family and not one.slice_of
    ]
    if re.search(r"SXM|PCIe|NVL", str(stated["gpu"]), re.IGNORECASE):
        family, speeds = gpu.name, [gpu.memory_bandwidth]
    finding = f"{family}: {_format_span(one / 1e12 for one in speeds)} TB/s"
    return _judge_number(value, min(speeds), max(speeds), finding, SIZE_TOLERANCE)
