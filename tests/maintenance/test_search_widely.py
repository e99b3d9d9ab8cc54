"""What `test_search.py` looks at in small, more widely."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shipped import plan_of
from test_search import small, usd

from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments


def test_what_only_the_closed_form_believes_in_is_passed_over() -> None:
    """Long prompts in shared steps: the replay's slow tokens are several times the closed form's."""
    passed_over = []
    for name in ("long-documents", "chatbot-throughput", "code-completion"):
        plan = plan_of(name)
        assert plan.chosen is not None
        passed_over += [
            c for c in plan.candidates if c.cost_key < plan.chosen.cost_key and c.is_feasible
        ]
    assert passed_over
    assert all(candidate.probability < candidate.confidence for candidate in passed_over)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(rate=st.floats(0.2, 80), slack=st.floats(0.05, 3), factor=st.floats(1.0, 4.0))
def test_no_harder_question_costs_less(rate: float, slack: float, factor: float) -> None:
    assert usd(small(rate)) <= usd(small(rate * factor))
    assert usd(small(slack=slack)) >= usd(small(slack=slack * factor))


def test_a_plan_is_not_at_risk_by_too_few_places() -> None:
    """64 of them kept the pace of a full batch, and made p95 TTFT grow to 4.3 s where slower steps hold them longer."""
    lengths = {"prompt_tokens": {"mean": 1500}, "output_tokens": {"mean": 300}, "rate": 7.5}
    level = {"ttft": {"p95": 2000}, "tpot": {"p95": 50}}
    gpus = [{"gpu": "H200-SXM", "at_most": 8}]
    plan = search_deployments(
        parse_scenario(
            {
                "question": "?",
                "model": "Qwen/Qwen3-32B",
                "quantization": ["fp8"],
                "gpus": gpus,
                "workload": lengths,
                "service_level": level,
            },
            "s",
        )
    )
    assert plan.chosen
    assert plan.chosen.prediction.performance.get_for_display("ttft", "p95").hi < 2.0
