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
from planner.analysis.speculation_tables import compare_draft, propose_drafts
from planner.memory.memory_plan import get_memory_plan
from planner.planning.plan import Plan
from planner.planning.scenario import list_scenarios, load_scenario, parse_scenario
from planner.ui import chapter_views as views
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks
from planner.ui.notebook_names import PLACES

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
def test_every_view_starts_at_the_plans_own_deployment_and_shows_its_figures(name, studied):
    study = studied(name)
    best = study.answered.without_disaggregation.best
    own = best.deployment
    assert study.deployment == own
    memory, load, drafts = (
        views.try_memory(study), views.try_load(study),
        views.try_drafts(study, propose_drafts(study.scenario, own)[0]),
    )  # fmt: skip
    assert memory.subject == own and load.subject == (own, study.workload)
    drafted, batch = drafts.subject
    assert replace(drafted, speculation=own.speculation) == own
    assert drafted == own or not own.speculation
    assert batch == max(1, round(best.prediction.performance.decode_batch))
    planned = vars(own.args)
    for view in (memory, load):
        for control, widget in view._controls.items():
            assert control not in planned or widget.value == planned[control], control
    shown = get_memory_plan(memory.subject).pool.reported_tokens
    assert shown == best.prediction.memory.pool.reported_tokens
    if best.prediction.speedup:
        batch = best.prediction.performance.decode_batch
        told = compare_draft(best.deployment, batch, study.context).speedup
        assert told.mid == pytest.approx(best.prediction.speedup.mid, rel=0.02)


@pytest.mark.parametrize("name", sampled(PLANS, SAMPLE))
def test_no_shape_that_costs_less_is_said_to_do(name, studied):
    study = studied(name)
    plan, every = study.plan, layout_tables.list_shapes(study.plan)
    assert every[0] is plan.best
    table = layout_tables.build_shape_table(plan, every)
    assert list(table["chosen"]) == [each is plan.chosen for each in every]
    cheaper = [one for one in every if plan.chosen and one.cost_key < plan.chosen.cost_key]
    assert all(one.is_simulated for one in cheaper if one.is_confident)


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
