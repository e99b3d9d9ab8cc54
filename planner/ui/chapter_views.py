"""The interactive views of the chapters: each starts at the plan's own deployment and changes it.

What a view draws is computed by the tables of `analysis`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from planner.analysis.layout_tables import Study
from planner.analysis.memory_sweeps import build_budget_table, describe_memory_status
from planner.analysis.speculation_tables import (
    compare_draft,
    list_available_methods,
)
from planner.analysis.sweep import REQUESTS_PER_SWEEP_RUN
from planner.analysis.tail_latency import build_latency_table
from planner.core.units import GIB
from planner.deploy.launch_spec import LaunchSpec
from planner.engines.deployment import Deployment
from planner.memory.concurrency_limits import estimate_preemption_risk, find_safe_max_num_seqs
from planner.memory.memory_plan import find_safe_memory_utilization, plan_memory
from planner.planning.framework_choice import (
    FrameworkQuestion,
    load_framework_questions,
)
from planner.planning.simulation_runs import run_short_simulation
from planner.ui.charts.base import plot_memory_budget
from planner.ui.notebook_widgets import (
    HtmlOutput,
    InteractiveView,
    build_choice,
    build_ladder,
    build_slider,
    escape_html,
    show_figure,
    show_note,
    show_table,
)
from planner.workload.workload import Workload

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


def list_framework_questions(choice: FrameworkQuestion) -> list[dict[str, str]]:
    """List the questions of the choice up to the first yes, then what the others would lead to."""
    rows, answer = list[dict[str, str]](), "no"
    for each in load_framework_questions():
        answer = "" if answer != "no" else "YES" if each == choice else "no"
        told = {"question": each.question, "here": answer, "yes leads to": each.framework}
        rows.append({**told, "why": each.fact})
    return rows


def draw_framework_choice(choice: FrameworkQuestion) -> HtmlOutput:
    """Draw the questions as a tree, in which each no leads to the next; what holds here is bold."""
    begin = '<ul style="list-style: none; border-left: 2px solid #8a8f98; padding-left: 1em">'
    tree = ""

    def mark(text: str, is_bold: bool) -> str:
        return f"<strong>{escape_html(text)}</strong>" if is_bold else escape_html(text)

    for row in reversed(list_framework_questions(choice)):
        here, leads = row["here"], f"yes \N{RIGHTWARDS ARROW} {row['yes leads to']}. {row['why']}"
        no = f"<li>{mark('no', here == 'no')}{tree}</li>" if tree else ""
        ways = f"{begin}<li>{mark(leads, here == 'YES')}</li>{no}</ul>"
        tree = f"{begin}<li>{mark(row['question'], bool(here))}{ways}</li></ul>"
    return HtmlOutput(tree)


def _list_fields(study: Study, *names: str) -> dict[str, Callable[[Any], object]]:
    """Return how the scenario's engine arguments are read of a deployment; none of a file's."""
    if not study.is_current:
        return {}
    return {f"engine_args.{name}": attrgetter(f"args.{name}") for name in names}


def try_memory(study: Study) -> InteractiveView:
    """Let the reader change what memory depends on: arguments, and other processes on the GPU."""
    own, args, workload = study.deployment, study.deployment.args, study.scenario.workload
    longest, held = own.model.architecture.max_position, own.other_tenants_bytes / GIB
    lengths = [longest, *(2**power for power in range(10, longest.bit_length()))]

    def _change(gib: float, **changes: Any) -> Deployment:
        return replace(own.with_args(**changes), other_tenants_bytes=round(gib * GIB))

    def _draw(deployment: Deployment) -> Outputs:
        memory, count = plan_memory(deployment), deployment.args.max_num_seqs
        risk = estimate_preemption_risk(memory, workload, count) if memory.can_start else 1.0
        safe = find_safe_max_num_seqs(memory, workload) if memory.can_start else 0
        stages = f" of the fullest of {deployment.layout.pp} stages" * (deployment.layout.pp > 1)
        return (
            show_figure(
                plot_memory_budget({"one GPU": memory}),
                f"Memory of one {deployment.gpu.name}{stages}: {memory.status.replace('_', ' ')}.",
            ),
            show_note(
                f"{memory.pool.reported_tokens:,} tokens of KV cache, {memory.max_concurrency:.1f}"
                f" sequences of max_model_len. With {count:,} requests of this workload at once they"
                f" overflow in {risk:.1%} of moments; up to {safe:,} do in at most 5%. The largest safe"
                f" gpu_memory_utilization is {find_safe_memory_utilization(deployment):.2f}."
                f" {describe_memory_status(memory)}"
            ),
            show_table(build_budget_table(memory), "Each term, with its 80% interval."),
        )

    fields = _list_fields(study, "gpu_memory_utilization", "max_model_len", "max_num_seqs")
    return InteractiveView(
        _draw,
        fields | ({"kv_cache_dtype": attrgetter("args.kv_cache_dtype")} if fields else {}),
        _change,
        gpu_memory_utilization=build_slider(0.5, 0.99, args.gpu_memory_utilization, step=0.01),
        max_model_len=build_ladder(lengths, args.max_model_len),
        max_num_seqs=build_slider(1, 2048, args.max_num_seqs),
        kv_cache_dtype=build_choice(["auto", "fp8"], args.kv_cache_dtype or "auto"),
        gib=build_slider(
            0.0, round(study.memory.total_bytes / GIB), held, 0.5, "other processes (GiB)"
        ),
    )


def try_load(study: Study) -> InteractiveView:
    """Let the reader change the traffic and the batch limits; each case is simulated."""
    own, args, targets = study.deployment, study.deployment.args, study.scenario.slo_targets

    def _change(times: float, burstiness: float, **changes: Any) -> tuple[Deployment, Workload]:
        load = study.workload if times == 1 else study.workload.scale(times)
        if burstiness != load.burstiness:
            load = replace(load, burstiness=burstiness, trace=None)
        return own.with_args(**changes), load

    def _draw(subject: tuple[Deployment, Workload]) -> Outputs:
        run = run_short_simulation(*subject, REQUESTS_PER_SWEEP_RUN)
        return (
            show_table(
                build_latency_table(run, targets),
                "Latencies, simulated; intervals are 80%. At risk: less likely than asked for.",
            ),
            show_note(
                f"Served: {100 * run.served_fraction.mid:.0f}% of what comes. Preemptions:"
                f" {100 * run.preemptions:.1f} in a hundred requests."
            ),
        )

    def _read(name: str) -> Callable[[Any], object]:
        return lambda subject: getattr(subject[0].args, name)

    names = ("max_num_seqs", "max_num_batched_tokens") if study.is_current else ()
    return InteractiveView(
        _draw,
        {f"engine_args.{name}": _read(name) for name in names},
        _change,
        times=build_slider(0.25, 4.0, 1.0, 0.25, "traffic (times)"),
        burstiness=build_slider(0.1, 2.0, study.workload.burstiness, 0.05),
        max_num_seqs=build_slider(1, 4 * args.max_num_seqs, args.max_num_seqs),
        max_num_batched_tokens=build_ladder(
            [2**power for power in range(8, 15)], args.max_num_batched_tokens
        ),
        gpu_memory_utilization=build_slider(0.1, 0.98, args.gpu_memory_utilization, step=0.01),
    )


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
        return (
            show_note(
                f"Speculation {speedup}. The draft takes {speedup.draft_bytes / GIB:.2f} GiB of each"
                f" GPU, the room of {speedup.num_sequences_lost:,} sequences."
            ),
        )

    return InteractiveView(
        _draw,
        change=_change,
        method=build_choice(list_available_methods(study.deployment), config.method),
        k=build_slider(1, 8, config.num_speculative_tokens, label="drafted tokens k"),
        acceptance=build_slider(0.1, 0.98, config.acceptance_rate, 0.02, "acceptance rate"),
        sequences=build_slider(1, 256, study.decode_batch, label="sequences at once"),
    )
