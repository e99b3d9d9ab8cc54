"""What tables and charts show of a plan are the plan's own figures."""

import re
from dataclasses import replace

import altair as alt
import pandas as pd
import pytest
from shipped import answer_of, drawn_rows, plan_of, small_plan

from planner.analysis import layout_tables as layout_study
from planner.analysis import load_curves, tail_latency
from planner.analysis.latency_rows import list_mean_latencies
from planner.analysis.load_curves import get_load
from planner.core.intervals import Interval
from planner.core.number_format import format_usd
from planner.core.units import GIB
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import PriceSelection
from planner.planning import search
from planner.planning.candidate import describe_deployment
from planner.planning.evaluation import evaluate_candidate
from planner.planning.framework_choice import WorkloadTraits, choose_framework
from planner.planning.search import Plan, search_deployments
from planner.planning.simulation_runs import run_simulation
from planner.planning.slo import SloTarget
from planner.planning.tolerance import simulate_candidate
from planner.planning.what_if import WhatIf
from planner.ui import plan_tables as tables
from planner.ui.charts import base as charts
from planner.ui.charts import latency as charts_latency
from planner.ui.charts import layout as charts_layout
from planner.ui.charts import memory as charts_memory
from planner.ui.charts import simulation as charts_replay
from planner.ui.charts import summary as charts_summary
from planner.ui.decision_memo import build_memo


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("edge-8b-24gb")


@pytest.fixture(scope="module")
def nothing(plan: Plan) -> Plan:
    """The same question with a limit that light does not keep."""
    return search_deployments(replace(plan.scenario, slo_targets=(SloTarget("ttft", "p95", 1e-4),)))


# -------------------------------------------------------------------------------------------------------------
# tables


def test_alternatives_come_from_best_to_worst_and_say_what_each_is(plan: Plan) -> None:
    table = tables.build_candidate_table(answer_of(plan))
    states = list(table["targets"])
    order = [state == "missed" for state in states]
    assert order == sorted(order) and states[0] == layout_study.get_slo_label(plan.chosen)
    assert list(table["deployment"]) == [
        describe_deployment(c.deployment) for c in plan.candidates[: len(table)]
    ]
    for wanted in ("met", "at risk"):
        bills = [
            float(usd)
            for usd, state in zip(table["USD per hour"], states, strict=True)
            if state == wanted
        ]
        assert bills == sorted(bills)


def test_the_counts_add_up(plan: Plan) -> None:
    evaluated, closer, meeting, *ruled_out = map(
        int, re.findall(r"\d+", tables.describe_search_effort(answer_of(plan)))
    )
    assert (evaluated, meeting) == (
        len(plan.candidates),
        sum(c.is_feasible for c in plan.candidates),
    )
    assert (
        0
        < closer
        == sum(c.prediction.performance.num_simulated_requests > 0 for c in plan.candidates)
    )
    assert sum(ruled_out[1:]) == (ruled_out[0] if ruled_out else 0) == len(plan.rejected)


@pytest.mark.exhaustive
def test_where_nothing_meets_the_nearest_stands_first(nothing: Plan) -> None:
    assert nothing.chosen is None and nothing.best is not None
    assert tables.summarize_plan(answer_of(nothing)).startswith("No plan meets the targets.")
    first = tables.build_candidate_table(answer_of(nothing)).iloc[0]
    (promise,) = nothing.scenario.slo_targets
    over = nothing.best.prediction.performance.ttft["p95"].mid / promise.seconds
    assert first["deployment"] == describe_deployment(nothing.best.deployment)
    assert over > 1 and first["what is missing"].startswith("p95 TTFT ")
    shares = [c.limit_utilization for c in nothing.candidates[:3]]
    assert shares == sorted(shares)
    table = layout_study.build_slo_table(nothing.scenario, nothing.best)
    assert table["Verdict"][0] == "missed" and table["Share of the limit (%)"][0].mid > 100
    assert "runner-up" not in tables.explain_choice(answer_of(nothing))
    assert search.get_reference_deployment(nothing) is nothing.best.deployment


