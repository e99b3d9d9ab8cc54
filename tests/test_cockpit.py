"""The cockpit: each control makes another question, everything shown is that question's own, and files hold it."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ipywidgets
import pytest
import yaml

from planner.analysis.load_curves import find_max_loads, sweep_cost_over_load
from planner.core.errors import PlannerError
from planner.planning.evaluation import evaluate_candidate
from planner.planning.scenario import list_scenarios, load_scenario, parse_scenario
from planner.planning.search import search_analytically, search_deployments
from planner.ui import notebook_session as chapter
from planner.ui.charts import cockpit as charts_cockpit
from planner.ui.cockpit import FIGURE_NAMES, Cockpit
from planner.ui.notebook_widgets import (
    MultiSelect,
    build_choice,
    build_slider,
    explore,
    render_changes,
    show_note,
)
from planner.ui.plan_panel import render_figures
from planner.ui.scenario_form import (
    METRIC_CHOICES,
    STATISTIC_CHOICES,
    apply_control,
    get_scenario_file,
    load_presets,
    read_control_values,
    read_scenario_fields,
    save_scenario,
    store_pasted_config,
)

SMALL = "edge-8b-24gb"
MOVES = [
    ("rate", 1.1), ("prompt", 430.0), ("output", 240.0), ("reuse", 30.0), ("headroom", 5.0),
    ("ttft p95", "400"),
    ("itl p99", "90"), ("gpus", ["L4"]), ("at_most", 3), ("model", "Qwen/Qwen3-4B"),
    ("quantization", ["fp8"]),
    ("kv_cache_dtype", ["fp8"]), ("engine_version", "0.23.0"), ("preset", "RAG"),
    ("load", "concurrency"),
    ("concurrency", 12.0), ("load", "requests"), ("requests", 40_000), ("within_hours", 6.0),
    ("load", "rate"),
    ("kv_cache_dtype", ["auto"]), ("day", "campus-rag"), ("day", ", ".join(["1"] * 8 + ["4"] * 16)),
    ("adapters", 12),
    ("rank", 64), ("zipf", 1.2), ("adapters", 0), ("day", ""), ("engine", "sglang"),
    ("trace", "requests.csv"),
    ("config", json.dumps({
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 128256,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    })),
    *((f"{metric} {percentile}", str(limit))
      for metric, limit in zip(METRIC_CHOICES, (2500, 75, 95, 40_000), strict=True)
      for percentile in STATISTIC_CHOICES),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def cockpit(folder, monkeypatch):
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 3600.0)  # the replay has a test of its own
    made = Cockpit(SMALL, ThreadPoolExecutor(1))
    yield made
    made.stop()


def shown(cockpit: Cockpit) -> dict[str, str]:
    return {name: cockpit.places[name].value for name in FIGURE_NAMES}


def test_after_each_control_every_figure_is_a_fresh_computation(cockpit, folder):
    assert {name for name, _ in MOVES} == set(cockpit.controls)
    rows = "".join(
        f"{second / 2},{300 + second % 90},{40 + second % 60}\n" for second in range(400)
    )
    (folder / "requests.csv").write_text(f"timestamp,prompt_tokens,output_tokens\n{rows}")
    seen = [shown(cockpit)]
    for name, value in MOVES:
        cockpit.controls[name].value = value
        assert not cockpit.places["said"].value, (name, cockpit.places["said"].value)
        fresh = parse_scenario(cockpit.fields, cockpit.scenario.name)
        assert repr(fresh) == repr(cockpit.scenario)  # a trace is an array
        wanted = render_figures(search_analytically(fresh))
        now = shown(cockpit)
        assert now == {place: wanted.get(place, "") for place in now}, name
        seen.append(now)
    assert sum(before != after for before, after in pairwise(seen)) >= len(MOVES) - 4


def test_the_replay_replaces_the_closed_form(folder, monkeypatch):
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 0.0)
    cockpit = Cockpit(SMALL, ThreadPoolExecutor(1))
    assert (
        "closed form" in cockpit.places["badge"].value
        or "replayed" in cockpit.places["badge"].value
    )
    cockpit.wait_for_simulation()
    assert "replayed" in cockpit.places["badge"].value
    wanted = render_figures(search_deployments(load_scenario(SMALL)))
    now = shown(cockpit)
    assert now == {place: wanted.get(place, "") for place in now}
    cockpit.stop()


def test_a_control_says_what_is_wrong_and_no_figure_stands_beside_it(cockpit):
    cockpit.controls["model"].value = "nobody/has-such-a-model"
    assert "nobody/has-such-a-model" in cockpit.places["said"].value
    assert set(shown(cockpit).values()) == {""}
    cockpit.controls["rate"].value = 1.0
    assert cockpit.controls["model"].value == load_scenario(SMALL).model  # what the figures are of
    assert all(shown(cockpit)[place] for place in ("answer", "memory", "latency", "cost"))


def test_opening_the_controls_changes_nothing_of_what_was_asked():
    for name in list_scenarios():
        fields = read_scenario_fields(name)
        asked = parse_scenario(fields, name)
        assert replace(asked, files=()) == replace(load_scenario(name), files=())
        values = read_control_values(fields, asked)
        cards = {card for wanted in asked.gpus for card in [wanted.gpu.name]}
        assert set(values["gpus"]) == cards
        again = apply_control(fields, "headroom", values["headroom"], values)
        assert parse_scenario(again, name) == asked


@pytest.mark.parametrize("kind", load_presets())
def test_a_kind_of_work_has_the_lengths_of_its_trace(kind):
    fields = read_scenario_fields("chat-70b")
    found = parse_scenario(
        apply_control(
            fields, "preset", kind, read_control_values(fields, load_scenario("chat-70b"))
        ),
        "x",
    ).workload
    told = load_presets()[kind]
    for asked, lengths in ((told.prompt_tokens, found.prompt), (told.output_tokens, found.output)):
        assert lengths.mean == pytest.approx(asked.mean, rel=1e-3)
        for point in ("p50", "p95"):
            if getattr(asked, point) is not None:
                assert getattr(lengths, point) == pytest.approx(getattr(asked, point), rel=0.04)


def test_a_longer_mean_keeps_the_spread():
    fields = read_scenario_fields("chat-70b")
    was = load_scenario("chat-70b")
    longer = apply_control(
        fields, "output", 2 * was.workload.output.mean, read_control_values(fields, was)
    )
    now = parse_scenario(longer, "x").workload.output
    assert now.mean == pytest.approx(2 * was.workload.output.mean, rel=1e-4)
    assert now.p95 / now.p50 == pytest.approx(
        was.workload.output.p95 / was.workload.output.p50, rel=1e-3
    )


def test_what_is_saved_is_what_was_asked_and_what_chapters_open(cockpit, folder):
    cockpit.controls["rate"].value = 1.3
    cockpit.controls["gpus"].value = ["L4", "RTX-4090"]
    cockpit._name.value = "office"
    cockpit.save()
    for path in (Path("office.yaml"), chapter.CURRENT_SCENARIO_FILE):
        assert replace(load_scenario(path), files=(), name=SMALL) == replace(
            cockpit.scenario, files=()
        )
    assert replace(chapter.load_current_scenario(), files=(), name=SMALL) == replace(
        cockpit.scenario, files=()
    )


def test_files_of_others_stay_as_they_are(folder):
    Path("mine.yaml").write_text("question: mine\n", encoding="utf-8")
    with pytest.raises(PlannerError, match=r"mine.yaml is not the cockpit's"):
        save_scenario({"question": "x"}, Path("mine.yaml"))
    assert Path("mine.yaml").read_text(encoding="utf-8") == "question: mine\n"
    for name in ("../x", "a/b", "", "-x"):
        with pytest.raises(PlannerError, match="a name has"):
            get_scenario_file(name)


def test_a_pasted_configuration_is_a_model(folder, cockpit):
    config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
              "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 128256,
              "torch_dtype": "bfloat16",
              "max_position_embeddings": 131072, "tie_word_embeddings": True}  # fmt: skip
    cockpit.controls["config"].value = yaml.safe_dump(config, default_flow_style=True, width=10_000)
    assert "config.json" in cockpit.places["said"].value  # YAML is no JSON
    cockpit.controls["config"].value = json.dumps(config)
    assert not cockpit.places["said"].value
    assert Path(cockpit.scenario.model).parent == folder
    assert parse_scenario(cockpit.fields, "x").model == store_pasted_config(json.dumps(config))


def test_an_answer_is_kept_for_the_same_question_alone(folder, monkeypatch):
    asked = load_scenario(SMALL)
    first = chapter.search_cached(asked)
    monkeypatch.setattr(chapter, "search_deployments", lambda _: pytest.fail("searched again"))
    again = chapter.search_cached(
        replace(asked, name="another name", question="the same in other words")
    )
    assert again.scenario.name == "another name"
    assert render_figures(replace(again, scenario=asked)) == render_figures(first)
    with pytest.raises(pytest.fail.Exception):
        chapter.search_cached(replace(asked, headroom=0.3))


def test_costs_of_other_loads_agree_with_the_search():
    asked = load_scenario("chat-70b")
    plan = search_analytically(asked)
    data = sweep_cost_over_load(plan)
    load, usd = data.columns[:2]
    assert data[usd].is_monotonic_increasing
    for factor in (0.5, 1.0, 2.0):
        rate = asked.workload.rate * factor
        wanted = search_analytically(
            replace(asked, workload=asked.workload.with_rate(rate))
        ).chosen.usd_per_hour
        near = data.iloc[(data[load] - rate).abs().argmin()]
        assert near[usd] == pytest.approx(wanted, rel=0.01), factor


def test_a_step_of_the_cost_has_its_name_where_no_line_crosses_it():
    """Ending with its step, above it: costs only rise, so that left of there all lines are lower, the plan's too."""
    data = sweep_cost_over_load(search_analytically(load_scenario("chat-70b")))
    load, usd, what = data.columns
    _, names, here, _ = charts_cockpit.plot_live_cost(data, load, 5.53, 15.78)["layer"]
    for name in names["data"]["values"]:
        step = data[data[what] == name["what"]]
        assert name["load"] == step[load].max() and name["cost"] == step[usd].max()
    assert names["mark"]["align"] == "right" and here["encoding"]["y2"] == {"datum": 0}


