"""The cockpit: each control makes another question, everything shown is that question's own, and files hold it."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
from shipped import answer_of, plan_of

from planner.answers import build_answer, serialize_answer
from planner.answers.answer import PHRASES, sweep_costs, sweep_latency
from planner.core.errors import PlannerError
from planner.planning.scenario import list_scenarios, load_scenario, parse_scenario
from planner.planning.search import search_analytically, search_deployments
from planner.ui import notebook_session as chapter
from planner.ui.chapter_views import try_load
from planner.ui.cockpit import Cockpit
from planner.ui.notebook_widgets import (
    InteractiveView,
    build_choice,
    build_slider,
    render_changes,
    show_note,
)
from planner.ui.plan_panel import build_page, draw_charts
from planner.ui.scenario_form import (
    MILLISECOND_UNITS,
    STATISTIC_CHOICES,
    apply_control,
    parse_quantity,
    read_control_values,
    save_scenario,
)

SMALL = "edge-8b-24gb"
MOVES = [
    ("rate", 1.1), ("prompt", 430.0), ("output", 240.0), ("reuse", 30.0),
    ("headroom", 5.0), ("confidence", 90), ("ttft p95", "400"), ("itl p99", "90"), ("gpus", ["L4"]),
    ("at_most", 3), ("model", "Qwen/Qwen3-4B"), ("tier", "reserved"), ("tier", "on_demand"),
    ("own_price", "0.6"), ("budget", "1,500"), ("budget", ""), ("own_price", ""), ("spare_replicas", 1),
    ("quantization", ["fp8"]), ("kv_cache_dtype", ["fp8"]), ("engine_version", "0.23.0"),
    ("load", "concurrency"), ("concurrency", 12.0), ("load", "requests"), ("requests", "40k"),
    ("within_hours", 6.0), ("load", "rate"), ("kv_cache_dtype", ["auto"]), ("day", "campus-rag"),
    ("day", ", ".join(["1"] * 8 + ["4"] * 16)), ("adapters", 12), ("rank", 64), ("zipf", 1.2),
    ("adapters", ""), ("day", ""), ("engine", "sglang"),
    *((f"{metric} {percentile}", f"{limit} ms")
      for metric, limit in zip(PHRASES["metrics"], (2500, 75, 95, 40_000), strict=True)
      for percentile in STATISTIC_CHOICES),
]  # fmt: skip
"""Each control in turn, with values as the page sends them: what was typed, or a number."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def cockpit(folder, monkeypatch):
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 3600.0)  # the replay has a test of its own
    made = open_cockpit()
    yield made
    made.close()


def open_cockpit() -> Cockpit:
    made = Cockpit(SMALL, ThreadPoolExecutor(1))
    made._first.join()
    return made


def wait_for_simulation(cockpit: Cockpit) -> None:
    """Wait until the shown plan is simulated, and other plans are."""
    cockpit._timer.join()


@pytest.fixture
def quick_simulation(folder, monkeypatch):
    """The simulation follows at once, and nothing else is searched."""
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 0.0)
    monkeypatch.setattr(Cockpit, "_list_others", lambda *_: iter(()))


@pytest.mark.exhaustive
def test_after_each_control_every_figure_is_a_fresh_computation(cockpit, folder):
    seen = [cockpit.answer]
    for name, value in MOVES:
        cockpit.set_controls({name: value})
        assert "error" not in cockpit.answer, (name, cockpit.answer["error"])
        fresh = parse_scenario(cockpit.scenario.fields, cockpit.scenario.name)
        assert repr(fresh) == repr(cockpit.scenario)  # a trace is an array
        assert cockpit.answer == build_page(build_answer(search_analytically(fresh))), name
        assert cockpit.answer["state"] == "estimate" and not cockpit.answer["figures"]["verdict"]
        seen.append(cockpit.answer)
    assert sum(before != after for before, after in pairwise(seen)) >= len(MOVES) - 12


def test_the_simulation_replaces_the_estimate_by_the_plan_of_plan_json(quick_simulation):
    cockpit = open_cockpit()
    wait_for_simulation(cockpit)
    plan = plan_of(SMALL)
    told, figures = serialize_answer(answer_of(plan)), cockpit.answer["figures"]
    assert figures["verdict"] == told["verdict"]
    assert figures["probability"] == pytest.approx(told["probability"], abs=1e-4)
    assert figures["usd_per_hour"] == told["usd_per_hour"][0]
    assert figures["usd_per_month"] == told["cost"]["usd_per_month"][0]
    assert figures["usd_per_mtok_output"] == told["usd_per_mtok_output"][0]
    assert figures["capacity_rps"] == told["capacity_rps"][0]
    assert {name: option[1] for name, option in figures["options"].items()} == {
        option["name"]: option["usd_per_hour"][0] for option in told["options"]
    }
    targets = [t["ms"] for t in cockpit.answer["targets"] if t["ms"]]
    assert targets == [slo["predicted_ms"] for slo in told["service_level"]]
    assert cockpit.answer["commands"][0]["text"].startswith("vllm serve")
    shown, wanted = (
        re.sub(r"\w{8}-clip\d+", "", repr(drawn))  # numbered as they are drawn
        for drawn in (
            cockpit.charts,
            draw_charts(
                cockpit._told,
                sweep_latency(plan, cockpit._told.best.tightest.target),
                sweep_costs(plan),
                480,
            ),
        )
    )
    assert shown == wanted
    cockpit.close()


