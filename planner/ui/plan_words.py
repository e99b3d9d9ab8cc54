"""Words for a deployment and its price, the same on every screen and page."""

from planner.core.number_format import (
    format_limit_seconds,
    format_number,
    format_probability,
    format_usd,
)
from planner.core.text import format_count
from planner.hardware.prices import HOURS_PER_MONTH, GpuPrice
from planner.planning.candidate import Candidate, describe_formats
from planner.planning.evaluation import estimate_run_hours
from planner.planning.framework_choice import load_frameworks
from planner.planning.scenario import Scenario
from planner.planning.search import Plan

_NAMES = {
    "bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "fp8_block": "FP8", "fp8_channel": "FP8",
    "fp8_e4m3": "FP8 E4M3", "fp8_e5m2": "FP8 E5M2", "eagle3": "EAGLE-3", "ngram": "n-gram", "medusa": "Medusa",
    "dflash": "DFlash", "suffix": "suffix", "mlp_speculator": "MLP speculator", "draft_model": "draft-model",
}  # fmt: skip
"""Formats and methods of speculation as people write them; of the others in capitals."""


def describe_candidate(candidate: Candidate) -> str:
    """Describe a candidate: GPUs, layout and formats, as their makers write them."""
    deployment = candidate.deployment
    head = candidate.description.removesuffix(f", {describe_formats(deployment)}")
    method = deployment.model.quantization.method
    weights = deployment.model.dtype if method == "none" else method
    parts = [f"{_get_written_name(weights)} weights"]
    if deployment.args.kv_cache_dtype not in (None, "auto"):
        parts += [f"{_get_written_name(deployment.args.kv_cache_dtype)} KV cache"]
    if deployment.speculation:
        parts += [f"{_get_written_name(deployment.speculation.method)} drafts"]
    return ", ".join([head, *parts])


def _get_written_name(name: str) -> str:
    return _NAMES.get(name, name.upper() if name.isalnum() else name)


def describe_engine(candidate: Candidate) -> str:
    """Name the engine and its version: "vLLM 0.20.2"."""
    engine = candidate.deployment.engine
    return f"{load_frameworks()[engine.name].title} {engine.version}"


def describe_adapters(scenario: Scenario, candidate: Candidate) -> str:
    """Describe the LoRA adapters: their slots on a GPU, and what each costs; empty without any."""
    adapters, args = scenario.workload.adapters, candidate.deployment.args
    if not adapters:
        return ""
    slots = f"{args.max_loras:,} slot{'s' * (args.max_loras > 1)} per GPU"
    text = f"{adapters:,} LoRA adapters, {slots} (max_loras), rank up to {args.max_lora_rank}"
    usd = compute_bill(scenario, candidate)
    period = " for the job" if scenario.offline else "/month"
    return f"{text}; {format_usd(usd / adapters)}{period} of the bill for each" if usd else text


def explain_not_allowed(scenario: Scenario, candidate: Candidate) -> str:
    """Explain why the scenario does not allow a candidate's GPUs; empty if it does."""
    gpu, num_gpus = candidate.deployment.gpu, sum(p.num_gpus for p in candidate.prediction.pools)
    most = {each.gpu: each.max_gpus for each in scenario.gpus}
    if gpu not in most:
        return "not on your list"
    return f"more than the {most[gpu]:,} on your list" if num_gpus > most[gpu] else ""


def is_same_price(usd: float, base: float) -> bool:
    """Whether two prices are the same to half a percent."""
    return abs(usd / base - 1) < 0.005


def find_cheaper_gamble(plan: Plan) -> Candidate | None:
    """Return the gamble if it costs less than the plan: a job on fewer GPUs may take as much longer."""
    gamble, chosen = plan.gamble, plan.chosen
    if gamble is None or chosen is None or gamble.price_key >= chosen.price_key:
        return None
    usd, base = (compute_bill(plan.scenario, each) for each in (gamble, chosen))
    return None if usd and base and is_same_price(usd, base) else gamble


def compute_bill(scenario: Scenario, candidate: Candidate) -> float | None:
    """Compute the USD of a month, or of all the work if that ends; None without a price."""
    usd, hours = candidate.usd_per_hour, estimate_run_hours(scenario, candidate)
    return None if usd is None else usd * (hours.mid if hours else HOURS_PER_MONTH)


def describe_found_figure(scenario: Scenario) -> str:
    """Describe the largest load or the shortest limit that was found; empty if none was asked for."""
    load, kind = scenario.workload, scenario.found_figure
    if kind == "limit":
        target = scenario.slo_targets[0]
        return f"{target.name} of {format_limit_seconds(target.seconds)}"
    if kind == "rate":
        return f"{format_number(load.rate or 0.0)} requests/s"
    return format_count(load.concurrency or 0, "concurrent request") if kind else ""


def format_odds(candidate: Candidate) -> str:
    """Format the probability that a candidate meets every target, apart from what is asked for."""
    return format_probability(candidate.probability, candidate.confidence)


def describe_gpu_price(price: GpuPrice) -> str:
    """Describe the price of a GPU-hour and its quotes."""
    text = f"{format_usd(price.median_usd)} per GPU-hour"
    if price.is_user_given:
        return f"{text}, set in the scenario"
    text += f" {price.tier.replace('_', ' ')}"
    if len(price.quotes) == 1:
        return f"{text} ({price.source}, {price.date})"
    first, *_, last = sorted(price.quotes, key=lambda quote: quote.usd)
    ends = f"${first.usd:.2f} {first.seller} to ${last.usd:.2f} {last.seller}"
    return f"{text}, median of {len(price.quotes)} quotes ({ends}, {price.date})"
