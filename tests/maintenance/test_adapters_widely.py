"""What `test_adapters.py` looks at in small, more widely."""

from shipped import answer_of, plan_once
from test_adapters import ASKED

from planner.planning.scenario import parse_scenario
from planner.ui.plan_text import format_answer


def test_the_answer_tells_the_slots_and_what_a_cold_adapter_waits_for() -> None:
    answer = answer_of(plan_once(parse_scenario(ASKED, "adapters")))
    assert answer.best
    slots, text = answer.best.adapter_slots, " ".join(format_answer(answer, detailed=True).split())
    assert slots is not None
    assert slots["count"] * slots["bytes_each"] == answer.best.prediction.memory.adapters_bytes
    assert f"of LoRA adapters ({slots['count']} slot" in text
    assert 0 < slots["load_s"] < slots["cold_s"]
    assert "into a slot from host memory" in text
