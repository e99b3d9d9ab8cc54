"""What `test_layouts.py` looks at in small, more widely."""

from planner.analysis import layout_tables as layout_study
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments

NOWHERE = {
    "question": "Does a 70B model fit on one 24 GB card?",
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "gpus": [{"gpu": "RTX-4090", "at_most": 1}],
    "workload": {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100}, "rate": 1},
    "service_level": {"ttft": {"p95": 1000}},
}


def test_where_nothing_fits_the_chapter_says_so_and_goes_on_with_a_change():
    asked = search_deployments(parse_scenario(NOWHERE, "nowhere"))
    plan, changed = layout_study.find_plan_to_study(asked)
    assert not asked.candidates
    assert plan.candidates
    assert changed in layout_study.describe_studied_deployment(asked, plan, changed)
    assert "fits nowhere" in layout_study.describe_studied_deployment(asked, plan, changed)