def test_one_replica_carries_what_the_rule_says():
    asked = load_scenario("chat-70b")
    best = search_analytically(asked).chosen
    (most,) = find_max_loads(asked, [best])
    one = best.deployment.with_replicas(1)
    assert evaluate_candidate(
        replace(asked, workload=asked.workload.with_rate(most * 0.99)), one, 1
    ).is_confident
    assert not evaluate_candidate(
        replace(asked, workload=asked.workload.with_rate(most * 1.03)), one, 1
    ).is_confident


def test_two_questions_stand_side_by_side(folder, monkeypatch):
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 0.0)
    cockpit = Cockpit(SMALL, ThreadPoolExecutor(1))
    cockpit.pin()
    cockpit.controls["rate"].value = 1.6
    cockpit.wait_for_simulation()
    told = cockpit.places["compared"].value
    assert "0.55 requests" in told.replace("<wbr>", "") and "1.6 requests" in told.replace(
        "<wbr>", ""
    )
    cockpit.unpin()
    assert not cockpit.places["compared"].value
    cockpit.stop()


def test_every_control_can_be_reached_and_is_named(cockpit):
    plain = (
        ipywidgets.Textarea,
        MultiSelect,
    )  # under a label of its own; with a field that has one
    for name, control in cockpit.controls.items():
        assert isinstance(control, plain) or control.description or control.tooltip, name


