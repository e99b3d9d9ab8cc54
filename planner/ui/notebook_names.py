"""The names that notebooks use beside those of a script, as `planner.show_table`, by their module."""

from collections.abc import Mapping

_BY_MODULE: Mapping[str, str] = {
    "analysis.batching_tables": (
        "get_slo_column simulate_prefill_gaps sweep_batch sweep_long_prompt sweep_prefix_reuse"
    ),
    "analysis.layout_tables": (
        "build_shape_table compare_pools "
        "describe_layout_rules describe_pools find_best_pools list_shapes sweep_pool_sizes"
    ),
    "analysis.lessons": (
        "build_traffic compare_step_speed read_performance read_pool read_run sweep_throughput"
    ),
    "analysis.memory_sweeps": (
        "build_format_table build_kv_table build_sequence_table "
        "describe_memory_limit describe_memory_status describe_recommended_limits"
    ),
    "analysis.prefix_cache_sweeps": (
        "build_document_workload read_hits simulate_routed sweep_pool_size sweep_routing"
    ),
    "analysis.speculation_tables": (
        "describe_break_even propose_drafts sweep_draft_loads sweep_speedup"
    ),
    "analysis.sweep": ("get_wait_ms space_logarithmically sweep sweep_tails"),
    "analysis.tail_latency": ("build_latency_table run_load_ramp sweep_utilization"),
    "answers.answer": ("build_answer"),
    "answers.words": ("describe_day describe_drafts describe_loads tell_measure_first"),
    "deploy.alerts": ("list_alert_rules"),
    "deploy.artifacts": ("predict_benchmark_ramp render_artifacts"),
    "deploy.launch_spec": ("build_launch"),
    "engines.layout": ("SpeculationConfig"),
    "engines.metric_names": ("get_metric_names"),
    "hardware.gpus": ("get_gpu"),
    "latency.speculative_decoding": (
        "evaluate_speculation find_break_even_acceptance infer_acceptance_rate"
    ),
    "latency.step_model": ("build_target_step_model compute_expected_tokens"),
    "memory.concurrency_limits": ("find_safe_max_num_seqs"),
    "memory.memory_plan": ("find_max_model_len find_safe_memory_utilization"),
    "parallelism.sharding": ("compute_pipeline_bubble"),
    "planning.framework_choice": ("choose_framework"),
    "planning.simulation_runs": ("simulate_once"),
    "ui.chapter_views": (
        "describe_draft_decision draw_framework_choice list_files try_drafts try_load try_memory"
    ),
    "ui.charts.base": ("plot_bars plot_day plot_lines plot_memory_budget plot_panels plot_tiles"),
    "ui.decision_memo": ("build_memo"),
    "ui.notebook_session": ("add_changes allow_pools open_answer open_plan open_plans open_study"),
    "ui.notebook_widgets": (
        "InteractiveView ask_number build_choice conclude fold_content render_changes "
        "show_code show_figure show_markdown show_note show_picture show_table"
    ),
    "ui.plan_comparison": "build_plan_comparison build_plan_titles",
    "ui.plan_tables": (
        "build_candidate_table build_fact_table build_ramp_table build_rejection_table"
    ),
}
PLACES = {
    name: f"{module}:{name}" for module, names in _BY_MODULE.items() for name in names.split()
}
"""The module and the attribute of each name."""
