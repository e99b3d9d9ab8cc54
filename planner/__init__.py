"""Headroom: what to run to serve a model, to this traffic, at this latency, and what it costs.

The names below are what a script needs; each is loaded when it is first asked for, so that
importing stays quick. Notebooks use more, `_NOTEBOOK_NAMES` by their module.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_PLACES = {
    "Interval": "core.intervals:Interval",
    "PlannerError": "core.errors:PlannerError",
    "Deployment": "engines.deployment:Deployment",
    "deploy_on": "engines.deployment:deploy_on",
    "LengthDistribution": "workload.length_distribution:LengthDistribution",
    "Workload": "workload.workload:Workload",
    "plan_memory": "memory.memory_plan:plan_memory",
    "evaluate": "planning.prediction:evaluate",
    "predict": "planning.prediction:predict",
    "simulate": "planning.simulation_runs:run_simulation",
    "Scenario": "planning.scenario:Scenario",
    "load_scenario": "planning.scenario:load_scenario",
    "Plan": "planning.search:Plan",
    "plan": "planning.search:search_deployments",
    "answer": "ui.plan_json:serialize_plan",
}
_FORMER_NAMES = {
    "Lengths": "LengthDistribution",
    "memory_plan": "plan_memory",
    "replay": "simulate",
}
__all__ = ["__version__", *_PLACES]
_NOTEBOOK_NAMES = {
    "analysis.adapter_tables": "compare_adapter_endpoints describe_adapter_endpoints",
    "analysis.batching_tables": (
        "count_requests_in_flight describe_prefix_reuse get_slo_column "
        "select_telling_loads split_workload sweep_concurrency sweep_prefix_reuse"
    ),
    "analysis.disaggregation_tables": (
        "compare_pools describe_kv_transfer describe_pools find_best_pools sweep_kv_links "
        "sweep_pool_sizes"
    ),
    "analysis.kv_cache_tables": "build_kv_table build_pool_table derive_kv_equation",
    "analysis.latency_rows": "list_mean_latencies",
    "analysis.layout_tables": (
        "build_bubble_table build_candidate_frame build_collectives_table "
        "build_replica_table describe_layout_rules estimate_max_rps "
        "explain_unified_deployment group_by_replica_shape list_layout_candidates "
        "list_pareto_fronts list_shortlist select_comparable select_fewest_replicas"
    ),
    "analysis.load_ramp": "run_load_ramp",
    "analysis.memory_sweeps": (
        "build_format_table build_sequence_table describe_memory_status "
        "describe_recommended_limits estimate_memory_gains sweep_max_model_len "
        "sweep_memory_utilization"
    ),
    "analysis.plan_summary": "build_ramp_table compare_engines describe_day",
    "analysis.sensitivity": (
        "build_decision_table compute_knob_effects fix_lengths sweep_knob_pair sweep_knobs"
    ),
    "analysis.speculation_tables": (
        "build_draft_table compare_draft describe_break_even list_step_parts "
        "propose_drafts sweep_break_even sweep_speedup"
    ),
    "analysis.sweep": "space_logarithmically sweep_tails",
    "analysis.tail_latency": (
        "build_latency_table build_tail_curves list_tail_limits select_stable_rows sweep_kv_pool"
    ),
    "calibration.memory_validation": "compute_memory_residuals summarize_memory_accuracy",
    "calibration.request_validation": "compare_timed_run load_timed_runs summarize_timed_accuracy",
    "calibration.serving_validation": (
        "compute_serving_accuracy describe_calibration_basis find_nearest_curve "
        "find_tightest_curve load_holdout_errors simulate_serving_points "
        "summarize_serving_accuracy"
    ),
    "core.text": "escape_markdown nest_markdown",
    "core.units": "GIB",
    "deploy.alerts": "list_alert_rules",
    "deploy.artifacts": "explain_benchmark_lengths predict_benchmark_ramp render_artifacts",
    "deploy.launch_spec": "build_launch",
    "engines.metric_names": "get_metric_names",
    "memory.memory_plan": "find_max_model_len find_safe_memory_utilization",
    "parallelism.pipeline": "compute_pipeline_bubble",
    "planning.framework_choice": "choose_framework load_frameworks",
    "planning.scenario": "list_scenarios",
    "planning.simulation_runs": "run_simulation",
    "tools.diagnostics.log_comparison": "EXAMPLE_LOG explain_log_file",
    "ui.chapter_views": (
        "SERVING_LATENCIES try_batch try_bursts try_concurrency try_drafts try_frameworks "
        "try_layouts try_log try_long_prompt try_memory try_pressure try_serving_curves "
        "try_tenants"
    ),
    "ui.charts.autoscaling": "plot_day",
    "ui.charts.base": "plot_lines",
    "ui.charts.comparison": "plot_adapter_endpoints plot_knob_effects plot_knob_pairs",
    "ui.charts.disaggregation": "plot_pool_sizes",
    "ui.charts.latency": "plot_panels plot_request_timeline",
    "ui.charts.layout": (
        "plot_candidate_memory plot_communication plot_legal_layouts plot_pareto_front"
    ),
    "ui.charts.memory": "plot_memory_residuals plot_memory_sweep plot_sequence_counts",
    "ui.charts.simulation": "plot_load_ramp plot_tails",
    "ui.charts.speculation": "plot_speedup_map plot_step_parts",
    "ui.charts.summary": "plot_framework_scores",
    "ui.charts.validation": "plot_gauges plot_predicted_over_measured plot_serving_curve",
    "ui.notebook_session": "allow_pools open_plan open_study search_cached",
    "ui.notebook_widgets": (
        "render_changes show_code show_figure show_markdown show_note show_table"
    ),
}
_PLACES |= {
    name: f"{module}:{name}" for module, names in _NOTEBOOK_NAMES.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    name = _FORMER_NAMES.get(name, name)
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    return __all__
