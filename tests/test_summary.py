"""What the first pages say holds: machines and money add up, room to grow is room, and what would pass does pass."""

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from shipped import answer_of, small_plan, small_scenario

from planner.answers import serialize_answer
from planner.answers.answer import NearestRun, Relaxation, WaysOut
from planner.answers.build import _explain_local_model, build_offer
from planner.answers.deployment_wording import explain_outside
from planner.answers.growth_wording import describe_day, describe_headroom, explain_growth
from planner.answers.wording import BASIS_LABELS, describe_cheaper_odds
from planner.core.number_format import format_number, format_seconds, format_usd
from planner.engines.deployment import choose_machines
from planner.hardware.gpus import get_gpu
from planner.planning import autoscaling
from planner.planning.confidence import estimate_choice_confidence
from planner.planning.evaluation import check_against_slos
from planner.planning.scenario import CandidateGpu
from planner.planning.scenario_schema import ApiEntry
from planner.planning.search import Plan, search_analytically, search_deployments
from planner.planning.tolerance import simulate_candidate
from planner.planning.what_if import find_unlisted_gpu, run_what_ifs
from planner.ui import plan_tables as tables
from planner.ui.decision_memo import build_memo
from planner.ui.plan_panel import build_page
from planner.ui.plan_text import format_answer as answered
from planner.ui.plan_text import format_scenario


def plan(ttft: float = 2000, rate: float = 9) -> Plan:
    return small_plan({"service_level.ttft.p95": ttft, "workload.rate": rate})


@cache
def find_plan_at_risk() -> Plan:
    """Between the limits that hold and those that nothing meets."""
    missed, held = 60.0, 600.0
    while (found := plan(limit := math.sqrt(missed * held))).verdict != "at_risk":
        missed, held = (missed, limit) if found.verdict == "holds" else (limit, held)
    return found


def test_machines_hold_whole_replicas() -> None:
    assert choose_machines(1, 16, (8,)) == (8, 8)
    assert choose_machines(3, 4, (8,)) == (8, 8)
    assert choose_machines(2, 6, (8,)) == (8, 8)  # six GPUs: a machine of eight holds one of them
    assert choose_machines(2, 16, (8,)) == (8, 8, 8, 8)


def test_a_month_has_730_hours_and_a_bill_is_the_middle_quotes() -> None:
    rows = dict(tables.build_rental_table(answer_of(plan())).itertuples(index=False))
    hour, month = (
        float(str(rows[f"cost per {per} (USD)"]).replace(",", "")) for per in ("hour", "month")
    )
    chosen = plan().chosen
    assert chosen and hour == pytest.approx(chosen.usd_per_hour, abs=0.01)
    assert month == pytest.approx(730.5 * hour, rel=0.01)
    assert "2026" in rows["price of a GPU"]


def test_traffic_may_grow_by_what_is_said_until_headroom_and_capacity_are_used_up() -> None:
    asked, chosen = plan().scenario, plan().chosen
    assert chosen
    unhurried = replace(plan(), scenario=replace(asked, slo_targets=()))
    said = re.sub(r"\([^)]*\)", "", describe_headroom(answer_of(unhurried)))
    grow, over = (int(n) / 100 for n in re.findall(r"by (\d+)%", said))
    for more, headroom in ((grow, asked.headroom), (over, 0.0)):
        for extra, fits in ((-0.01, True), (0.02, False)):
            rate = (asked.workload.rate or 0) * (1 + more + extra)
            busier = replace(
                asked,
                headroom=headroom,
                slo_targets=(),
                workload=replace(asked.workload, rate=rate),
            )
            assert (
                check_against_slos(
                    busier, replace(chosen.prediction, workload=busier.workload)
                ).is_feasible
                == fits
            )