def test_a_change_costs_what_its_own_plan_costs(plan: Plan) -> None:
    dearer = search_deployments(
        replace(
            plan.scenario,
            prices=PriceSelection({"RTX-3090": 0.94, "RTX-4090": 9, "A10G": 9, "L4": 9}),
        )
    )
    memo = build_memo(answer_of(plan, (WhatIf("dearer", dearer),)))
    _, rented, usd, change, *_ = memo.changes[0]
    assert (usd, rented) == (format_usd(0.94 * 730.5), memo.options[0].name)
    assert describe_deployment(dearer.chosen.deployment) == describe_deployment(
        plan.chosen.deployment
    )
    assert change == f"{0.94 / plan.chosen.usd_per_hour - 1:+.0%}"


def test_limits_that_change_nothing_when_relaxed_are_one_row() -> None:
    """Two rows of the same deployment at the same price said the same thing twice."""
    own = small_plan({"service_level": {"ttft": {"p95": 2000, "p99": 4000}, "tpot": {"p95": 80}}})
    texts = [f"limit of {each.name} relaxed from 1 s to 2 s" for each in own.scenario.slo_targets]
    changes = [WhatIf(text, own) for text in ("half the traffic", *texts[:2], "doubled")]
    first, joined, last = build_memo(answer_of(own, changes)).changes
    assert (first[0], last[0]) == ("Half the traffic", "Doubled")
    assert "first token (p95)" in joined[0] and "first token (p99)" in joined[0]
    assert joined[3] == "same" and joined[4].endswith("or more")
    assert len(build_memo(answer_of(own, changes[:2])).changes) == 2


def test_a_ramp_in_a_table_is_in_ms(plan: Plan) -> None:
    found = plan.chosen.prediction.performance
    row = tables.build_ramp_table({0.5: found}).iloc[0]
    assert row["requests/s"] == "0.5" and row["p99 TTFT (ms)"].mid == pytest.approx(
        found.ttft["p99"].mid * 1e3
    )


def test_every_promise_is_told_with_its_share(plan: Plan) -> None:
    *targets, capacity = layout_study.build_slo_table(plan.scenario, plan.chosen).to_dict("records")
    assert capacity["Limit"] == plan.scenario.workload.rate
    assert capacity["Predicted"].mid == pytest.approx(
        plan.chosen.prediction.performance.capacity.mid
    )
    for target, row in zip(plan.scenario.slo_targets, targets, strict=True):
        value = getattr(plan.chosen.prediction.performance, target.metric)[target.percentile]
        assert row["Predicted"].mid == pytest.approx(1e3 * value.mid)
        assert row["Share of the limit (%)"].mid == pytest.approx(100 * value.mid / target.seconds)
        assert row["Verdict"] == "met" or value.hi > target.seconds


def test_offline_promises_are_broken_where_the_plan_says_so() -> None:
    """The deadline with the headroom that the scenario asks for."""
    plan = plan_of("offline-batch")
    asked, deployment = plan.scenario, plan.chosen.deployment
    tight = replace(asked, headroom=0.6)
    cases = (
        (asked, plan.chosen), (asked, evaluate_candidate(asked, deployment, 1)),
        (tight, evaluate_candidate(tight, deployment, deployment.layout.replicas)),
    )  # fmt: skip
    held = [layout_study.build_slo_table(*case)["Verdict"][0] != "missed" for case in cases]
    assert held == [candidate.is_feasible for _, candidate in cases] == [True, False, False]


def test_a_pipeline_of_p_stages_is_idle_p_minus_1_of_m_plus_p_minus_1() -> None:
    """GPipe (arXiv 1811.06965): the bubble is (p - 1) / (m + p - 1)."""
    found = layout_study.build_bubble_table((4,), most=12).set_index("Micro-batches in a row")[
        "Idle (% of GPU time)"
    ]
    assert found[1] == pytest.approx(75) and found[12] == pytest.approx(100 * 3 / 15)


def test_what_one_replica_promises_it_keeps_and_no_more(plan: Plan) -> None:
    asked, alone = replace(plan.scenario, headroom=0.0), plan.chosen.deployment.with_replicas(1)
    rate = layout_study.estimate_max_rps(asked, alone)
    meets = [
        evaluate_candidate(
            replace(asked, workload=asked.workload.with_rate(share * rate)), alone, 1
        ).is_feasible
        for share in (0.97, 1.03)
    ]
    assert meets == [True, False]


