"""The names that notebooks use beside those of a script, as `planner.show_table`, by their module."""

from collections.abc import Mapping

_BY_MODULE: Mapping[str, str] = {
    "analysis.batching_tables": "get_slo_column sweep_batch",
    "analysis.layout_tables": (
        "build_collectives_table build_shape_table build_slo_table compare_pools "
        "describe_layout_rules describe_pools find_best_pools list_shapes "
        "sweep_pool_sizes"
    ),
    "analysis.load_ramp": "run_load_ramp",
    "analysis.memory_sweeps": (
        "build_format_table build_kv_table build_sequence_table derive_kv_equation "
        "describe_memory_limit describe_memory_status describe_recommended_limits"
    ),
    "analysis.sensitivity": "sweep_knobs",
    "analysis.speculation_tables": (
        "describe_break_even describe_paying_loads propose_drafts sweep_draft_loads sweep_speedup"
    ),
    "analysis.sweep": "space_logarithmically",
    "analysis.tail_latency": "build_latency_table",
    "answers.build": "build_answer",
    "answers.words": "describe_day describe_headroom explain_replica_loss tell_measure_first",
    "deploy.alerts": "list_alert_rules",
    "deploy.artifacts": "explain_benchmark_lengths predict_benchmark_ramp render_artifacts",
    "deploy.launch_spec": "build_launch",
    "engines.metric_names": "get_metric_names",
    "memory.memory_plan": "find_max_model_len",
    "planning.framework_choice": "choose_framework",
    "planning.scenario": "list_scenarios",
    "ui.chapter_views": (
        "describe_draft_decision list_files list_framework_questions "
        "try_drafts try_layouts try_load try_memory"
    ),
    "ui.charts.base": "plot_bars plot_day plot_lines plot_memory_budget plot_panels plot_tiles",
    "ui.decision_memo": "build_memo",
    "ui.notebook_session": (
        "add_changes allow_pools open_answer open_plan open_plans open_study search_cached"
    ),
    "ui.notebook_widgets": (
        "conclude render_changes show_code show_figure show_markdown show_note show_table"
    ),
    "ui.plan_comparison": (
        "build_plan_comparison build_plan_titles compare_costs compare_limits describe_cheapest_plan"
    ),
    "ui.plan_tables": (
        "build_candidate_table build_ramp_table "
        "build_rejection_table build_relaxation_table build_rental_table compare_engines "
        "describe_search_effort describe_slo_margin explain_choice"
    ),
}
PLACES = {
    name: f"{module}:{name}" for module, names in _BY_MODULE.items() for name in names.split()
}
"""The module and the attribute of each name."""