def test_traffic_may_grow_until_the_first_promise_breaks_where_that_comes_before_the_capacity() -> (
    None
):
    """A tight E2E is used up by steps that grow with the batch, at half the capacity; both ways to say where agree."""
    level = {"e2e": {"p95": 13_000}, "ttft": {"p95": 9000}}
    arguments = {"max_num_batched_tokens": 512}  # of both: a search by simulation tunes them
    one = small_plan(
        {"gpus.0.at_most": 1, "workload.rate": 2, "service_level": level, "engine_args": arguments}
    )
    told = {
        stated: explain_growth(answer_of(found))
        for stated, found in ((True, one), (False, search_analytically(one.scenario)))
    }
    rates = {
        stated: float(re.findall(r"beyond ([\d.]+)", said)[0]) for stated, said in told.items()
    }
    grown = float(re.findall(r"by (\d+)%", told[True])[0]) / 100
    chosen, asked = one.chosen, one.scenario
    assert chosen and chosen.prediction.performance and chosen.prediction.performance.capacity
    assert rates[True] == pytest.approx(2 * (1 + grown), rel=0.02)
    assert rates[True] < 0.6 * chosen.prediction.performance.capacity.mid
    assert rates[False] == pytest.approx(rates[True], rel=0.15)
    assert all("p95 E2E" in said and "overloaded" not in said for said in told.values())
    assert (
        told[True] in describe_headroom(answer_of(one))
        and told[True] in answered(answer_of(one), detailed=True)
        and "estimate" in told[False]
    )
    for share, meets in ((0.9, True), (1.2, False)):
        busier = replace(asked, workload=replace(asked.workload, rate=rates[True] * share))
        found = simulate_candidate(busier, chosen)
        assert found.is_feasible == meets and found.violated_constraints == (
            () if meets else ("p95 E2E",)
        )


def test_a_lost_replica_is_replayed_without_headroom() -> None:
    several = next(
        each
        for each in (plan(rate=rate) for rate in range(9, 30))
        if each.chosen and each.chosen.deployment.layout.replicas > 1
    )
    chosen = several.chosen
    assert chosen
    loss = answer_of(several).replica_loss
    replicas = chosen.deployment.layout.replicas
    assert loss and loss.replicas == replicas
    fewer = replace(chosen, deployment=chosen.deployment.with_replicas(replicas - 1))
    left = simulate_candidate(replace(several.scenario, headroom=0.0), fewer)
    assert loss.meets == left.is_feasible
    alone = answer_of(plan(rate=1)).replica_loss
    assert alone and alone.kind == "single" and not alone.meets


def test_what_would_pass_passes() -> None:
    stuck = plan(ttft=8, rate=2)
    assert stuck.chosen is None and "No plan meets" in tables.summarize_plan(answer_of(stuck))
    limit = (
        tables.build_relaxation_table(answer_of(stuck))
        .set_index("change")
        .loc["a limit for p95 TTFT of", "with the asked probability"]
    )
    relaxed = replace(
        stuck.scenario,
        slo_targets=plan(ttft=1.02 * float(limit.split()[0]), rate=2).scenario.slo_targets,
    )
    best = stuck.best
    assert best
    found = simulate_candidate(relaxed, best)
    assert found.is_feasible and not found.at_risk
    table = tables.build_candidate_table(answer_of(stuck))
    assert (
        set(table["figures"]) <= {"simulated", "estimate"}
        and table["figures"].iloc[0] == "simulated"
    )
    over = format_seconds(found.prediction.performance.ttft["p95"].mid, 0.008)
    assert table["what is missing"].iloc[0] == f"p95 TTFT is {over}, limit 8 ms"


def test_what_was_measured_is_named_as_what_it_is() -> None:
    """A run of the very model on the very GPU is more than one of its family; one on another GPU is less."""
    best = answer_of(plan()).best
    assert best and best.performance
    for basis, model, gpu, said in (
        ("measured", True, True, "measured on this GPU with this very model"),
        ("measured", False, True, "measured on this GPU with models of this family"),
        ("measured", True, False, "measured on this GPU with models of this family"),
        ("model-transfer", False, True, "measured on this GPU, but with models of other families"),
        ("model-transfer", False, False, "and on other GPUs"),
    ):
        performance = replace(best.performance, basis=basis)
        offer = replace(
            best, nearest_run=NearestRun("a run", None, model, gpu),
            prediction=replace(best.prediction, performance=performance),
        )  # fmt: skip
        assert said in BASIS_LABELS[offer.basis]
    known = {offer.basis for offer in answer_of(plan()).candidates}
    assert known <= set(BASIS_LABELS)


def test_the_memo_explains_its_short_names_and_every_gpu_that_is_allowed() -> None:
    gpus = [{"gpu": "L40S", "at_most": 4}, {"gpu": "H100-SXM", "at_most": 8}]
    memo = build_memo(answer_of(small_plan({"gpus": gpus, "layout": {"tp": 2}})))
    assert "TP2: each layer is split over 2 GPUs" in memo.deployment
    assert "BF16: 16 bits per weight" in memo.deployment or "FP8: 8 bits" in memo.deployment
    named = [option.name for option in memo.options]
    for name in ("L40S", "H100-SXM"):
        assert any(name in each for each in named) or name in memo.capacity_note


