"""What `test_adapters.py` looks at in small, more widely."""

from shipped import answer_of, plan_once
from test_adapters import ASKED

from planner.answers.ways_out import _free_slots, _has_few_slots
from planner.planning.scenario import parse_scenario
from planner.ui.plan_text import format_answer


def test_few_slots_are_a_way_out_before_more_gpus_are() -> None:
    """40 adapters evenly used on 8 slots wait for slots: more of them cost no GPU."""
    few = {"adapters": {"count": 40, "ranks": [16], "max_loras": 1}}
    given = {
        **ASKED, **few, "gpus": [{"gpu": "H100-SXM", "at_most": 1}], "service_level": {"ttft": {"p95": 1000}},
    }  # fmt: skip
    scenario = parse_scenario(given, "few slots")
    assert _has_few_slots(scenario) and not _has_few_slots(parse_scenario(ASKED, "free"))
    assert "max_loras" not in _free_slots(scenario).engine_args
    answer = answer_of(plan_once(scenario))
    change = answer.ways_out and answer.ways_out.change
    assert change
    slots, gpus = change[2].deployment.args.max_loras, change[2].prediction.num_gpus
    assert slots > 1 and gpus == 1
    assert f"({change[0]})" in " ".join(format_answer(answer).split())


def test_the_answer_tells_the_slots_and_what_a_cold_adapter_waits_for() -> None:
    answer = answer_of(plan_once(parse_scenario(ASKED, "adapters")))
    assert answer.best
    slots, text = answer.best.adapter_slots, " ".join(format_answer(answer, detailed=True).split())
    assert slots is not None
    assert slots["count"] * slots["bytes_each"] == answer.best.prediction.memory.adapters_bytes
    assert f"of LoRA adapters ({slots['count']} slot" in text
    assert 0 < slots["load_s"] < slots["cold_s"]
    assert "into a slot from host memory" in text