def test_a_mistake_keeps_the_answer_and_is_told_at_its_field(cockpit):
    before = cockpit.answer
    cockpit.set_controls({"model": "llama 4"})
    error = cockpit.answer["error"]
    assert error["field"] == "model" and error["stale"] and "Llama-4" in error["text"]
    assert {name: value for name, value in cockpit.answer.items() if name != "error"} == before
    assert cockpit.scenario.model == load_scenario(SMALL).model
    cockpit.set_controls({"ttft p95": "soon"})
    assert cockpit.answer["error"]["field"] == "ttft p95"
    cockpit.set_controls({"rate": 1.0})
    assert "error" not in cockpit.answer


def test_a_mistake_is_still_told_when_the_simulation_ends(quick_simulation, monkeypatch):
    """It is that of the question before, and the page says so as long as the mistake stands."""
    typed, search = Event(), Cockpit._search
    monkeypatch.setattr(
        Cockpit, "_search", lambda self, asked: typed.wait(60) and search(self, asked)
    )
    cockpit = open_cockpit()
    cockpit.load_scenario("no-such-file.yaml")
    typed.set()
    wait_for_simulation(cockpit)
    assert cockpit.answer["state"] == "final"
    assert cockpit.answer["error"]["field"] == "start" and cockpit.answer["error"]["stale"]
    cockpit.close()


def test_no_latency_is_stated_where_more_arrives_than_is_served(quick_simulation):
    cockpit = open_cockpit()
    cockpit.set_controls({"at_most": 1, "rate": 500})
    wait_for_simulation(cockpit)
    answer = cockpit.answer
    assert answer["word"] == "Overloaded" and answer["tone"] == "bad"
    assert answer["targets"] == [] and not any(cockpit.charts.values())
    text = json.dumps({name: value for name, value in answer.items() if name != "figures"})
    assert not any(word in text for word in ("NaN", "Infinity", "growing", "-2", "\u2212"))
    cockpit.close()


@pytest.mark.exhaustive
def test_the_most_that_is_served_can_be_asked_for(quick_simulation):
    cockpit = open_cockpit()
    cockpit.set_controls({"load": "rate", "at_most": 1, "find_max": True})
    assert cockpit.answer["state"] == "computing"  # many estimates make one
    wait_for_simulation(cockpit)
    most = cockpit.plan.scenario.workload.rate
    assert cockpit.answer["head"].startswith(f"{most:.3g} requests/s on 1")
    assert cockpit.answer["figures"]["probability"] >= cockpit.scenario.confidence
    cockpit.set_controls({"find_max": False})  # goes on with what was found
    assert cockpit.scenario.workload.rate == pytest.approx(most)
    cockpit.close()


def test_a_failed_simulation_says_so_and_leaves_the_estimate(folder, monkeypatch):
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 0.0)
    monkeypatch.setattr(Cockpit, "_search", lambda *_: 1 / 0)
    cockpit = open_cockpit()
    wait_for_simulation(cockpit)
    assert cockpit.answer["state"] == "failed" and "division" in cockpit.answer["failure"]
    assert cockpit.answer["word"] == "Estimate" and not cockpit.answer["figures"]["verdict"]
    cockpit.close()


def test_a_change_can_be_taken_back(cockpit):
    before = cockpit.scenario
    cockpit.set_controls({"rate": 3.0})
    cockpit.undo()
    assert replace(cockpit.scenario, question="") == replace(before, question="")


