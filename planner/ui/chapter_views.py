"""The interactive views of the chapters: each starts at the plan's own deployment and changes it.

What a view draws is computed by the tables of `analysis`.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

from planner.analysis.batching_tables import (
    simulate_bursts,
    simulate_cases,
    simulate_long_prompt,
    split_workload,
)
from planner.analysis.layout_tables import Study, build_slo_table, relayout_candidate
from planner.analysis.memory_sweeps import (
    build_budget_table,
    describe_memory_status,
    sweep_other_tenants,
)
from planner.analysis.speculation_tables import (
    compare_draft,
    list_available_methods,
    list_step_parts,
)
from planner.core.units import GIB
from planner.deploy.launch_spec import LaunchSpec
from planner.engines.deployment import Deployment
from planner.hardware.gpus import list_gpus
from planner.memory.concurrency_limits import estimate_preemption_risk, find_safe_max_num_seqs
from planner.memory.memory_plan import plan_memory
from planner.planning.candidate import Candidate
from planner.planning.framework_choice import (
    FrameworkChoice,
    WorkloadTraits,
    choose_framework,
    load_frameworks,
)
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG, explain_log_file
from planner.ui.charts.base import CATEGORY_COLORS, MUTED_COLOR, plot_bars, plot_memory_budget
from planner.ui.charts.latency import plot_timelines, plot_token_gaps
from planner.ui.notebook_widgets import (
    HtmlOutput,
    InteractiveView,
    build_choice,
    build_ladder,
    build_slider,
    build_text_field,
    show_figure,
    show_note,
    show_table,
)

Outputs = tuple[HtmlOutput, ...]
FILE_PURPOSES = {
    ".sh": "starts a server",
    "bench.sh": "measures one replica under rising load, beside what is predicted",
    "router.sh": "sends requests to the workers",
    ".env": "the variables of the server: API key, token, caches",
    ".service": "a systemd unit: one instance a replica",
    "compose.yaml": "the same for Docker Compose",
    "prometheus.yml": "scrapes every replica",
    "alerts.yml": "alert rules from the plan's own figures",
    "grafana.json": "a dashboard with the plan's limits",
    "runbook.md": "what to do about each alert",
    "checklist.md": "what to check on the day",
    "scale.yaml": "KEDA scales replicas by requests in flight on one",
}
"""What the files of a plan are for, by how their names end; the last that fits counts."""


FRAMEWORK_QUESTIONS = (
    ("Must the same deployment run on another vendor's GPUs?", "vllm", ("portability",)),
    (
        "Do agents, or answers held to a grammar, share long beginnings?",
        "sglang",
        ("structured_or_agentic", "prefix_reuse"),
    ),
    (
        "One model on one NVIDIA GPU type, known lengths, and time to tune for every change?",
        "trtllm",
        ("one_nvidia_sku", "fixed_shapes", "rebuild_acceptable"),
    ),
    ("None of these?", "vllm", ()),
)
"""The decision tree: a question, what a yes leads to, and the rule of it in the catalog."""


def list_framework_questions(choice: FrameworkChoice) -> list[dict[str, str]]:
    """List the questions of the choice up to the first yes, then what the others would lead to."""
    rows, answer = list[dict[str, str]](), "no"
    for question, name, when in FRAMEWORK_QUESTIONS:
        framework = load_frameworks()[name]
        rule = next(rule for rule in framework.rules if rule.when == when)
        answer = "" if answer in ("YES", "") else "YES" if rule in choice.chosen.reasons else "no"
        told = {"question": question, "here": answer, "yes leads to": framework.title}
        rows.append({**told, "why": rule.fact})
    return rows


def try_frameworks(study: Study) -> InteractiveView:
    """Let the reader change what the choice of a framework rests on."""
    own = list(dict.fromkeys(candidate.gpu for candidate in study.scenario.gpus))
    gpus = {", ".join(gpu.name for gpu in own): own}
    gpus |= {gpu.name: [gpu] for gpu in list_gpus()}

    def _draw(gpu: str, **traits: bool) -> Outputs:
        choice = choose_framework(WorkloadTraits(**traits), gpus[gpu])
        return show_note(choice), show_table(list_framework_questions(choice), f"Asked on {gpu}.")

    return InteractiveView(
        _draw,
        gpu=build_choice(list(gpus), label="GPU"),
        **{
            trait: build_choice([("no", False), ("yes", True)], held, trait.replace("_", " "))
            for trait, held in asdict(study.scenario.traits).items()
        },
    )


def try_memory(study: Study) -> InteractiveView:
    """Let the reader change the engine arguments that memory depends on."""
    args = study.deployment.args
    longest = study.deployment.model.architecture.max_position
    lengths = [longest, *(2**power for power in range(10, longest.bit_length()))]

    def _draw(deployment: Deployment) -> Outputs:
        memory = plan_memory(deployment)
        state, total = memory.status.replace("_", " "), memory.total_bytes / GIB
        text = (
            f"{memory.pool.reported_tokens:,} tokens of KV cache,"
            f" {memory.max_concurrency:.1f} sequences of full length. "
        )
        return (
            show_figure(
                plot_memory_budget({"plan": memory}),
                f"Memory of one {deployment.gpu.name} ({total:.2f} GiB): {state}.",
            ),
            show_note(text + describe_memory_status(memory)),
            show_table(
                build_budget_table(memory),
                f"Each term {_name_fullest_gpu(deployment)}, with its 80% interval.",
            ),
        )

    fields = {
        "engine_args.gpu_memory_utilization": "gpu_memory_utilization",
        "engine_args.max_model_len": "max_model_len",
        "kv_cache_dtype": "kv_cache_dtype",
    }
    return InteractiveView(
        _draw,
        fields if study.is_current else {},
        study.deployment.with_args,
        gpu_memory_utilization=build_slider(0.5, 0.99, args.gpu_memory_utilization, step=0.01),
        max_model_len=build_ladder(lengths, args.max_model_len),
        kv_cache_dtype=build_choice(["auto", "fp8"], args.kv_cache_dtype or "auto"),
    )


def try_batch(study: Study) -> InteractiveView:
    """Let the reader change how many requests run at once, and see the preemption risk."""
    memory, workload = study.memory, study.scenario.workload

    def _draw(deployment: Deployment) -> HtmlOutput:
        count = deployment.args.max_num_seqs
        risk = estimate_preemption_risk(memory, workload, count)
        often = f"overflows in {risk:.1%} of moments"
        return show_note(
            f"With {count:,} requests of this workload at once, the pool"
            f" {often if risk > 0.0005 else 'practically never overflows'}."
            f" Up to {find_safe_max_num_seqs(memory, workload):,} stay under 5%."
        )

    return InteractiveView(
        _draw,
        {"engine_args.max_num_seqs": "max_num_seqs"} if study.is_current else {},
        study.deployment.with_args,
        max_num_seqs=build_slider(1, 2048, study.deployment.args.max_num_seqs),
    )


def try_tenants(study: Study) -> InteractiveView:
    """Let the reader put other processes on the GPU."""
    held, total = study.deployment.other_tenants_bytes / GIB, study.memory.total_bytes / GIB

    def _draw(gib: float) -> HtmlOutput:
        swept = sweep_other_tenants(study.deployment, sorted({0.0, held, gib}))
        return show_table(swept, "The largest safe share beside other processes.")

    label = "other processes (GiB)"
    return InteractiveView(_draw, gib=build_slider(0.0, round(total), held or 8.0, 0.5, label))


def try_log(study: Study, log: str) -> InteractiveView:
    """Let the reader compare a start-up log with the plan; a public one if there is none."""

    def _draw(path: str) -> Outputs:
        explanation = (
            explain_log_file(path, planned=study.deployment)
            if path
            else explain_log_file(EXAMPLE_LOG, "H100")
        )
        whose = "this log" if path else "a public example log"
        caption = f"What {whose} says of {explanation.plan.deployment}."
        text = f"{explanation.verdict} As a line of the scenario: {explanation.scenario_line}"
        return show_table(explanation.to_rows(), caption), show_note(text)

    return InteractiveView(_draw, path=build_text_field(log, "start-up log", "path of a log file"))


def _name_fullest_gpu(deployment: Deployment) -> str:
    """Name the GPU whose memory is shown: with pipeline stages, one of the fullest stage."""
    stages = deployment.layout.pp
    return f"per stage, on a GPU of the fullest of {stages}" if stages > 1 else "on the fullest GPU"


def try_layouts(study: Study) -> InteractiveView:
    """Let the reader change GPU and layout of the plan; each is simulated."""
    layout = study.deployment.layout
    gpus = list(dict.fromkeys(candidate.gpu.name for candidate in study.scenario.gpus))

    def _draw(candidate: Candidate) -> Outputs:
        targets, args = build_slo_table(study.scenario, candidate), candidate.deployment.args
        performance = candidate.prediction.performance
        basis = performance.source_label if performance else ""
        return (
            show_figure(
                plot_memory_budget({"one GPU": candidate.prediction.memory}),
                f"Memory {_name_fullest_gpu(candidate.deployment)}.",
            ),
            show_table(
                targets if len(targets) else None, f"Each target, {basis}; intervals are 80%."
            ),
            show_note(
                f"{candidate}. max_num_batched_tokens {args.max_num_batched_tokens:,},"
                f" max_num_seqs {args.max_num_seqs:,}."
            ),
        )

    return InteractiveView(
        _draw,
        {"layout": ("tp", "pp")} if study.is_current else {},
        partial(relayout_candidate, study.plan),
        gpu=build_choice(gpus, study.deployment.gpu.name, label="GPU"),
        tp=build_choice(sorted({1, 2, 4, 8, layout.tp}), layout.tp, label="tensor parallel"),
        pp=build_slider(1, 8, layout.pp, label="pipeline stages"),
        replicas=build_slider(1, 16, layout.replicas),
    )


def try_pressure(study: Study) -> InteractiveView:
    """Let the reader change the KV cache pool of an engine, and the guard before it."""
    args, seconds = study.deployment.args, study.timeline_s

    def _draw(deployment: Deployment) -> HtmlOutput:
        changed = deployment.args
        share, seqs = f"{changed.gpu_memory_utilization:g}", f"{changed.max_num_seqs:,}"
        name = f"gpu_memory_utilization {share}, max_num_seqs {seqs}"
        drawn = plot_timelines(simulate_cases({name: (deployment, study.workload)}, seconds))
        return show_figure(drawn, "Running and waiting requests of one engine, simulated.")

    return InteractiveView(
        _draw,
        {"engine_args.max_num_seqs": "max_num_seqs"} if study.is_current else {},
        study.deployment.with_args,
        gpu_memory_utilization=build_slider(0.1, 0.98, args.gpu_memory_utilization, step=0.01),
        max_num_seqs=build_slider(1, 4 * args.max_num_seqs, args.max_num_seqs),
    )


def try_bursts(study: Study) -> InteractiveView:
    """Let the reader make the plan's traffic burst and surge."""
    seconds = study.timeline_s

    def _draw(burstiness: float, surge: float) -> HtmlOutput:
        if not study.workload.rate:
            return show_note("All of this work is there at the start: nothing arrives in bursts.")
        case = study.deployment, study.workload
        return show_figure(
            plot_timelines(simulate_bursts(*case, burstiness, surge, seconds)),
            f"Running and waiting requests of one engine in {seconds:,.0f} s of traffic,"
            " and their own tail, simulated.",
        )

    return InteractiveView(
        _draw,
        burstiness=build_slider(0.1, 2.0, 0.25, step=0.05),
        surge=build_slider(1.0, 4.0, 2.0, step=0.25, label="surge (times the rate)"),
    )