def test_littles_law_counts_who_is_there(plan: Plan) -> None:
    found = plan.chosen.prediction.performance
    assert found.request_tps.mid == pytest.approx(plan.scenario.workload.rate)
    assert simulate_candidate(plan.scenario, plan.chosen).prediction.performance == found


# -------------------------------------------------------------------------------------------------------------
# charts


def test_charted_promises_and_prices_are_the_plans(plan: Plan) -> None:
    bars = drawn_rows(charts_summary.plot_slos(answer_of(plan).best), "target")
    for target in plan.scenario.slo_targets:
        value = getattr(plan.chosen.prediction.performance, target.metric)[target.percentile]
        drawn, limit = bars[str(target)], target.seconds
        assert [drawn[end] for end in ("lo", "mid", "hi")] == pytest.approx(
            [value.lo / limit, value.mid / limit, value.hi / limit]
        )
    rows = drawn_rows(charts_summary.plot_prices(answer_of(plan)), "deployment")
    for candidate in plan.candidates[:6]:
        assert rows[describe_deployment(candidate.deployment)]["cost"] == candidate.usd_per_hour
    assert rows[describe_deployment(plan.chosen.deployment)]["state"] == layout_study.get_slo_label(
        plan.chosen
    )


@pytest.mark.parametrize("traits", [{}, {"prefix_reuse": True, "structured_or_agentic": True}])
@pytest.mark.parametrize("gpus", [["H100-SXM"], ["MI300X"], ["H100-SXM", "L40S"]])
def test_the_path_of_the_framework_choice_ends_at_its_points(
    traits: dict[str, bool], gpus: list[str]
) -> None:
    """The coloured boxes add up to the points by which the frameworks are ranked."""
    choice = choose_framework(WorkloadTraits(**traits), map(get_gpu, gpus))
    scores = {score.title: score.points for score in choice.ranked if not score.ruled_out}
    taken = [step for step in choice.list_steps() if step.is_taken]
    for title, points in scores.items():
        assert sum(step.points.get(title, 0) for step in taken) == points
    drawn = drawn_rows(charts_summary.plot_framework_path(choice), "asked")
    last = drawn[choice.chosen.title]
    assert last["taken"] and all(
        f"{title} {points}" in last["gains"] for title, points in scores.items()
    )
    assert drawn["prefix reuse?"]["answer"] == ("yes" if traits else "no")


def test_a_memory_bar_is_as_long_as_the_card(plan: Plan) -> None:
    memory = plan.chosen.prediction.memory
    for chart in (
        charts.plot_memory_budget({"the plan": memory}),
        charts_layout.plot_candidate_memory({"the plan": plan.chosen}),
    ):
        (rows,) = chart.to_dict()["datasets"].values()
        assert sum(row["gib"] for row in rows) == pytest.approx(memory.total_bytes / GIB)
        assert {row["part"]: row["gib"] for row in rows}["weights"] == pytest.approx(
            memory.weights.mid / GIB, rel=1e-6
        )


def test_a_line_has_its_interval_and_its_limit() -> None:
    data = pd.DataFrame({"load": [1, 2], "ms": [Interval(1, 2, 4), Interval(2, 3, 5)]})
    chart = charts.plot_lines(data, "load", "ms", limit=4.5)
    rows = drawn_rows(chart, "load")
    assert [(rows[n]["lo"], rows[n]["mid"], rows[n]["hi"]) for n in (1, 2)] == [
        (1, 2, 4),
        (2, 3, 5),
    ]
    assert 4.5 in drawn_rows(chart, "limit")


def test_a_sweep_marks_what_does_not_fit() -> None:
    data = pd.DataFrame(
        {
            "share": [0.5, 0.9],
            "KV (GiB)": [Interval(0, 0, 0), Interval(1, 2, 3)],
            "status": ["does_not_fit", "ok"],
        }
    )
    rows = drawn_rows(charts_memory.plot_memory_sweep(data, chosen=0.9), "status")
    assert rows["does not fit"]["mid"] == 0 and rows["ok"]["share"] == 0.9


