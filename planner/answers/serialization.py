"""plan.json: the answer, serialized; times in ms, figures as [expected, low, high] of 80%.

What scripts read stands at the top; everything beside it is in a section of its subject.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from planner.answers import words
from planner.answers.answer import Answer, Fields, Offer, build_answer
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS, Performance
from planner.memory.memory_plan import measure_model
from planner.models.registry import load_model
from planner.planning.billing import measure_budget
from planner.planning.plan import Plan


def to_json(value: Any) -> Any:
    """Convert plain values, intervals and dataclasses; what is not finite is null."""
    if isinstance(value, Interval):
        return to_json(value.as_json_list)
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(vars(value))
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in_ms(seconds: Mapping[str, Interval]) -> Fields:
    return {name: value * 1e3 for name, value in seconds.items()}


def serialize_answer(answer: Answer) -> Fields:
    """Return the content of `plan.json`; what is not known is null.

    If nothing meets the targets, the figures are those of the closest deployment.
    """
    best, scenario, first = answer.best, answer.scenario, answer.measure_first
    commands = {each.role: each.command for each in answer.chosen.launches} if answer.chosen else {}
    kind, even = scenario.found_figure, answer.even_odds
    load = scenario.workload
    fields = {
        "scenario": scenario.name,
        "verdict": answer.verdict,
        "probability": round(answer.probability, 4),
        "confidence_asked": scenario.confidence,
        "options": [
            {"name": name, **_describe_option(each)} for name, each in answer.named_options.items()
        ],
        "reasons": answer.reasons,
        "model": scenario.model,
        **(_describe_offer(best) if best else {}),
        "binding": {
            "constraint": answer.binding_constraint.constraint,
            "sentence": answer.binding_constraint.sentence,
        },
        "runner_up": answer.runner_up
        and {"model": scenario.model, **_describe_offer(answer.runner_up)},
        "by_gpu": [
            {"gpu": each.gpu.name}
            | (_describe_option(answer.offer(each.candidate)) if each.candidate else {})
            | ({"why_not": each.reason} if each.reason else {})
            for each in answer.by_gpu
        ],
        "measure_first": first
        and {
            **_describe_option(first),
            "saves_usd_per_month": answer.saved_usd,
            "benchmark_usd": first.replica_usd_per_day,
            "files": answer.measure_files,
        },
        "rejected": Counter(each.bottleneck for each in answer.rejected),
        "max_load": {kind: getattr(load, kind), "even_odds": even and even.load}
        if answer.chosen and kind in ("rate", "concurrency")
        else None,
        "command": next(iter(commands.values())) if len(commands) == 1 else None,
        "commands": commands if len(commands) > 1 else None,
        "files": [*answer.files, *answer.measure_files],
        "question": scenario.fields,
        "traffic": _describe_traffic(answer),
        "instead": _describe_others(answer),
        "basis": {
            "risks": {kind: words.describe_risk(answer, kind) for kind in answer.risks},
            "assumptions": scenario.assumptions,
            "notes": [
                *answer.notes,
                *filter(None, [words.explain_stages(answer), words.explain_local_model(best)]),
                *answer.left_out,
            ],
        },
    }
    return dict(to_json(fields))


def _describe_traffic(answer: Answer) -> Fields:
    """Describe what holds at more traffic, and over the hours of a day."""
    scaling, billing = answer.autoscaling, answer.billing
    even, growth = answer.even_odds, answer.growth
    is_limit = answer.chosen and answer.scenario.found_figure == "limit"
    return {
        "even_odds": even
        and {
            "load": even.load,
            "probability": round(even.probability, 4),
            "unlimited_ms": _in_ms(even.unlimited),
            "unlimited_here_ms": _in_ms(even.unlimited_here),
        },
        "growth": growth and {"requests_per_s": growth.confident_rps, "growth": growth.growth},
        "drafts_pay_up_to": answer.draft_loads,
        "sized_hour": answer.scenario.sized_hour,
        "shortest_limit_ms": answer.scenario.slo_targets[0].seconds * 1e3 if is_limit else None,
        "day": scaling
        and billing
        and {
            "rps": scaling.rates,
            "replicas": scaling.replicas,
            "hours_missed": scaling.violated_hours,
            "gpu_hours": scaling.gpu_hours,
            "gpu_hours_fixed": scaling.fixed_gpu_hours,
            "threshold": scaling.scale_up_in_flight,
            "lead_s": scaling.lead_s,
            "stabilization_s": scaling.stabilization_s,
            "drain_s": scaling.drain_s,
            "starts": scaling.num_starts,
            "usd_per_day": billing.usd,
        },
    }


def _describe_others(answer: Answer) -> Fields:
    """Describe what else there is, inside and outside of the scenario, and an API."""
    api, ways, formats = answer.api_comparison, answer.ways_out, [True, False]
    return {
        **{
            name: [
                {**_describe_option(each.offer), "quality": each.quality, "source": each.source}
                for each in answer.unlisted
                if each.is_format == is_format
            ]
            for name, is_format in zip(("formats", "gpus"), formats, strict=True)
        },
        "ways_out": ways and ways.relaxations,
        "what_if": [
            {"change": change, **(_describe_option(offer) if offer else {})}
            for change, offer in answer.changed_offers
        ],
        "api": api
        and {
            "cheaper": api.is_api_cheaper,
            "usd": api.api_usd,
            "usd_per_mtok_output": api.api_usd_per_mtok_output,
            "usd_of_gpus": api.own_usd,
            "gpus_cheaper_from_rps": api.break_even_rps,
        },
    }


def _describe_option(offer: Offer) -> Fields:
    """Describe what an option is, what it costs, and how likely it meets every target."""
    return {
        "deployment": offer.description,
        "gpu": offer.gpu,
        "gpus_rented": offer.num_gpus_billed,
        "layout": vars(offer.deployment.layout),
        "engine_args": list_args(offer.deployment),
        "usd_per_hour": offer.prediction.usd_per_hour_interval,
        "bills": offer.bills,
        "probability": round(offer.probability, 4),
        "commands": [launch.command for launch in offer.launches],
    }


def list_args(deployment: Deployment) -> Fields:
    """List engine arguments by name, and the options that are passed on beside them."""
    planned = {name: value for name, value in vars(deployment.args).items() if value is not None}
    return planned | dict(planned.pop("options"))


def _describe_offer(offer: Offer) -> Fields:
    """Describe a deployment with its prediction."""
    deployment, prediction, scenario = offer.deployment, offer.prediction, offer.scenario
    drafts, price, performance = deployment.speculation, offer.price, offer.performance
    usd_per_mtok, side = offer.token_price or (None, "output")
    fields = {
        "checkpoint": deployment.model.name,
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto",
        "engine": deployment.engine.name,
        "engine_version": deployment.engine.version,
        "gpu": offer.gpu,
        "gpus": offer.num_gpus,
        "gpus_rented": offer.num_gpus_billed,
        "spare_replicas": deployment.spare_replicas,
        "layout": vars(deployment.layout),
        "pools": _describe_pools(offer),
        "engine_args": list_args(deployment),
        "speculation": drafts
        and {
            "method": drafts.method,
            "num_speculative_tokens": drafts.num_speculative_tokens,
            "acceptance_rate": drafts.acceptance_rate,
            "draft_model": drafts.draft and drafts.draft.name,
            "head": drafts.head,
        },
        "usd_per_hour": offer.prediction.usd_per_hour_interval,
        "price_source": price and str(price),
        "usd_per_mtok_output": usd_per_mtok if side == "output" else None,
        "power_w": prediction.total_power_w,
        "limits": [
            {
                "name": row.name,
                "unit": row.unit,
                "limit": row.limit,
                "expected": row.value,
                "pessimistic": row.pessimistic,
                "share": row.use,
                "status": row.status,
                "probability": row.probability,
            }
            for row in offer.limit_rows
        ],
        "memory_slack_gib": prediction.memory.slack_bytes / GIB,
        "cost": {
            "bills": offer.bills,
            "usd_per_month": None if scenario.offline else prediction.usd_per_month,
            "usd_per_user": offer.usd_per_user,
            "usd_per_mtok_prompt": usd_per_mtok if side == "prompt" else None,
            "price_tier": price and ("own" if price.is_user_given else price.tier),
            "machines": Counter(f"{size} GPUs" for size in offer.machine_sizes),
            "budget": measure_budget(scenario, offer),
            "joules_per_output_token": prediction.joules_per_output_token,
        },
        "memory": {
            "p_fits": round(offer.p_memory, 4),
            "bytes_per_gpu": prediction.memory.bytes_by_part,
            "model": measure_model(load_model(scenario.model), deployment),
            "adapter_slots": offer.adapter_slots,
            "start_up_s": offer.startup and offer.startup.total,
        },
    }
    return fields | (
        _describe_performance(offer, performance) if performance else {"predicted": None}
    )


def _describe_performance(offer: Offer, performance: Performance) -> Fields:
    """Describe what a deployment does under the load, and what it takes of the limits."""
    return {
        "predicted": {
            **{
                f"{metric}_ms": _in_ms({s: performance.get(metric, s) for s in LATENCY_STATISTICS})
                for metric in LATENCY_METRICS
            },
            "output_tps": performance.output_tps,
            "request_tps": performance.request_tps,
            "kv_usage": performance.kv_usage,
            "kv_usage_p99": performance.kv_usage_p99,
            "preemptions_per_request": performance.preemptions,
            "decode_batch_mean": performance.decode_batch,
            "requests_replayed": performance.num_simulated_requests,
            "waits_grow": performance.queue_growth,
            "refused_share": offer.prediction.rejected_fraction,
        },
        "service_level": [
            {
                "metric": target.metric,
                "percentile": target.percentile,
                "limit_ms": target.seconds * 1e3,
                "predicted_ms": value * 1e3,
                "holds": not value.mid > target.seconds,
            }
            for target in offer.scenario.slo_targets
            for value in [performance.get_for_display(target.metric, target.percentile)]
        ],
        "capacity_rps": offer.capacity_rps,
        "planned_rps": offer.offered_rps,
        "headroom": offer.free_capacity,
    }


def _describe_pools(offer: Offer) -> Fields | None:
    """Describe both worker pools and the KV transfer; None if the plan is not disaggregated."""
    if offer.kv_transfer is None:
        return None
    bandwidth, mean_s = offer.kv_transfer
    pools = zip(("prefill", "decode"), offer.prediction.pools, strict=True)
    return {
        **{
            name: {
                "workers": pool.layout.replicas,
                "spare_workers": pool.spare_replicas,
                "gpus": pool.num_gpus,
                "layout": vars(pool.with_replicas(1).layout),
                "engine_args": list_args(pool),
            }
            for name, pool in pools
        },
        "link_gb_per_s": bandwidth / 1e9,
        "kv_transfer_ms_mean": mean_s * 1e3,
    }


def build_plan_json(plan: Plan) -> Fields:
    """Return the content of the plan.json of `plan`."""
    return serialize_answer(build_answer(plan))
