"""plan.json: the answer, serialized; times in ms, figures as [expected, low, high] of 80%."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from planner.answers import words
from planner.answers.answer import FILE_PARTS, Answer, Bill, Limit, Offer
from planner.answers.build import build_answer
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.engines.engine_args import EngineArgs
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS, Performance
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.billing import BillingComparison
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import SloTarget

Fields = dict[str, Any]
"""Values of JSON by field."""


def _serialize_assumed(answer: Answer) -> Fields:
    """Return what holds at more traffic, in formats that are not allowed, on GPUs that are not listed."""
    surge, unlisted = answer.surge, answer.unlisted
    return {
        "more_traffic": surge
        and {
            "more": round(surge.more, 4),
            "probability": round(surge.probability, 4),
            "even_odds_load": surge.even_odds and surge.even_odds.load,
            "probability_there": surge.even_odds and round(surge.even_odds.probability, 4),
            "unlimited_ms": _to_json({k: v * 1e3 for k, v in surge.unlimited.items()}),
            "unlimited_ms_there": surge.even_odds
            and _to_json({k: v * 1e3 for k, v in surge.even_odds.unlimited.items()}),
        },
        "cheaper_formats_not_allowed": None
        if unlisted is None
        else [
            {**_serialize_option(each.offer), "quality": each.quality, "source": each.source}
            for each in unlisted
            if each.is_format
        ],
        "cheaper_gpus_not_listed": None
        if unlisted is None
        else [_serialize_option(each.offer) for each in unlisted if not each.is_format],
        "budget": answer.budget and dict(answer.budget),
        "cheaper_always_on": answer.always_on and _serialize_option(answer.always_on),
    }


def serialize_answer(answer: Answer) -> Fields:
    """Return the content of `plan.json`; what is not known or not computed is null.

    If nothing meets the targets, the figures are those of the closest deployment.
    """
    best, chosen, scenario = answer.best, answer.chosen, answer.scenario
    launches = chosen.launches if chosen else ()
    first = answer.measure_first
    kind, figure = answer.open_figure or ("", 0.0)
    api, growth = answer.api, answer.growth
    return {
        "scenario": scenario.name,
        "verdict": answer.verdict,
        "probability": round(answer.probability, 4),
        "probability_asked": scenario.confidence,
        "options": {name: _serialize_option(each) for name, each in answer.options.items()},
        "reasons": list(answer.reasons),
        **(serialize_offer(scenario, best) if best else {"model": scenario.model}),
        "model_memory": answer.model_memory and _to_json(answer.model_memory),
        "adapter_slots": answer.adapter_slots and _to_json(answer.adapter_slots),
        "binding": {
            "constraint": answer.binding.constraint,
            "sentence": answer.binding.sentence,
        },
        "runner_up": answer.runner_up and serialize_offer(scenario, answer.runner_up),
        **_serialize_assumed(answer),
        "growth": growth
        and {
            "requests_per_s": growth.confident_rps,
            "growth": growth.growth,
            "probability": growth.confidence,
        },
        "by_gpu": {
            each.gpu: (_serialize_option(each.offer) if each.offer else {})
            | {"reason": each.reason}
            for each in answer.by_gpu
        },
        "measure_first": first
        and {
            **_serialize_option(first.offer),
            "saves_usd_per_month": first.saved_usd,
            "benchmark_usd": first.offer.replica_usd_per_day,
            "files": list(first.files),
        },
        "rejected": dict(Counter(rejection.bottleneck for rejection in answer.rejected)),
        "day": answer.day and answer.billing and _serialize_day(answer.day, answer.billing),
        "max_load": {kind: getattr(scenario.workload, kind)}
        if kind in ("rate", "concurrency")
        else None,
        "shortest_limit": {"slo": scenario.slo_targets[0].name, "ms": figure * 1e3}
        if kind == "limit"
        else None,
        "api": api
        and {
            "cheaper": api.is_api_cheaper,
            "usd": api.api_usd,
            "usd_per_mtok_output": api.api_usd_per_mtok_output,
            "usd_of_gpus": api.own_usd,
            "period": "month" if api.is_monthly else "run",
            "gpus_cheaper_from_rps": api.break_even_rps,
        },
        "what_if": None
        if answer.changes is None
        else [
            {"change": each.change, **(_serialize_option(each.offer) if each.offer else {})}
            for each in answer.changes
        ],
        "ways_out": answer.ways_out and _to_json(answer.ways_out.relaxations),
        "replica_loss": answer.replica_loss and _to_json(answer.replica_loss),
        "risks": [{"risk": risk.kind, **_to_json(risk.figures)} for risk in answer.risks],
        "sized_hour": scenario.sized_hour and _to_json(scenario.sized_hour),
        "assumptions": list(scenario.assumptions),
        "notes": [*answer.notes, *filter(None, [words.explain_stages(answer)]), *answer.left_out],
        "command": launches[0].command if len(launches) == 1 else None,
        "commands": {launch.role: launch.command for launch in launches}
        if len(launches) > 1
        else None,
        "question": dict(scenario.fields),
        "files": [*answer.files, *(first.files if first else ())],
    }


def _to_json(value: Any) -> Any:
    """Convert plain values, intervals and dataclasses; what is not finite is null."""
    if isinstance(value, Interval):
        return value.as_json_list
    if is_dataclass(value) and not isinstance(value, type):
        return _to_json(vars(value))
    if isinstance(value, Mapping):
        return {name: _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _serialize_option(offer: Offer) -> Fields:
    """Return what an option is, what it costs, and how likely it meets every target."""
    return {
        "deployment": offer.description,
        "usd_per_hour": offer.median_usd_per_hour,
        "bills": list(map(_serialize_bill, offer.bills)),
        "probability": round(offer.probability, 4),
        "memory": {
            "p_fits": round(offer.p_memory, 4),
            "slack_gib": offer.memory.slack_bytes / GIB,
        },
        "nearest_measured_run": words.describe_nearest_run(offer),
        "commands": [launch.command for launch in offer.launches],
    }


def _serialize_bill(bill: Bill) -> Fields:
    return {"basis": bill.basis, "usd": bill.usd, "usd_per_mtok": bill.usd_per_mtok}


def serialize_engine_args(args: EngineArgs) -> Fields:
    """Return engine arguments by name, and the options that are passed on beside them."""
    planned = {name: value for name, value in vars(args).items() if value is not None}
    return planned | dict(planned.pop("options"))


def serialize_offer(scenario: Scenario, offer: Offer) -> Fields:
    """Return one deployment with its prediction, as in `plan.json`."""
    deployment, prediction = offer.deployment, offer.prediction
    speculation, price = deployment.speculation, offer.price
    machines = Counter(size for pool in offer.pools for size in pool.machines)
    month = None if scenario.offline else prediction.usd_per_month
    fields: Fields = {
        "model": scenario.model,
        "checkpoint": deployment.model.name,
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto",
        "engine": deployment.engine.name,
        "engine_version": deployment.engine.version,
        "gpu": offer.gpu,
        "gpus": offer.num_gpus,
        "gpus_rented": offer.num_gpus_billed,
        "machines": {f"{size} GPUs": count for size, count in machines.items()},
        "spare_replicas": deployment.spare_replicas,
        "layout": dict(vars(deployment.layout)),
        "pools": _serialize_pools(offer),
        "engine_args": serialize_engine_args(deployment.args),
        "speculation": speculation
        and {
            "method": speculation.method,
            "num_speculative_tokens": speculation.num_speculative_tokens,
            "acceptance_rate": speculation.acceptance_rate,
            "draft_model": speculation.draft and speculation.draft.name,
            "head": speculation.head,
        },
        "usd_per_hour": _to_json(offer.usd_per_hour),
        "usd_per_month": _to_json(month),
        "bills": list(map(_serialize_bill, offer.bills)),
        "price_tier": price and ("own" if price.is_user_given else price.tier),
        "price_source": price and str(price),
        **{
            f"usd_per_mtok_{side}": _to_json(
                offer.usd_per_mtok if offer.priced_side == side else None
            )
            for side in ("output", "prompt")
        },
        "power_w": _to_json(prediction.total_power_w),
        "joules_per_output_token": _to_json(prediction.joules_per_output_token),
        "start_up_s": offer.startup and offer.startup.total.as_json_list,
        "limits": [_serialize_limit(limit) for limit in offer.limits],
        "memory_bytes_per_gpu": offer.memory.bytes_by_part,
    }
    if offer.performance is None:
        return fields | {"predicted": None}
    return fields | _serialize_performance(offer, offer.performance, scenario.slo_targets)


def _serialize_limit(limit: Limit) -> Fields:
    return {
        "name": limit.name,
        "unit": limit.unit,
        "limit": limit.limit,
        "expected": _to_json(limit.value),
        "pessimistic": _to_json(limit.pessimistic),
        "share": _to_json([limit.use.mid, limit.use.lo, limit.use.hi]),
        "status": limit.status,
    }


def _serialize_pools(offer: Offer) -> Fields | None:
    """Return both worker pools and the KV transfer; None if the plan is not disaggregated."""
    if offer.kv_transfer is None:
        return None
    bandwidth, mean_s = offer.kv_transfer
    return {
        **dict(zip(("prefill", "decode"), map(_serialize_pool, offer.pools), strict=True)),
        "link_gb_per_s": bandwidth / 1e9,
        "kv_transfer_ms_mean": mean_s * 1e3,
    }


def _serialize_pool(pool: Deployment) -> Fields:
    return {
        "workers": pool.layout.replicas,
        "spare_workers": pool.spare_replicas,
        "gpus": pool.num_gpus,
        "layout": dict(vars(pool.with_replicas(1).layout)),
        "engine_args": serialize_engine_args(pool.args),
    }


def _serialize_performance(
    offer: Offer, performance: Performance, targets: tuple[SloTarget, ...]
) -> Fields:
    """Return the latencies, SLOs and capacity of a prediction."""
    return {
        "predicted": {
            **{
                f"{metric}_ms": {
                    statistic: (performance.get(metric, statistic) * 1e3).as_json_list
                    for statistic in LATENCY_STATISTICS
                }
                for metric in LATENCY_METRICS
            },
            "output_tps": performance.output_tps.as_json_list,
            "request_tps": performance.request_tps.as_json_list,
            "kv_usage": performance.kv_usage,
            "kv_usage_p99": performance.kv_usage_p99,
            "preemptions_per_request": performance.preemptions,
            "decode_batch_mean": performance.decode_batch,
            "requests_replayed": performance.num_simulated_requests,
        },
        "service_level": [
            {
                "metric": target.metric,
                "percentile": target.percentile,
                "limit_ms": target.seconds * 1e3,
                "predicted_ms": (value * 1e3).as_json_list,
                "holds": not value.mid > target.seconds,
            }
            for target in targets
            for value in [performance.get(target.metric, target.percentile)]
        ],
        "waits_grow": performance.queue_growth,
        "refused_share": offer.prediction.rejected_fraction,
        "capacity_rps": _to_json(offer.capacity_rps),
        "planned_rps": offer.offered_rps,
        "headroom": offer.free_capacity,
    }


def _serialize_day(scaling: AutoscalingPlan, billing: BillingComparison) -> Fields:
    """Return the autoscaling plan, and the costs of 24 hours by billing option."""
    return {
        "rps": list(scaling.rates),
        "replicas": list(scaling.replicas),
        "share_of_limit": list(scaling.load_shares),
        "hours_missed": list(scaling.violated_hours),
        "gpu_hours": scaling.gpu_hours,
        "gpu_hours_fixed": scaling.fixed_gpu_hours,
        "saved": scaling.saved_fraction,
        "threshold": scaling.scale_up_in_flight,
        "lead_s": scaling.lead_s,
        "stabilization_s": scaling.stabilization_s,
        "drain_s": scaling.drain_s,
        "starts": scaling.num_starts,
        "usd_per_day": dict(billing.usd),
    }


def build_plan_json(plan: Plan) -> Fields:
    """Return the content of the plan.json of `plan`."""
    return serialize_answer(build_answer(plan, FILE_PARTS))