def test_one_requests_life_is_its_mean_times(plan: Plan) -> None:
    found = plan.chosen.prediction.performance
    text = charts_latency.plot_request_timeline(*list_mean_latencies(found), 120).to_json()
    for words in (f"TTFT {found.ttft['mean'].mid * 1e3:,.0f} ms", f"ITL {found.itl['mean'].mid * 1e3:,.1f} ms",
                  f"E2E {found.e2e['mean'].mid:,.2f} s"):  # fmt: skip
        assert words in text


def test_a_drawn_tail_passes_through_the_stated_percentiles(plan: Plan) -> None:
    found = run_simulation(plan.chosen.deployment, plan.chosen.prediction.workload)
    data = tail_latency.build_tail_curve(found, "ttft", plan.chosen.prediction.performance)
    drawn = charts_replay.plot_tails({"TTFT": data}, {"TTFT": [("p95", 1000.0)]})
    rows, (label,) = (
        drawn_rows(drawn, "name"),
        (one for one in drawn.hconcat[0].layer if "text" in str(one.mark)),
    )
    assert label.encoding.x.shorthand == "from:Q"  # where the curve is lowest
    stated = plan.chosen.prediction.performance.ttft
    for point in ("p50", "p95", "p99"):
        assert rows[point]["mid"] == pytest.approx(stated[point].mid * 1e3, rel=0.01)
    assert data["mid"].is_monotonic_decreasing  # by the share that is slower, from few to all


def test_the_chosen_one_is_drawn_where_it_stands(plan: Plan) -> None:
    data = layout_study.build_candidate_frame(
        plan, [c for c in plan.candidates if c.prediction.can_start]
    )
    row = drawn_rows(charts_layout.plot_pareto_front(data, "p95 TTFT (ms)"), "chosen")[True]
    assert row["cost"] == plan.chosen.usd_per_hour
    assert row["mid"] == pytest.approx(plan.chosen.prediction.performance.ttft["p95"].mid * 1e3)


def test_a_crowd_is_drawn_with_all_its_samples() -> None:
    data = pd.DataFrame({"Seconds": [0.0, 1.0], "running": [3, 4], "waiting": [0, 9]})
    (rows,) = charts_replay.plot_timelines({"burst": data}).to_dict()["datasets"].values()
    assert sorted((row["kind"], row["requests"]) for row in rows) == [
        ("running", 3), ("running", 4), ("waiting", 0), ("waiting", 9)
    ]  # fmt: skip


def test_labels_have_room_for_a_wider_font():
    """DejaVu Sans takes 246 px at 11 px where Liberation Sans takes 224 (measured in Chromium)."""
    label = "TP4 x 2 replicas, 8 x H100-SXM, FP8 weights"
    drawn = charts.render_svg(
        alt.Chart(pd.DataFrame({"what": [label], "v": [1]})).mark_bar().encode(x="v", y="what")
    )
    width, left, across = re.search(
        r'width="([\d.]+)".*?viewBox="(-?\d+) 0 ([\d.]+)', drawn
    ).groups()
    assert int(left) <= 224 - 246 and width == across


def test_the_plan_lies_inside_the_axes_of_its_curve() -> None:
    """A curve that ends before the plan's load must not push the plan out of the picture."""
    curve = [(load / 10, 0.1, 0.2, 0.4) for load in range(1, 18)]
    chart = charts_summary.plot_load_curve(curve, "requests/s", 3.0, Interval(20, 26, 60), 1.0)
    domain = chart.to_dict()["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert domain == [0, 3.0]


def test_no_curve_goes_through_a_load_that_the_closed_form_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    best = plan.best
    assert best is not None
    performance = best.prediction.performance
    assert performance is not None
    target, rate = plan.scenario.slo_targets[0], get_load(plan.scenario.workload)[1]
    for reached, drawn in ((0.6, False), (1.2, True)):
        points = [(rate * reached * share / 5, performance) for share in range(1, 6)]
        monkeypatch.setattr(load_curves, "sweep_performance", lambda *_, points=points: points)
        assert bool(load_curves.sweep_stated_latency(plan.scenario, best, target)) is drawn
