"""A plan as the dictionary that plan.json holds."""

import math
from collections import Counter
from typing import Any

from planner.deploy import build_launches, list_artifact_files
from planner.deploy.artifacts import BENCHMARK_DIR, list_benchmark_files
from planner.hardware.prices import look_up_gpu_price
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS, Performance
from planner.latency.startup_time import estimate_startup
from planner.planning.alternatives import explain_alternatives
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.billing import BillingComparison
from planner.planning.candidate import Candidate
from planner.planning.confidence import NUM_DRAWS, estimate_choice_confidence
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.evaluation import compute_free_capacity, compute_offered_rps
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.search import Plan


def serialize_plan(plan: Plan) -> dict[str, Any]:
    """`plan.json`: times in ms, null where there is none; a figure is [middle, low, high] with its 80% interval.

    Where nothing meets the service level the figures are those of the plan that comes nearest.
    """
    best, scenario = plan.best, plan.scenario
    found: dict[str, Any] = {
        "scenario": scenario.name,
        "verdict": plan.verdict,
        "reasons": list(plan.reasons),
    }
    found |= serialize_candidate(scenario, best) if best else {"model": scenario.model}
    found |= {
        "binding": {
            "constraint": plan.binding_constraint.constraint,
            "sentence": plan.binding_constraint.sentence,
        }
    }
    found |= {
        "runner_up": serialize_candidate(scenario, plan.runner_up) if plan.runner_up else None
    }
    found |= {"why_not": {other.option: other.reason for other in explain_alternatives(plan)}}
    found |= {"confidence": _serialize_confidence(plan)}
    found |= {"rejected": dict(Counter(rejection.bottleneck for rejection in plan.rejected))}
    found |= {
        "day": (
            _serialize_autoscaling(plan.autoscaling, plan.billing)
            if plan.autoscaling and plan.billing
            else None
        )
    }
    found |= {"assumptions": list(scenario.assumptions), "notes": list(plan.notes)}
    started = build_launches(plan.chosen.prediction) if plan.chosen else ()
    found |= {"command": started[0].command if len(started) == 1 else None}
    found |= {
        "commands": (
            {launch.role: launch.command for launch in started} if len(started) > 1 else None
        )
    }
    beside = (
        list_artifact_files(plan.chosen.prediction, scenario.output_kinds) if plan.chosen else []
    )
    return found | {
        "files": [
            *beside,
            *(name for name in list_benchmark_files(plan) if name.startswith(BENCHMARK_DIR)),
        ]
    }


def _serialize_confidence(plan: Plan) -> dict[str, Any] | None:
    """How sure the choice is, in shares of all draws, and what to measure first; null where nothing was chosen."""
    sure = estimate_choice_confidence(plan)
    if sure is None:
        return None
    parts = {
        "stays": sure.p_unchanged, "cheaper": sure.p_cheaper, "alike": sure.p_equal_cost,
        "dearer": sure.p_costlier,
        "broken": sure.p_infeasible,
    }  # fmt: skip
    others = [
        {"deployment": rival.description, "usd_per_hour": rival.usd_per_hour, "share": share}
        for rival, share in sure.alternatives
    ]
    first = sure.best_benchmark and {
        "deployment": sure.best_benchmark[0].description,
        "changes_the_choice": sure.best_benchmark[1],
        "commands": [launch.command for launch in build_launches(sure.best_benchmark[0].prediction)],
        "files": list(list_benchmark_files(plan)),
    }  # fmt: skip
    return {"draws": NUM_DRAWS, **parts, "instead": others, "measure_first": first}


