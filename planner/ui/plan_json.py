"""Serialize a plan for plan.json."""

import math
from collections import Counter
from typing import Any

from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.deploy import build_launches, list_artifact_files
from planner.deploy.artifacts import BENCHMARK_DIR, list_benchmark_files
from planner.engines.engine_args import EngineArgs
from planner.hardware.grids import JOULES_PER_KWH
from planner.hardware.prices import HOURS_PER_MONTH, look_up_gpu_price
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS, Performance
from planner.latency.startup_time import estimate_startup
from planner.planning.alternatives import explain_alternatives
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.billing import BillingComparison, price_tokens
from planner.planning.candidate import Candidate
from planner.planning.confidence import NUM_DRAWS, estimate_choice_confidence
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    get_capacity_rps,
)
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.search import Plan

Fields = dict[str, Any]
"""Values of JSON by field."""


def serialize_plan(plan: Plan) -> Fields:
    """Return the content of `plan.json`: times in ms, figures as [expected, low, high] of 80%.

    Unknown figures are null. If no plan is feasible, the figures are those of the closest
    candidate.
    """
    best, chosen, scenario = plan.best, plan.chosen, plan.scenario
    launches = build_launches(chosen.prediction) if chosen else ()
    benchmark_files = [
        name for name in list_benchmark_files(plan) if name.startswith(BENCHMARK_DIR)
    ]
    return {
        "scenario": scenario.name,
        "verdict": plan.verdict,
        "probability": round(plan.probability, 4),
        "probability_asked": scenario.confidence,
        "options": {name: _serialize_option(option) for name, option in plan.options.items()},
        "reasons": list(plan.reasons),
        **(serialize_candidate(scenario, best) if best else {"model": scenario.model}),
        "binding": {
            "constraint": plan.binding_constraint.constraint,
            "sentence": plan.binding_constraint.sentence,
        },
        "runner_up": serialize_candidate(scenario, plan.runner_up) if plan.runner_up else None,
        "why_not": {other.option: other.reason for other in explain_alternatives(plan)},
        "confidence": _serialize_confidence(plan),
        "rejected": dict(Counter(rejection.bottleneck for rejection in plan.rejected)),
        "day": (
            _serialize_autoscaling(plan.autoscaling, plan.billing)
            if plan.autoscaling and plan.billing
            else None
        ),
        "interruption": (
            {
                "replicas": spot.replicas,
                "replicas_per_machine": spot.replicas_per_machine,
                "probability_with_one_fewer": round(spot.probability, 4),
                "spare_replicas_to_add": spot.spares_to_add,
            }
            if (spot := plan.interruption)
            else None
        ),
        "max_load": (
            {scenario.found_figure: getattr(scenario.workload, scenario.found_figure)}
            if scenario.found_figure in ("rate", "concurrency") and chosen
            else None
        ),
        "shortest_limit": (
            {"slo": scenario.slo_targets[0].name, "ms": scenario.slo_targets[0].seconds * 1e3}
            if scenario.found_figure == "limit" and chosen
            else None
        ),
        "api": (
            {
                "cheaper": api.is_api_cheaper,
                "usd": api.api_usd,
                "usd_per_mtok_output": api.api_usd_per_mtok_output,
                "usd_of_gpus": api.own_usd,
                "period": "month" if api.is_monthly else "run",
                "gpus_cheaper_from_rps": api.break_even_rps,
            }
            if (api := plan.api_comparison)
            else None
        ),
        "assumptions": list(scenario.assumptions),
        "notes": [*plan.notes, *plan.left_out],
        "command": launches[0].command if len(launches) == 1 else None,
        "commands": (
            {launch.role: launch.command for launch in launches} if len(launches) > 1 else None
        ),
        "question": dict(scenario.fields),
        "files": [
            *(list_artifact_files(chosen.prediction, scenario.output_kinds) if chosen else []),
            *benchmark_files,
        ],
    }


def _serialize_option(candidate: Candidate) -> dict[str, Any]:
    """What an option is, what it costs, and how likely it meets every target."""
    memory = candidate.prediction.memory
    return {
        "deployment": candidate.description,
        "usd_per_hour": candidate.usd_per_hour,
        "probability": round(candidate.probability, 4),
        "memory": {"p_fits": round(candidate.p_memory, 4), "slack_gib": memory.slack_bytes / GIB},
        "commands": [launch.command for launch in build_launches(candidate.prediction)],
    }


def _serialize_confidence(plan: Plan) -> Fields | None:
    """Return the choice confidence and the best benchmark; None if nothing was chosen."""
    confidence = estimate_choice_confidence(plan)
    if confidence is None:
        return None
    benchmark = None
    if confidence.best_benchmark:
        candidate, probability = confidence.best_benchmark
        benchmark = {
            "deployment": candidate.description,
            "changes_the_choice": probability,
            "commands": [launch.command for launch in build_launches(candidate.prediction)],
            "files": list(list_benchmark_files(plan)),
        }
    return {
        "draws": NUM_DRAWS,
        "stays": confidence.p_unchanged,
        "cheaper": confidence.p_cheaper,
        "alike": confidence.p_equal_cost,
        "dearer": confidence.p_costlier,
        "broken": confidence.p_infeasible,
        "instead": [
            {"deployment": rival.description, "usd_per_hour": rival.usd_per_hour, "share": fraction}
            for rival, fraction in confidence.alternatives
        ],
        "measure_first": benchmark,
    }


def _serialize_interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else interval.as_json_list


def _serialize_engine_args(args: EngineArgs) -> Fields:
    return {name: value for name, value in vars(args).items() if value is not None}