def test_of_several_each_can_be_added_and_taken_out():
    made = MultiSelect(("one", "two", "three"), "numbers", "add one")
    made.value = ("one",)
    field, row = made.children
    field.value = "nonsense"
    assert made.value == ("one",)
    field.value = "three"
    assert made.value == ("one", "three") and field.value == ""
    row.children[0].click()
    assert made.value == ("three",)


def test_a_choice_in_a_chapter_is_carried_on(folder):
    drawn = explore(
        lambda tp, size: show_note(f"TP{tp}, {size}"),
        carry=chapter.filter_carried_fields(
            "current", {"layout": ("tp",), "engine_args.max_num_seqs": "size"}
        ),
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
    assert "Changed from the plan: engine_args.max_num_seqs = 32, layout = tp 8, pp 1" in said
    assert "8 x H100-SXM" in said and "before, 4 x H100-SXM" in said
    render_changes("current", plan).children[1].click()  # back to the plan
    assert chapter.load_changes() == {} and render_changes("current", plan) is None
    assert (
        render_changes("chat-70b", plan) is None
        and chapter.filter_carried_fields("chat-70b", {"layout": "tp"}) == {}
    )


def test_parallel_sizes_that_are_settled_are_kept():
    found = search_deployments(load_scenario("chat-70b", {"layout": {"tp": 2}}))
    assert {candidate.deployment.layout.tp for candidate in found.candidates} == {2}
    with pytest.raises(PlannerError, match="layout"):
        load_scenario("chat-70b", {"layout": {"replicas": 2}})