def test_other_gpus_and_changes_follow_with_controls_that_ask_for_them(folder, monkeypatch):
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 0.0)
    monkeypatch.setattr("planner.ui.cockpit.SUGGESTED_GPUS", ("L40S",))
    monkeypatch.setattr(
        "planner.ui.cockpit.propose_changes",
        lambda plan: iter([("twice the traffic", replace(
            plan.scenario, workload=plan.scenario.workload.scale(2)))]),
    )  # fmt: skip
    cockpit = open_cockpit()
    wait_for_simulation(cockpit)
    (gpu,), (change,) = cockpit.others["gpus"], cockpit.others["changes"]
    alone = parse_scenario(
        apply_control(cockpit.scenario.fields, "gpus", ["L40S"], cockpit.controls), "x"
    )
    wanted = search_deployments(alone).chosen
    assert gpu["gpus"] == f"{wanted.prediction.num_gpus_billed} \N{MULTIPLICATION SIGN} L40S"
    assert gpu["order"] == wanted.usd_per_hour and gpu["changes"] == {"gpus": ["L40S"]}
    assert change["changes"] == {"rate": 2 * cockpit.scenario.workload.rate}
    cockpit.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,500", 1500),
        ("2k", 2000),
        ("1.5 s", 1500),
        ("800 ms", 800),
        ("2 min", 120_000),
        ("$3", 3),
    ],
)
def test_a_number_is_read_as_people_type_it(text, value):
    assert parse_quantity(text, MILLISECOND_UNITS, "x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "many", "-3", "1.5 parsecs", "nan"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(PlannerError, match="x: expected a number"):
        parse_quantity(text, MILLISECOND_UNITS, "x")


def test_opening_the_controls_changes_nothing_of_what_was_asked():
    for name in list_scenarios():
        asked = load_scenario(name)
        values = read_control_values(asked)
        cards = {card for wanted in asked.gpus for card in [wanted.gpu.name]}
        assert set(values["gpus"]) == cards
        again = apply_control(asked.fields, "headroom", values["headroom"], values)
        assert parse_scenario(again, name) == replace(asked, files=())


def test_a_longer_mean_keeps_the_spread():
    was = load_scenario("chat-70b")
    longer = apply_control(
        was.fields, "output", 2 * was.workload.output.mean, read_control_values(was)
    )
    now = parse_scenario(longer, "x").workload.output
    assert now.mean == pytest.approx(2 * was.workload.output.mean, rel=1e-4)
    assert now.p95 / now.p50 == pytest.approx(
        was.workload.output.p95 / was.workload.output.p50, rel=1e-3
    )


def test_what_is_saved_is_what_was_asked_and_what_chapters_open(cockpit, folder):
    cockpit.set_controls({"rate": 1.3})
    cockpit.set_controls({"gpus": ["L4", "RTX-4090"]})
    assert cockpit.scenario.question == f"What does it take to serve {cockpit.scenario.model}?"
    cockpit.save("office", "How many GPUs does the office need?")
    for path in (Path("office.yaml"), chapter.CURRENT_SCENARIO_FILE):
        saved = load_scenario(path)
        assert saved.question == "How many GPUs does the office need?"
        same = replace(saved, files=(), name=SMALL, question=cockpit.scenario.question)
        assert same == replace(cockpit.scenario, files=())
    assert chapter.load_current_scenario().workload == cockpit.scenario.workload


def test_files_of_others_stay_as_they_are(folder):
    Path("mine.yaml").write_text("question: mine\n", encoding="utf-8")
    with pytest.raises(PlannerError, match=r"mine.yaml is not the cockpit's"):
        save_scenario({"question": "x"}, "mine")
    assert Path("mine.yaml").read_text(encoding="utf-8") == "question: mine\n"
    for name in ("../x", "a/b", "", "-x"):
        with pytest.raises(PlannerError, match="a name has"):
            save_scenario({}, name)


def test_an_answer_is_kept_for_the_same_question_alone(folder, monkeypatch):
    asked = load_scenario(SMALL)
    first = chapter.search_cached(asked)
    monkeypatch.setattr(chapter, "search_deployments", lambda _: pytest.fail("searched again"))
    again = chapter.search_cached(
        replace(asked, name="another name", question="the same in other words")
    )
    assert again.scenario.name == "another name"
    assert build_page(build_answer(replace(again, scenario=asked))) == build_page(
        build_answer(first)
    )
    with pytest.raises(pytest.fail.Exception):
        chapter.search_cached(replace(asked, headroom=0.3))


def test_a_choice_in_a_chapter_is_carried_on(folder):
    drawn = InteractiveView(
        lambda tp, size: show_note(f"TP{tp}, {size}"),
        carry={
            "layout": lambda it: {"tp": it["tp"]},
            "engine_args.max_num_seqs": lambda it: it["size"],
        },
        tp=build_choice([1, 2], 1),
        size=build_slider(1, 100, 64),
    )
    button = drawn.children[0].children[-1]
    button.click()
    assert chapter.load_changes() == {}  # nothing was moved
    drawn.children[0].children[1].value = 32
    button.click()
    assert chapter.load_changes() == {"engine_args.max_num_seqs": 32}
    chapter.save_changes({"layout": {"tp": 8, "pp": 1}})
    plan = chapter.open_plan("current")
    assert plan.chosen.deployment.args.max_num_seqs == 32
    assert (plan.chosen.deployment.layout.tp, plan.chosen.deployment.layout.pp) == (8, 1)
    said = render_changes("current", plan).children[0].value
    assert "Changed from the plan: engine_args.max_num_seqs = 32, layout = " in said
    before, now = re.findall(r"<tr><td.*?</tr>", said)
    assert "4 x H100-SXM" in before and "8 x H100-SXM" in now and "%" in before and "%" in now
    render_changes("current", plan).children[1].click()  # back to the plan
    assert chapter.load_changes() == {} and render_changes("current", plan) is None
    assert render_changes("chat-70b", plan) is None
    for scenario in ("current", "chat-70b"):
        study = chapter.open_study(scenario)
        assert bool(try_load(study)._carry) == (scenario == "current")