def serialize_candidate(scenario: Scenario, candidate: Candidate) -> Fields:
    """Return one candidate with its prediction, as in `plan.json`."""
    deployment, prediction = candidate.deployment, candidate.prediction
    tokens = price_tokens(scenario, candidate)
    args, price = deployment.args, look_up_gpu_price(deployment.gpu, scenario.prices)
    speculation, performance = deployment.speculation, prediction.performance
    startup = estimate_startup(deployment, scenario.storage)
    machines = Counter(size for pool in prediction.pools for size in pool.machines)
    fields: Fields = {
        "model": scenario.model,
        "checkpoint": deployment.model.name,
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": args.kv_cache_dtype or "auto",
        "engine": deployment.engine.name,
        "engine_version": deployment.engine.version,
        "gpu": deployment.gpu.name,
        "gpus": sum(pool.num_gpus for pool in prediction.pools),
        "gpus_rented": prediction.num_gpus_billed,
        "machines": {f"{size} GPUs": count for size, count in machines.items()},
        "spare_replicas": deployment.spare_replicas,
        "layout": dict(vars(deployment.layout)),
        "pools": _serialize_pools(prediction),
        "engine_args": _serialize_engine_args(args),
        "speculation": speculation
        and {
            "method": speculation.method,
            "num_speculative_tokens": speculation.num_speculative_tokens,
            "acceptance_rate": speculation.acceptance_rate,
            "draft_model": speculation.draft and speculation.draft.name,
            "head": speculation.head,
        },
        "usd_per_hour": _serialize_interval(prediction.usd_per_hour_interval),
        "usd_per_month": (
            None if scenario.offline else _serialize_interval(prediction.usd_per_month)
        ),
        "price_tier": None if price is None else "own" if price.is_user_given else price.tier,
        "price_source": str(price) if price else None,
        **{
            f"usd_per_mtok_{side}": _serialize_interval(
                tokens[0] if tokens and tokens[1] == side else None
            )
            for side in ("output", "prompt")
        },
        "power_w": _serialize_interval(prediction.total_power_w),
        "joules_per_output_token": _serialize_interval(prediction.joules_per_output_token),
        "carbon": _serialize_carbon(scenario, prediction),
        "start_up_s": startup.total.as_json_list if startup else None,
    }
    return fields | (
        _serialize_performance(scenario, prediction, performance)
        if performance
        else {"predicted": None}
    )


def _serialize_carbon(scenario: Scenario, prediction: Prediction) -> Fields | None:
    """Return the kg CO2e of the GPUs' electricity; None without a grid or a known power."""
    grid, power_w = scenario.grid, prediction.total_power_w
    if grid is None or power_w is None:
        return None
    month = power_w * (HOURS_PER_MONTH / 1e3 * grid.kg_co2e_per_kwh)
    joules, million = prediction.joules_per_output_token, 1e6
    per_mtok = joules and joules * (million / JOULES_PER_KWH * grid.kg_co2e_per_kwh)
    return {
        "g_co2e_per_kwh": grid.g_co2e_per_kwh,
        "source": grid.source,
        "kg_co2e_per_month": None if scenario.offline else _serialize_interval(month),
        "kg_co2e_per_mtok_output": _serialize_interval(per_mtok),
    }


def _serialize_pools(prediction: Prediction) -> Fields | None:
    """Return both worker pools and the KV transfer; None if the plan is not disaggregated."""
    prefill, workload = prediction.prefill, prediction.workload
    if prefill is None or workload is None:
        return None
    bandwidth, token_s = estimate_kv_transfer(prefill, prediction.deployment)
    pools = {
        role: {
            "workers": pool.layout.replicas,
            "spare_workers": pool.spare_replicas,
            "gpus": pool.num_gpus,
            "layout": dict(vars(pool.with_replicas(1).layout)),
            "engine_args": _serialize_engine_args(pool.args),
        }
        for role, pool in zip(("prefill", "decode"), prediction.pools, strict=True)
    }
    return {
        **pools,
        "link_gb_per_s": bandwidth / 1e9,
        "kv_transfer_ms_mean": token_s * workload.prompt.mean * 1e3,
    }


def _serialize_performance(
    scenario: Scenario, prediction: Prediction, performance: Performance
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
            for target in scenario.slo_targets
            for value in [performance.get(target.metric, target.percentile)]
        ],
        "waits_grow": performance.queue_growth,
        "refused_share": prediction.rejected_fraction,
        "capacity_rps": _serialize_interval(get_capacity_rps(scenario, performance)),
        "planned_rps": compute_offered_rps(scenario, prediction),
        "headroom": compute_free_capacity(scenario, prediction),
    }


def _serialize_autoscaling(scaling: AutoscalingPlan, billing: BillingComparison) -> Fields:
    """Return the autoscaling plan, and the costs of 24 hours by billing option."""
    return {
        "rps": list(scaling.rates),
        "replicas": list(scaling.replicas),
        "share_of_limit": list(scaling.hourly_limit_utilization),
        "hours_missed": list(scaling.violated_hours),
        "requests_replayed": scaling.requests,
        "gpu_hours": scaling.gpu_hours,
        "gpu_hours_fixed": scaling.fixed_gpu_hours,
        "saved": scaling.saved_fraction,
        "threshold": scaling.scale_up_in_flight,
        "lead_s": scaling.lead_s,
        "stabilization_s": scaling.stabilization_s,
        "drain_s": scaling.drain_s,
        "starts": scaling.num_starts,
        "usd_per_day": dict(billing.usd),
        "reserved_replicas": billing.reserved_replicas,
        "cheaper_up_to": [
            {
                "what": first,
                "than": second,
                "requests_per_day": requests if math.isfinite(requests) else None,
            }
            for (first, second), requests in billing.break_even_requests.items()
        ],
    }