def test_a_model_that_is_a_path_says_where_its_weights_must_lie() -> None:
    best = answer_of(plan()).best
    assert best
    local = replace(best.deployment.model, name="work/config.json", local_name="work")
    deployment = replace(best.deployment, model=local)
    offer = replace(best, prediction=replace(best.prediction, deployment=deployment))
    (said,) = _explain_local_model(offer)
    assert "the folder that holds its weights" in said and not list(_explain_local_model(best))


def test_limits_that_have_to_give_way_together_are_one_row() -> None:
    """A longer limit for TPOT alone meets nothing while TTFT is missed as well."""
    found = (
        Relaxation("limit", "p95 TTFT", 1.0, 26.0, 60.0),
        Relaxation("limit", "p95 TPOT", 0.04, 0.039, 0.0402),
        Relaxation("rate", "rate", 3.0, 1.26, 0.97),
    )
    answer = replace(answer_of(plan(ttft=8, rate=2)), ways_out=WaysOut(None, found))
    table = tables.build_relaxation_table(answer)
    assert len(table) == 2 and list(table.iloc[1])[1:] == ["3", "1.26", "0.97"]
    assert "p95 TTFT and p95 TPOT" in table.iloc[0]["change"]
    assert table.iloc[0]["with the asked probability"].count(";") == 1
    text = " ".join(answered(answer).split())
    assert "0.97 requests/s instead of 3 (80% likely)" in text


def test_a_cheaper_plan_is_told_with_its_own_probability_beside_that_of_any() -> None:
    """One of several holds in more draws than the likeliest of them alone."""
    answer = answer_of(plan())
    choice, other = answer.choice, answer.chosen
    assert choice and other
    likely = replace(choice, p_cheaper=0.91, likeliest_cheaper=replace(other, probability=0.61))
    text = describe_cheaper_odds(replace(answer, choice=likely))
    assert "91% likely that some cheaper plan does" in text
    assert f", {other.placement} alone 61%; " in text


def test_the_memo_says_what_plan_json_says() -> None:
    memo, facts = build_memo(answer_of(plan())), serialize_answer(answer_of(plan()))
    hour, odds = facts["usd_per_hour"][0], facts["probability"]
    what = f"{facts['gpus_rented']} \N{MULTIPLICATION SIGN} {facts['gpu']}"
    assert memo.title == f"Rent {what} for {format_usd(730.5 * hour)} a month"
    assert memo.verdict == "Meets targets" and facts["verdict"] == "holds"
    tiles = {tile.name: tile.value for tile in memo.tiles}
    assert len(tiles) == 4 and tiles["Probability"] == f"{odds:.0%}"
    assert 2 <= len(memo.options) <= 3
    for bar, target in zip(memo.bars, facts["service_level"], strict=False):
        assert bar.mid == pytest.approx(target["predicted_ms"][0] / target["limit_ms"])
        assert (bar.state == "missed") != target["holds"]
    assert memo.chart.startswith("<svg") and memo.ramp
    assert memo.ramp_heads == ("first token (p95)", "time per token (p95)")
    assert all(len(row) == len(memo.ramp_heads) + 2 for row in memo.ramp)


BY_TOMORROW = {
    "workload.rate": None, "workload.requests": 20_000, "workload.within_hours": 4,
    "service_level": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "load", [{}, BY_TOMORROW, {"workload.rate": None, "workload.concurrency": 24}], ids=len
)
def test_the_capacity_is_the_same_number_on_every_screen(load: dict[str, Any]) -> None:
    found = small_plan(load)
    capacity = serialize_answer(answer_of(found))["capacity_rps"][0]
    shown = format_number(capacity)
    tiles = {tile["name"]: tile["value"] for tile in build_page(answer_of(found))["tiles"]}
    assert tiles["Capacity"] == shown
    assert build_memo(answer_of(found)).options[0].capacity == f"{shown} requests/s"
    line = next(
        row
        for row in answered(answer_of(found), detailed=True).splitlines()
        if "  Capacity " in row
    )
    assert line.split()[1] == shown
    assert f"apacity is {shown} (" in describe_headroom(answer_of(found)) or load is BY_TOMORROW


def test_no_sentence_of_the_memo_stands_twice_and_none_is_long() -> None:
    memo = build_memo(answer_of(plan()))
    sentences = [*memo.sentences, *(text for _, text in memo.asked), memo.next_step, memo.finding]
    sentences += [text for row in memo.risks for text in row] + [text for _, text in memo.basis]
    parts = [part for text in sentences for part in re.split(r"(?<=[.;:]) ", text)]
    assert len(parts) == len({*parts})
    assert all(len(part.split()) <= 25 for part in parts)