def try_long_prompt(study: Study) -> InteractiveView:
    """Let the reader send a long prompt into a decode batch, and change the tokens of a step."""
    replica, batch = study.deployment.with_replicas(1), study.decode_batch
    args, traffic = replica.args, split_workload(study.scenario, study.deployment)

    def _draw(deployment: Deployment, prompt: int, sequences: int) -> Outputs:
        gaps, swept = simulate_long_prompt(deployment, traffic, sequences, prompt)
        refused = f" The plan's own max_model_len of {args.max_model_len:,} would refuse it."
        return (
            show_figure(
                plot_token_gaps(gaps),
                f"Tokens of a decode batch of {sequences:,} while a prompt of {prompt:,} tokens is"
                " computed. Pale: 80% interval of the gap.",
            ),
            show_table(
                swept,
                f"A prompt of {prompt:,} tokens beside {sequences:,} that decode, by"
                " max_num_batched_tokens." + refused * (args.max_model_len < prompt),
            ),
        )

    name = "max_num_batched_tokens"
    sizes = [2**power for power in range(8, 15)]
    return InteractiveView(
        lambda subject: _draw(*subject),
        {f"engine_args.{name}": name} if study.is_current else {},
        lambda max_num_batched_tokens, **prompt: (
            replica.with_args(max_num_batched_tokens=max_num_batched_tokens), *prompt.values(),
        ),
        prompt=build_slider(1000, 40000, 10000, step=1000, label="prompt tokens"),
        max_num_batched_tokens=build_ladder(sizes, args.max_num_batched_tokens),
        sequences=build_slider(1, max(256, batch), batch, label="decode batch"),
    )  # fmt: skip


