"""One quantity, one value: wherever a plan is told, in tables, sentences, files, JSON or a batch row, it says the same.

All shipped scenarios, and small ones for what those lack: a trace, users in a closed loop, answers
of one token.
"""

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shipped import answer_of, drawn_rows, plan_of, plan_once, row_of, sampled, small_scenario

from planner.analysis import layout_tables as layout_study
from planner.analysis import tail_latency
from planner.analysis.latency_rows import build_tail_row
from planner.answers import serialize_answer
from planner.answers.growth_wording import describe_headroom
from planner.core.intervals import Interval
from planner.core.number_format import format_number, format_probability
from planner.core.units import GIB
from planner.deploy import (
    build_launch,
    predict_benchmark_ramp,
    render_artifacts,
)
from planner.deploy.artifacts import count_benchmark_prompts
from planner.latency.performance import LATENCY_STATISTICS, Performance
from planner.planning.candidate import Candidate, describe_deployment
from planner.planning.capacity import estimate_capacity
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.scenario import list_scenarios
from planner.planning.search import Plan
from planner.planning.simulation_runs import run_simulation
from planner.planning.slo import list_benchmark_targets
from planner.tools.batch import predict_row
from planner.ui import plan_tables as tables
from planner.ui.charts import summary as charts_summary
from planner.ui.charts.base import MAX_DRAWN_UTILIZATION
from planner.ui.plan_text import format_answer
from planner.workload.sessions import SessionTrace

pytestmark = pytest.mark.slow

LATENCIES = ("ttft", "tpot", "itl", "e2e")
LENGTHS = {"prompt_tokens": {"mean": 900}, "output_tokens": {"mean": 150}}
BASE: dict[str, Any] = {
    "gpus": [{"gpu": "L40S", "at_most": 2}, {"gpu": "H100-SXM", "at_most": 1}],
    "workload.rate": 2,
}
"""What changes in the small scenario, for all of the following."""
OTHERS: dict[str, dict[str, Any]] = {
    "trace": {"workload": {"trace": "trace.csv"}},
    "trace at another rate": {"workload": {"trace": "trace.csv", "rate": 3.0}},
    "trace with lengths of its own": {"workload": {"trace": "trace.csv", "output_tokens": {"mean": 100, "p95": 300}}},
    "trace by tomorrow": {
        "workload": {"trace": "trace.csv", "requests": 3000, "within_hours": 1}, "service_level": {}
    },
    "users": {"workload": {**LENGTHS, "concurrency": 24}},
    "by tomorrow": {"workload": {**LENGTHS, "requests": 20_000, "within_hours": 4}, "service_level": {}},
    "one token": {"workload": {**LENGTHS, "output_tokens": {"exactly": 1}, "rate": 3}},
    "prefix": {"workload.shared_prefix": {"tokens": 500, "hit_rate": 0.9}},
    "bursts": {"workload.burstiness": 0.3},
    "other tenants": {"other_tenants_gib": 3, "gpus": [{"gpu": "L40S", "at_most": 2, "interconnect": "pcie4"}]},
    "a few refused": {"engine_args": {"max_model_len": 3072}, "refused_at_most": 0.05},
    "sglang": {"engine": "sglang"},
    "arguments": {"engine_args": {"async_scheduling": False, "long_prefill_token_threshold": 1024}},
}  # fmt: skip
SAMPLE = (
    "edge-8b-24gb",
    "trace by tomorrow",
    "users",
    "one token",
    "a few refused",
)


@cache
def traced(folder: Path) -> Path:
    """A service of two hundred seconds, ever busier, in `trace.csv`."""
    rng, n = np.random.default_rng(1), 500
    arrival = np.sort(200 * rng.random(n) ** 0.7)
    prompt, output = (
        rng.lognormal(6.3, 0.7, n).astype(int) + 1,
        rng.lognormal(4.5, 0.8, n).astype(int) + 1,
    )
    lines = [f"{at:.3f},{p},{o}" for at, p, o in zip(arrival, prompt, output, strict=True)]
    (folder / "trace.csv").write_text("\n".join(("arrival,prompt_tokens,output_tokens", *lines)))
    return folder


