"""The names that notebooks use beside those of a script, as `planner.show_table`, by their module."""

from collections.abc import Mapping

_BY_MODULE: Mapping[str, str] = {
    "analysis.batching_tables": (
        "compare_adapter_endpoints count_requests_in_flight describe_adapter_endpoints "
        "describe_prefix_reuse get_slo_column "
        "split_workload sweep_concurrency sweep_prefix_reuse"
    ),
    "analysis.layout_tables": (
        "build_candidate_frame build_collectives_table "
        "build_replica_table build_slo_table compare_pools describe_kv_transfer "
        "describe_layout_rules describe_pools estimate_max_rps explain_unified_deployment "
        "find_best_pools group_by_replica_shape list_layout_candidates "
        "list_pareto_fronts list_shortlist select_comparable select_fewest_replicas "
        "sweep_kv_links sweep_pool_sizes"
    ),
    "analysis.load_ramp": "run_load_ramp",
    "analysis.memory_sweeps": (
        "build_format_table build_kv_table build_pool_table build_sequence_table "
        "derive_kv_equation describe_memory_limit describe_memory_status describe_recommended_limits "
        "estimate_memory_gains sweep_max_model_len sweep_memory_utilization"
    ),
    "analysis.sensitivity": ("compute_knob_effects sweep_knobs"),
    "analysis.speculation_tables": (
        "build_draft_table build_load_table compare_draft describe_break_even describe_drafts "
        "describe_paying_loads list_step_parts "
        "propose_drafts sweep_speedup"
    ),
    "analysis.sweep": "space_logarithmically sweep_tails",
    "analysis.tail_latency": (
        "build_latency_table build_tail_curves list_tail_limits select_stable_rows "
    ),
    "answers.build": "build_answer",
    "answers.words": "describe_day describe_headroom explain_replica_loss tell_measure_first",
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
    "ui.chapter_views": (
        "describe_draft_decision list_files list_framework_questions "
        "try_batch try_bursts try_drafts try_frameworks try_layouts try_log "
        "try_long_prompt try_memory try_pressure try_tenants"
    ),
    "ui.charts.base": "plot_bars plot_lines plot_memory_budget plot_tiles",
    "ui.charts.comparison": "plot_cost_comparison plot_slo_comparison",
    "ui.charts.latency": "plot_panels plot_tails",
    "ui.charts.layout": "plot_pareto_front",
    "ui.charts.summary": "plot_day",
    "ui.decision_memo": "build_memo",
    "ui.notebook_session": (
        "add_changes allow_pools open_answer open_plan open_plans open_study search_cached"
    ),
    "ui.notebook_widgets": (
        "conclude render_changes show_code show_figure show_markdown show_note show_table"
    ),
    "ui.plan_comparison": (
        "build_plan_comparison build_plan_titles compare_limits describe_cheapest_plan"
    ),
    "ui.plan_tables": (
        "build_alternatives_table build_candidate_table build_ramp_table "
        "build_rejection_table build_relaxation_table build_rental_table compare_engines "
        "describe_search_effort describe_slo_margin explain_choice"
    ),
}
PLACES = {
    name: f"{module}:{name}" for module, names in _BY_MODULE.items() for name in names.split()
}
"""The module and the attribute of each name."""