def test_the_memo_of_a_plan_at_risk_names_the_doubt_and_asks_for_a_benchmark() -> None:
    risky = find_plan_at_risk()
    memo = build_memo(answer_of(risky))
    assert memo.verdict == "At risk" and memo.title.endswith("only after a benchmark")
    confidence = estimate_choice_confidence(risky)
    assert confidence and confidence.best_benchmark
    is_own = confidence.best_benchmark[0] is risky.chosen
    assert ("`bench.sh`" if is_own else "the scripts in `measure/`") in memo.next_step


def test_the_memo_recommends_the_api_where_it_costs_less() -> None:
    for usd, cheaper in ((1e-4, True), (1e4, False)):
        api = ApiEntry(usd_per_mtok_input=usd, usd_per_mtok_output=usd)
        bills = plan().scenario.billing_alternatives.model_copy(update={"api": api})
        asked = replace(plan(), scenario=replace(plan().scenario, billing_alternatives=bills))
        memo, found = build_memo(answer_of(asked)), asked.api_comparison
        assert found and found.is_api_cheaper == cheaper
        assert memo.title.startswith("Use the API" if cheaper else "Rent")
        assert format_usd(found.api_usd) in memo.api and format_usd(found.own_usd) in memo.api
        assert (memo.options[0].name == "API by the token") == cheaper


def test_the_memo_without_a_plan_shows_the_ways_out() -> None:
    stuck = plan(ttft=8)
    memo = build_memo(answer_of(stuck, run_what_ifs(stuck)))
    assert memo.verdict == "No plan meets the targets" and memo.title.startswith("No plan")
    assert "It misses: " in " ".join(memo.sentences)
    assert not memo.risks and not memo.ramp
    assert any(bar.state == "missed" for bar in memo.bars)
    listed = {each.gpu.name for each in stuck.scenario.gpus}
    for option in memo.options:
        gpu = option.name.split(",")[0].split()[-1]
        assert ("not on your list" in f"{option.title} {option.con}") == (gpu not in listed)


def test_seconds_where_milliseconds_are_meant_are_told_wherever_the_answer_is() -> None:
    """Light crosses a rack in nanoseconds, but no GPU reads a prompt in 2 ms: the 2 is in seconds."""
    stuck = plan(ttft=2, rate=2)
    hint = "write 2000 for 2 s"
    assert hint in " ".join(answered(answer_of(stuck)).split()) and hint in " ".join(
        build_memo(answer_of(stuck)).sentences
    )
    assert hint in " ".join(build_page(answer_of(stuck))["say"])
    assert hint in " ".join(format_scenario(stuck.scenario).split())
    assert "write" not in answered(answer_of(plan(ttft=8))) + format_scenario(plan().scenario)


def test_a_gpu_that_is_not_on_the_list_is_named_so() -> None:
    plan_on_list = plan()
    scenario, chosen = plan_on_list.scenario, plan_on_list.chosen
    assert chosen and not explain_outside(scenario, build_offer(scenario, chosen))
    found = find_unlisted_gpu(plan_on_list)
    assert found is None or found[0].deployment.gpu.name != "L40S"
    h100 = replace(plan_on_list.scenario, gpus=(CandidateGpu(get_gpu("H100-SXM"), 4),))
    assert explain_outside(h100, build_offer(h100, chosen)) == "not on your list"


def test_the_day_does_not_contradict_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet hour's tail rests on few requests: an unusual day may miss it, which no list of hours says."""
    monkeypatch.setattr(autoscaling, "MAX_REQUESTS_PER_DAY", 30_000)
    spiky = {"workload.day": [1, 1, 2, 3, 5, 8, 9, 9, 9, 8, 5, 4] * 2}
    asked = search_deployments(small_scenario(spiky))
    said, day = describe_day(answer_of(asked)), asked.autoscaling
    assert day and "may be missed" not in said
    missed = len(day.violated_hours)
    assert f"{24 - missed} of 24 hours" in said if missed else "Every hour meets" in said


@pytest.mark.parametrize(
    ("seconds", "limit", "said"),
    [
        (0.327, 1.0, "330 ms"),
        (1.14, 1.0, "1.1 s"),
        (0.0404, 0.04, "40.4 ms"),
        (12.3, math.inf, "12 s"),
        (math.inf, 1.0, "unbounded"),
    ],
)
def test_a_latency_has_as_many_digits_as_tell_it_from_its_limit(
    seconds: float, limit: float, said: str
) -> None:
    assert format_seconds(seconds, limit) == said