@pytest.fixture(scope="module", params=sampled([*list_scenarios(), *OTHERS], SAMPLE))
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    name = request.param
    if name not in OTHERS:
        return plan_of(name)
    folder = traced(tmp_path_factory.getbasetemp())
    return plan_once(small_scenario({**BASE, **OTHERS[name]}, folder))


@pytest.fixture
def chosen(plan: Plan) -> Candidate:
    assert plan.chosen is not None, str(plan)
    return plan.chosen


@pytest.fixture
def performance(chosen: Candidate) -> Performance:
    assert chosen.prediction.performance is not None
    return chosen.prediction.performance


def ends(value: Interval | None) -> list[float] | None:
    """As `plan.json` has it."""
    return None if value is None or math.isnan(value.mid) else [value.mid, value.lo, value.hi]


def same(one: object, other: Interval) -> bool:
    """Whether a table's cell is that figure; none for none."""
    assert isinstance(one, Interval)
    return np.allclose(
        (one.lo, one.mid, one.hi), (other.lo, other.mid, other.hi), rtol=1e-9, equal_nan=True
    )


def cells(performance: Performance, read: str = "get") -> Iterator[tuple[str, str, Interval]]:
    """Metric, point and ms of every latency."""
    for metric, point in product(LATENCIES, LATENCY_STATISTICS):
        yield metric, point, getattr(performance, read)(metric, point) * 1e3


