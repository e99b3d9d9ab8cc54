"""Each interactive view of a chapter starts at the plan's own deployment, and shows the plan's figures."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from shipped import plan_of, plan_once, sampled, small_plan

import planner
from planner.analysis import layout_tables
from planner.analysis.layout_tables import Study, begin_study
from planner.analysis.sensitivity import sweep_knobs
from planner.analysis.speculation_tables import compare_draft, propose_drafts
from planner.core.units import GIB
from planner.memory.memory_plan import get_memory_plan
from planner.planning.scenario import list_scenarios, load_scenario, parse_scenario
from planner.planning.search import Plan
from planner.ui import chapter_views as views
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks
from planner.ui.notebook_names import PLACES
from planner.ui.notebook_widgets import InteractiveView

DAY = [3, 2, 1, 1, 1, 2, 4, 8, 14, 19, 20, 19, 17, 19, 20, 19, 17, 15, 13, 11, 9, 8, 6, 4]
EXPERTS = {
    "model": "Qwen/Qwen3-30B-A3B",
    "quantization": ["fp8"],
    "layout": {"tp": 2, "ep": 2},
}
POOLS = {
    "question": "?",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpus": {"gpu": "H100-SXM", "at_most": 4},
    "workload": {
        "prompt_tokens": {"mean": 5000, "p95": 7500},
        "output_tokens": {"mean": 150, "p95": 300},
        "rate": 4,
    },
    "service_level": {"ttft": {"p95": 4000}, "itl": {"p99": 22}},
    "pools": True,
}
SESSIONS = {
    "users": 3,
    "turns": {"mean": 4},
    "system_tokens": 500,
    "context_tokens": {"mean": 300},
    "turn_tokens": {"mean": 60},
    "output_tokens": {"mean": 100},
    "think_seconds": {"mean": 20},
    "max_context": 6000,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "acceptance_rate": 0.7, "allowed": True}
DATA = Path(__file__).parents[1] / "data"
PLANS: dict[str, Callable[[], Plan]] = {
    "small steps and drafts": lambda: plan_once(load_scenario(DATA / "chapter_layout.yaml")),
    "expert parallelism": lambda: small_plan(EXPERTS),
    "drafts": lambda: small_plan({"speculation": NGRAM}),
    "pools": lambda: plan_once(parse_scenario(POOLS, "pools")),
    "sessions": lambda: small_plan({"workload": {"sessions": SESSIONS}}),
    "a day": lambda: small_plan({"workload.day": DAY}),
    "a KV format of its own": lambda: small_plan({"kv_cache_dtype": ["fp8_e5m2"]}),
    "a step between powers of two": lambda: small_plan(
        {"engine_args": {"max_num_batched_tokens": 300, "max_num_seqs": 5}}
    ),
    "no targets met": lambda: small_plan({"service_level.tpot": {"p95": 5}}),
    **{name: lambda name=name: plan_of(name) for name in list_scenarios()},
}
SAMPLE = ("expert parallelism", "a step between powers of two", "no targets met", "edge-8b-24gb")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def studied() -> Callable[[str], Study]:
    """What chapters study of a plan, by its name."""
    return lambda name: begin_study(PLANS[name](), fits=True)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_every_view_starts_at_the_plans_own_deployment(name, studied):
    study = studied(name)
    best = study.answered.without_disaggregation.best
    own, replica = best.deployment, best.deployment.with_replicas(1)
    assert study.deployment == own
    for explore in (views.try_memory, views.try_batch, views.try_pressure):
        assert explore(study).subject == own
    assert views.try_layouts(study).subject is best
    assert views.try_long_prompt(study).subject[0] == replica
    drafted, batch = views.try_drafts(study, propose_drafts(study.scenario, own)).subject
    assert replace(drafted, speculation=own.speculation) == own
    assert drafted == own or not own.speculation
    assert batch == max(1, round(best.prediction.performance.decode_batch))


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_every_control_starts_at_the_plans_own_value(name, studied):
    study = studied(name)
    opened: list[InteractiveView] = [
        views.try_memory(study), views.try_layouts(study), views.try_pressure(study),
        views.try_long_prompt(study), views.try_batch(study), views.try_frameworks(study),
    ]  # fmt: skip
    planned = {
        **vars(study.deployment.args), **vars(study.deployment.layout), **vars(study.scenario.traits)
    }  # fmt: skip
    for view in opened:
        for control, widget in view._controls.items():
            assert control not in planned or widget.value == planned[control], control
    drafted = propose_drafts(study.scenario, study.deployment)
    drafts = views.try_drafts(study, drafted)._controls
    assert drafts["method"].value == drafted.speculation.method
    assert drafts["k"].value == drafted.speculation.num_speculative_tokens
    held = study.deployment.other_tenants_bytes / GIB
    assert views.try_tenants(study)._controls["gib"].value == (held or 8.0)  # none: for example 8


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_views_show_the_plans_figures(name, studied):
    study = studied(name)
    best = study.plan.best
    memory = get_memory_plan(views.try_memory(study).subject)
    assert memory.pool.reported_tokens == best.prediction.memory.pool.reported_tokens
    if best.prediction.speedup:
        batch = best.prediction.performance.decode_batch
        shown = compare_draft(best.deployment, batch, study.context).speedup
        assert shown.mid == pytest.approx(best.prediction.speedup.mid, rel=0.02)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_layouts_are_compared_with_arguments_that_suit_them(name, studied):
    """The plan stands among them as it is, and none that is cheaper is said to do without a simulation."""
    study = studied(name)
    plan, best = study.plan, study.plan.best
    every = layout_tables.list_layout_candidates(plan)
    assert sum(candidate is best for candidate in every) == 1
    cheaper = [one for one in every if plan.chosen and one.cost_key < plan.chosen.cost_key]
    assert all(one.is_simulated for one in cheaper if one.is_confident)
    table = layout_tables.build_replica_table(plan, [best])
    rate = plan.scenario.workload.rate
    if plan.chosen and rate and not plan.scenario.offline:
        served = table["Requests/s"].iloc[0] * best.deployment.layout.replicas
        if best.has_inner_stages and served <= rate:
            pytest.xfail("the closed form serves a fifth less through 8 stages than the replay")
        assert served > rate


@pytest.mark.exhaustive
def test_small_steps_serve_other_layouts_too(studied):
    """With the engine's 2,048 tokens a step TP1 x PP4 serves 0.2 requests/s; with 256 it serves four."""
    study = studied("small steps and drafts")
    budget = study.deployment.args.max_num_batched_tokens
    assert budget <= 512
    fewest = layout_tables.select_fewest_replicas(layout_tables.list_layout_candidates(study.plan))
    served = layout_tables.build_replica_table(study.plan, fewest).set_index("One replica")
    assert served.loc["TP1 x PP4", "Requests/s"] > 2
    assert served.loc["TP1 x PP8", "max_num_batched_tokens"] == budget