def describe_draft_decision(study: Study, launch: LaunchSpec) -> str:
    """Describe whether the plan drafts, why not, and the arguments with which it would."""
    if study.plan.best is None:
        return "There is no plan that drafts could help."
    argument = " ".join(
        f"{flag.name} {flag.value}" for flag in launch.flags if "specul" in flag.name
    )
    if study.deployment.speculation:
        return f"The plan drafts: {argument}"
    entry = study.scenario.speculation
    why = "no plan with drafts is cheaper or likelier" if entry else "the scenario names no draft"
    return f"The plan goes without drafts: {why}. With them: {argument}"


def list_files(files: Mapping[str, str]) -> list[dict[str, str]]:
    """List what each file of a plan is for."""
    rows = {
        name: purpose
        for suffix, purpose in FILE_PURPOSES.items()
        for name in files
        if name.endswith(suffix)
    }
    return [{"file": name, "for": rows.get(name, "")} for name in files]


def try_drafts(study: Study, drafted: Deployment) -> InteractiveView:
    """Let the reader change how tokens are drafted, and for how many sequences at once."""
    config = drafted.speculation
    assert config is not None

    def _change(method: str, k: int, acceptance: float, sequences: int) -> tuple[Deployment, int]:
        changed = replace(
            config, method=method, num_speculative_tokens=k, acceptance_rate=acceptance
        )
        return replace(drafted, speculation=changed), sequences

    def _draw(subject: tuple[Deployment, int]) -> Outputs:
        speedup = compare_draft(*subject, study.context)
        colors = {"target": CATEGORY_COLORS[0], "draft": MUTED_COLOR}
        drawn = plot_bars(list_step_parts(speedup), "ms per token", "way", "part", colors)
        return (
            show_note(f"Speculation {speedup}."),
            show_figure(drawn, "Milliseconds per token and sequence."),
        )

    return InteractiveView(
        _draw,
        change=_change,
        method=build_choice(list_available_methods(study.deployment), config.method),
        k=build_slider(1, 8, config.num_speculative_tokens, label="drafted tokens k"),
        acceptance=build_slider(0.1, 0.98, config.acceptance_rate, 0.02, "acceptance rate"),
        sequences=build_slider(1, 256, study.decode_batch, label="sequences at once"),
    )