def test_figures_rest_on_a_replay_and_hang_together(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    """What is served is what arrives where the queue does not grow; tokens are requests times their tokens."""
    assert performance.num_simulated_requests > 0 and performance.capacity is not None
    workload = plan.scenario.workload
    if workload.rate is not None and not plan.scenario.offline:
        assert performance.capacity == estimate_capacity(
            chosen.deployment, chosen.prediction.workload
        )
    assert (
        performance.capacity.mid >= performance.request_tps.mid * (1 - 1e-9)
        or performance.saturated
    )
    rate = workload.rate
    if rate is not None and not plan.scenario.offline and workload.trace is None:
        served = rate * (1 - chosen.prediction.rejected_fraction)
        assert performance.request_tps.mid == pytest.approx(served, rel=1e-6)
    if workload.trace is None:
        tokens = performance.request_tps.mid * workload.output.mean
        assert performance.output_tps.mid == pytest.approx(tokens, rel=0.03)
    assert 0 < performance.kv_usage <= performance.kv_usage_p99 <= 1


def test_the_summary_says_what_the_plan_says(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    table = tail_latency.build_latency_table(performance).set_index("Latency")
    for metric, point, value in cells(performance, "get_for_display"):
        assert same(table.loc[metric.upper(), f"{point} (ms)"], value), (metric, point)
    first = tables.build_candidate_table(answer_of(plan)).iloc[0]
    assert first["deployment"] == describe_deployment(chosen.deployment)
    assert first["targets"] == ("at risk" if plan.verdict == "at_risk" else "met")
    for target in plan.scenario.slo_targets:
        value = performance.get_for_display(target.metric, target.percentile) * 1e3
        assert same(first[f"{target.name} (ms)"], value)


def test_promises_are_judged_alike_everywhere(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    table = layout_study.build_slo_table(plan.scenario, chosen).set_index("Target")
    drawn = drawn_rows(charts_summary.plot_slos(answer_of(plan).best), "target")
    stated = {
        f"{row['percentile']} {row['metric'].upper()}": row
        for row in serialize_answer(answer_of(plan))["service_level"]
    }
    for target in plan.scenario.slo_targets:
        value = performance.get_for_display(target.metric, target.percentile)
        if math.isnan(value.mid):
            assert stated[target.name]["predicted_ms"] is None and str(target) not in drawn
            continue
        replayed = performance.get(target.metric, target.percentile)
        row, entry, bar = table.loc[f"{target.name} (ms)"], stated[target.name], drawn[str(target)]
        assert same(row["Predicted"], value * 1e3) and row["Limit"] == pytest.approx(
            target.seconds * 1e3
        )
        assert entry["predicted_ms"] == ends(replayed * 1e3) and entry["limit_ms"] == row["Limit"]
        share = value / target.seconds
        assert (bar["mid"], bar["hi"]) == (
            min(share.mid, MAX_DRAWN_UTILIZATION),
            min(share.hi, MAX_DRAWN_UTILIZATION),
        )
        assert bar["further"] == (share.hi > MAX_DRAWN_UTILIZATION)
        assert same(row["Share of the limit (%)"], share * 100)
        broken = any(target.name in miss for miss in chosen.violations)
        odds = chosen.get_limit(target.name)
        held = odds.status if odds else "met"
        assert (held == "missed") == broken
        assert (row["Verdict"], entry["holds"]) == (held, not broken)
        assert bar["state"] == held
    assert (plan.verdict == "at_risk") == bool(chosen.risks) and not chosen.violations


def test_what_is_planned_for_and_what_stays_free_is_the_same_everywhere(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    found, lines = serialize_answer(answer_of(plan)), format_answer(answer_of(plan), detailed=True)
    assert found["planned_rps"] == pytest.approx(
        compute_offered_rps(plan.scenario, chosen.prediction)
    )
    free = compute_free_capacity(plan.scenario, chosen.prediction)
    assert found["headroom"] == pytest.approx(free)
    assert f", {free:.0%} free at {format_number(found['planned_rps'])}" in lines
    if plan.scenario.workload.rate is not None:
        row = layout_study.build_slo_table(plan.scenario, chosen).iloc[-1]
        assert row["Limit"] == pytest.approx(found["planned_rps"])
        assert 1 - row["Limit"] / row["Predicted"].mid == pytest.approx(free)
        assert f"{max(free, 0):.0%} of it is free" in describe_headroom(answer_of(plan))


def test_the_tail_that_is_drawn_is_the_one_that_is_stated(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    found = run_simulation(chosen.deployment, chosen.prediction.workload)
    table = tail_latency.build_latency_table(found, plan.scenario.slo_targets).set_index("Latency")
    for metric, point, value in cells(performance, "get_for_display"):
        assert same(table.loc[metric.upper(), f"{point} (ms)"], value), (metric, point)
    assert table.loc["Queue", "p99 (ms)"].mid == pytest.approx(performance.queue * 1e3, nan_ok=True)
    assert (
        found.num_requests == performance.num_simulated_requests
        and found.preemptions == performance.preemptions
    )
    assert same(build_tail_row(found)["p99 TTFT (ms)"], performance.ttft["p99"] * 1e3)


def test_plan_json_says_what_the_plan_says(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    found = serialize_answer(answer_of(plan))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    for metric, point, value in cells(performance):
        assert found["predicted"][f"{metric}_ms"][point] == ends(value), (metric, point)
    for name in ("output_tps", "request_tps"):
        assert found["predicted"][name] == ends(getattr(performance, name))
    for name in ("kv_usage", "kv_usage_p99"):
        assert found["predicted"][name] == getattr(performance, name)
    assert found["predicted"]["preemptions_per_request"] == performance.preemptions
    capacity = get_capacity_rps(plan.scenario, performance)
    assert capacity and found["capacity_rps"] == ends(capacity)
    assert found["headroom"] == pytest.approx(1 - found["planned_rps"] / found["capacity_rps"][0])
    assert (found["verdict"], found["reasons"]) == (plan.verdict, list(plan.reasons))
    layout, args = chosen.deployment.layout, chosen.deployment.args
    assert found["model"] == plan.scenario.model and found["gpus"] == layout.num_gpus
    assert (
        found["layout"]["tp"] * found["layout"]["pp"] * found["layout"]["dp"] * layout.replicas
        == found["gpus"]
    )
    assert found["engine_args"]["max_num_seqs"] == args.max_num_seqs
    if plan.runner_up:
        assert found["runner_up"]["usd_per_hour"] == ends(
            plan.runner_up.prediction.usd_per_hour_interval
        )
    if chosen.usd_per_hour:
        assert found["usd_per_hour"][0] == chosen.usd_per_hour
        month = (
            None
            if plan.scenario.offline
            else [each * 24 * 365.25 / 12 for each in found["usd_per_hour"]]
        )
        assert found["usd_per_month"] == (month and pytest.approx(month))
        side, tokens_per_s = get_billed_tokens(plan, performance)
        per_token = chosen.usd_per_hour / 3600 / tokens_per_s * 1e6
        assert found[f"usd_per_mtok_{side}"][0] == pytest.approx(per_token)
    if plan.scenario.workload.rate is not None:
        assert found["headroom"] >= plan.scenario.headroom - 1e-9


def get_billed_tokens(plan: Plan, performance: Performance) -> tuple[str, float]:
    """The kind of token that is priced, and how many a second: prompts, where there are no answers."""
    load = plan.scenario.workload
    if load.output.max_tokens > 1:
        return "output", performance.output_tps.mid
    return "prompt", performance.request_tps.mid * load.prompt.mean


def test_the_terminal_says_what_the_plan_says(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    text = format_answer(answer_of(plan), detailed=True)
    verdict, *rest = text.splitlines()
    assert {"holds": "MEETS TARGETS", "at_risk": "AT RISK"}[plan.verdict] in verdict
    assert f"{format_probability(plan.probability)} likely to meet every target" in verdict
    cells = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in rest)
    lines = dict(pair for pair in cells if len(pair) == 2)
    deployment = chosen.deployment
    assert lines["Rent"].startswith(f"{deployment.num_gpus} x {deployment.gpu.name}, ")
    assert lines["Model"] == plan.scenario.model
    capacity = get_capacity_rps(plan.scenario, performance)
    assert capacity and read_number(lines["Capacity"]) == pytest.approx(capacity.mid, rel=6e-3)
    if plan.scenario.workload.rate is None:
        assert f"send {format_number(performance.request_tps.mid)} requests/s" in lines["Traffic"]
    tokens = chosen.prediction.memory.pool.reported_tokens
    assert read_number(lines["KV cache"]) == pytest.approx(tokens, rel=6e-3)
    for target in plan.scenario.slo_targets:
        value = performance.get_for_display(target.metric, target.percentile)
        if math.isfinite(value.mid):
            factor = 1e-3 if " ms" in lines[target.name].partition("(")[0] else 1.0
            shown = read_number(lines[target.name]) * factor
            assert shown == pytest.approx(value.mid, rel=0.06)
    if chosen.usd_per_hour:
        side, tokens_per_s = get_billed_tokens(plan, performance)
        per_token = chosen.usd_per_hour / 3600 / tokens_per_s * 1e6
        assert f"/M {side}" in lines["Cost"]
        amounts = [read_number(each) for each in lines["Cost"].split("$")[1:]]
        hours = estimate_run_hours(plan.scenario, chosen)
        total = chosen.usd_per_hour * (hours.mid if hours else 24 * 365.25 / 12)
        assert amounts[0] == pytest.approx(round(total, 2) if total < 10 else total, rel=6e-3)
        assert amounts[1] == pytest.approx(chosen.usd_per_hour, rel=6e-3)
        assert amounts[-1] == pytest.approx(per_token, rel=0.02, abs=0.006)
    requests = format_number(performance.num_simulated_requests)
    assert f"{requests} simulated requests" in lines["Basis"]


def read_number(text: str) -> float:
    """Read the first number of a text: 11,500 or 644k."""
    number, unit = re.findall(r"([\d.,]*\d)([kM]?)", text)[0]
    return float(number.replace(",", "")) * {"k": 1e3, "M": 1e6}.get(unit, 1.0)


def test_files_say_what_the_plan_says(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    texts = render_artifacts(chosen.prediction, plan.scenario.slo_targets)
    memory, args, layout = (
        chosen.prediction.memory,
        chosen.deployment.args,
        chosen.deployment.layout,
    )
    checklist = texts["checklist.md"]
    for metric in ("TTFT", "ITL"):
        value = performance.get_for_display(metric.lower(), "p99") * 1e3
        assert f"p99 {metric} within {value:.0f} ms" in checklist or math.isnan(value.mid)
    assert f"about {memory.pool.reported_tokens:,} tokens, maximum concurrency" in checklist
    assert f"available KV cache memory is {memory.kv_available / GIB:.1f} GiB" in checklist
    assert f"stays near {100 * performance.kv_usage:.0f}%" in checklist
    if chosen.usd_per_hour:
        assert f": ${chosen.usd_per_hour:,.2f} an hour" in checklist
    for target in plan.scenario.slo_targets:
        assert f"- [ ] {target}\n" in checklist
    command = build_launch(chosen.prediction).command
    assert serialize_answer(answer_of(plan))["command"] == command
    for number in (args.max_num_seqs, args.max_model_len, layout.tp):
        if number > 1:
            assert str(number) in command
    for word in ([] if layout.tp == 1 else [str(layout.tp)]) + [plan.scenario.model]:
        assert word in command and word in texts["serve.sh"]
    if "alerts.yml" in texts:
        assert all(str(target) in texts["alerts.yml"] for target in plan.scenario.slo_targets)
        assert f"expects {performance.preemptions:.3g} preemptions" in texts["alerts.yml"]


def test_the_benchmark_states_what_its_own_runs_are_predicted_to_do(
    plan: Plan, chosen: Candidate
) -> None:
    script = render_artifacts(chosen.prediction, plan.scenario.slo_targets)["bench.sh"]
    steps = dict(re.findall(r'"([\d.]+) (\d+)"', script))
    for rate, found in predict_benchmark_ramp(chosen.prediction).items():
        (line,) = re.findall(rf"^#   {rate:<12.3g} (.*)$", script, re.MULTILINE)
        stated = " ".join(
            f"{found.get(target.metric, target.percentile) * 1e3:.0f}"
            for target in list_benchmark_targets(plan.scenario.slo_targets)
        )
        assert " ".join(line.split()) == stated or found.saturated
        assert int(steps[f"{rate:.3g}"]) == count_benchmark_prompts(rate)


def test_a_row_of_the_plan_predicts_the_plan(
    plan: Plan, chosen: Candidate, performance: Performance
) -> None:
    if isinstance(plan.scenario.workload.trace, SessionTrace):
        pytest.skip("rows have no sessions")
    found = predict_row(row_of(plan))
    assert found["status"] == "ok", found.get("error")
    for metric, point, value in cells(performance):
        name = f"{metric}_ms_{point}"
        stated = [
            found[name],
            *(found[f"{name}{end}"] for end in ("_lo", "_hi") if f"{name}{end}" in found),
        ]
        assert stated == pytest.approx(
            [value.mid, value.lo, value.hi][: len(stated)], nan_ok=True
        ), name
    for name, value in (
        ("capacity_rps", performance.capacity),
        ("output_tps", performance.output_tps),
    ):
        assert [found[name], found[f"{name}_lo"], found[f"{name}_hi"]] == pytest.approx(
            [value.mid, value.lo, value.hi]
        )
    assert found["kv_usage_p99"] == performance.kv_usage_p99
    assert found["queue_ms_p99"] == pytest.approx(performance.queue * 1e3)
    assert found["decode_batch_mean"] == performance.decode_batch
    assert found["num_gpu_blocks"] == chosen.prediction.memory.pool.num_blocks
    assert found["usd_per_hour"] == chosen.usd_per_hour
    if per_token := chosen.prediction.usd_per_mtok_output:
        assert found["usd_per_mtok_output"] == pytest.approx(per_token.mid)


def test_every_candidate_shown_first_is_the_chosen_one(plan: Plan, chosen: Candidate) -> None:
    """The first of every table is the plan, and no other row holds for less."""
    assert plan.best is chosen
    holding = [candidate.cost_key for candidate in plan.candidates if candidate.is_confident]
    assert min(holding, default=None) == (None if plan.verdict == "at_risk" else chosen.cost_key)