def test_each_knob_is_turned_once_to_each_setting(studied):
    study = studied("small steps and drafts")
    turned = sweep_knobs(study.scenario, study.plan.best)
    assert not turned.duplicated(["knob", "setting"]).any()
    twice = f"{2 * study.deployment.args.max_num_batched_tokens:,}"
    assert list(turned.set_index("knob").loc[["max_num_batched_tokens"], "setting"]) == [twice]


def test_a_layout_with_more_replicas_is_the_plan_in_all_else(studied):
    for name in ("expert parallelism", "small steps and drafts"):
        study = studied(name)
        own = study.deployment
        sizes = own.layout.tp, own.layout.pp, own.layout.replicas + 1
        tried = layout_tables.relayout_candidate(study.plan, own.gpu.name, *sizes)
        assert tried.deployment == own.with_replicas(own.layout.replicas + 1)


def test_the_notebooks_of_the_walk_import_only_the_package():
    rewritten = [path for path in list_chapter_notebooks() if path.stem != "0-summary"]
    explored = set()
    for path in (*rewritten, NOTEBOOK_DIR / "pools.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        assert re.findall(r"^(?:import|from) .*", code, re.MULTILINE) == ["import planner"]
        used = re.findall(r"\bplanner\.(\w+)", code)
        assert all(getattr(planner, name) is not None for name in used)
        explored |= {name for name in used if name.startswith("try_")}
    assert explored == {name for name in PLACES if name.startswith("try_")}