def serialize_candidate(scenario: Scenario, candidate: Candidate) -> dict[str, Any]:
    """What one candidate is and does, as `plan.json` has it."""
    deployment, prediction = candidate.deployment, candidate.prediction
    layout, args, price = (
        deployment.layout,
        deployment.args,
        look_up_gpu_price(deployment.gpu, scenario.prices),
    )
    drafting, performance, month = (
        deployment.speculation,
        prediction.performance,
        prediction.usd_per_month,
    )
    machines = Counter(size for pool in prediction.pools for size in pool.machines)
    shown: dict[str, Any] = {
        "model": scenario.model, "checkpoint": deployment.model.name,
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": args.kv_cache_dtype or "auto",
        "engine": deployment.engine.name, "engine_version": deployment.engine.version,
        "gpu": deployment.gpu.name, "gpus": sum(pool.num_gpus for pool in prediction.pools),
        "gpus_rented": prediction.num_gpus_billed,
        "machines": {f"{size} GPUs": many for size, many in machines.items()},
        "spare_replicas": deployment.spare_replicas,
        "layout": dict(vars(layout)), "pools": _serialize_pools(prediction),
        "engine_args": {name: value for name, value in vars(args).items() if value is not None},
        "speculation": drafting and {
            **{field: getattr(drafting, field) for field in ("method", "num_speculative_tokens", "acceptance_rate")},
            "draft_model": drafting.draft and drafting.draft.name, "head": drafting.head,
        },
        "usd_per_hour": prediction.usd_per_hour_interval and prediction.usd_per_hour_interval.as_json_list,
        "usd_per_month": month.as_json_list if month and not scenario.offline else None,
        "price_tier": None if price is None else "own" if price.is_user_given else price.tier,
        "price_source": str(price) if price else None,
        "usd_per_mtok_output": prediction.usd_per_mtok_output and prediction.usd_per_mtok_output.as_json_list,
        "power_w": prediction.total_power_w and prediction.total_power_w.as_json_list,
        "joules_per_output_token": prediction.joules_per_output_token and prediction.joules_per_output_token.as_json_list,
        "start_up_s": begins.total.as_json_list if (begins := estimate_startup(deployment, scenario.storage)) else None,
    }  # fmt: skip
    return shown | (
        _serialize_performance(scenario, prediction, performance)
        if performance
        else {"predicted": None}
    )


def _serialize_pools(prediction: Prediction) -> dict[str, Any] | None:
    """Both pools and what lies between them; null where every replica does both."""
    first, workload = prediction.prefill, prediction.workload
    if first is None or workload is None:
        return None
    link, each = estimate_kv_transfer(first, prediction.deployment)
    pools = {
        role: {
            "workers": pool.layout.replicas, "spare_workers": pool.spare_replicas,
            "gpus": pool.num_gpus,
            "layout": dict(vars(pool.with_replicas(1).layout)),
            "engine_args": {name: value for name, value in vars(pool.args).items() if value is not None},
        }
        for role, pool in zip(("prefill", "decode"), prediction.pools, strict=True)
    }  # fmt: skip
    return {
        **pools,
        "link_gb_per_s": link / 1e9,
        "kv_transfer_ms_mean": each * workload.prompt.mean * 1e3,
    }


def _serialize_performance(
    scenario: Scenario, prediction: Prediction, performance: Performance
) -> dict[str, Any]:
    """The part under load."""
    return {
        "predicted": {
            **{f"{name}_ms": {at: (performance.get(name, at) * 1e3).as_json_list for at in LATENCY_STATISTICS} for name in LATENCY_METRICS},
            "output_tps": performance.output_tps.as_json_list,
            "request_tps": performance.request_tps.as_json_list,
            "kv_usage": performance.kv_usage, "kv_usage_p99": performance.kv_usage_p99,
            "preemptions_per_request": performance.preemptions,
            "decode_batch_mean": performance.decode_batch,
            "requests_replayed": performance.num_simulated_requests,
        },
        "service_level": [
            {
                "metric": target.metric, "percentile": target.percentile,
                "limit_ms": target.seconds * 1e3,
                "predicted_ms": ((value := performance.get(target.metric, target.percentile)) * 1e3).as_json_list,
                "holds": not value.mid > target.seconds,
            }
            for target in scenario.slo_targets
        ],
        "waits_grow": performance.queue_growth, "refused_share": prediction.rejected_fraction,
        "capacity_rps": performance.capacity and performance.capacity.as_json_list,
        "planned_rps": compute_offered_rps(scenario, prediction),
        "headroom": compute_free_capacity(scenario, prediction),
    }  # fmt: skip


def _serialize_autoscaling(scaling: AutoscalingPlan, renting: BillingComparison) -> dict[str, Any]:
    """The part of a day of traffic; its costs are those of 24 hours."""
    return {
        "rps": list(scaling.rates), "replicas": list(scaling.replicas),
        "share_of_limit": list(scaling.hourly_limit_utilization),
        "hours_missed": list(scaling.violated_hours), "requests_replayed": scaling.requests,
        "gpu_hours": scaling.gpu_hours, "gpu_hours_fixed": scaling.fixed_gpu_hours,
        "saved": scaling.saved_fraction,
        "threshold": scaling.scale_up_in_flight, "lead_s": scaling.lead_s,
        "stabilization_s": scaling.stabilization_s,
        "drain_s": scaling.drain_s, "starts": scaling.num_starts, "usd_per_day": dict(renting.usd),
        "cheaper_up_to": [
            {"what": first, "than": second, "requests_per_day": most if math.isfinite(most) else None}
            for (first, second), most in renting.break_even_requests.items()
        ],
    }  # fmt: skip
