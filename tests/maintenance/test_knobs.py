"""What engine arguments, attention data parallelism and other engines are worth: acceptance figures of the search."""

import pytest
from shipped import sampled

from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, parse_scenario
from planner.planning.search import search_deployments
from planner.planning.tolerance import simulate_candidate


def asked(
    model: str, level: dict[str, dict[str, float]], gpu: str = "H200", at_most: int = 64, **fields: object
) -> Scenario:  # fmt: skip
    """16 requests/s of 1,000/1,000 tokens, p95 twice that, on GPUs all of whose capacity may be used."""
    lengths = {"mean": 1000, "p95": 2000}
    return parse_scenario(
        {
            "question": "?", "model": model, "gpus": [{"gpu": gpu, "at_most": at_most}], "headroom": 0.0,
            "workload": {"prompt_tokens": lengths, "output_tokens": lengths, "rate": 16},
            "service_level": level,
            **fields,
        },
        "s",
    )  # fmt: skip


SLOW_PROMPTS = "large experts' prompts on H200 cost more since measured TTFT corrects them"


def gpus(plan: Plan) -> int:
    assert plan.chosen is not None
    assert simulate_candidate(plan.scenario, plan.chosen).is_feasible
    return plan.chosen.deployment.layout.num_gpus


@pytest.mark.parametrize("at_most", sampled((16, 64), [16]))
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_attention_data_parallelism_serves_a_large_expert_model_on_half_the_gpus(
    engine: str, at_most: int
) -> None:
    """At even odds: DeepSeek-V3 takes 32 H200 without it: each tensor parallel rank holds all of its KV cache."""
    limits = {"ttft": {"p95": 5000.0}, "tpot": {"p95": 100.0}}
    plan = search_deployments(
        asked("deepseek-ai/DeepSeek-V3", limits, engine=engine, confidence=0.5, at_most=at_most)
    )
    if engine == "vllm" and plan.chosen is None:
        pytest.xfail(f"16 GPUs are known to hold and have {plan.probability:.0%}: {SLOW_PROMPTS}")
    assert gpus(plan) <= 16
    assert plan.chosen is not None and plan.chosen.deployment.layout.dp > 1


@pytest.mark.parametrize("any_layout", sampled((False, True), [False]))
@pytest.mark.parametrize(("confidence", "most"), [(0.5, 16), (0.75, 24)])
def test_qwen_235b_holds_fewer_gpus_less_surely(
    confidence: float, most: int, any_layout: bool
) -> None:
    """Ranks that share experts wait for the one that reads a prompt, and exchange tokens in many calls."""
    limits = {"ttft": {"p95": 5000.0}, "tpot": {"p95": 60.0}}
    fields = {} if any_layout else {"at_most": most, "layout": {"tp": 4, "pp": 1}}
    question = asked(
        "Qwen/Qwen3-235B-A22B", limits, quantization=["fp8"], confidence=confidence, **fields
    )
    plan = search_deployments(question)
    if most == 16 and plan.chosen is None:
        pytest.xfail(f"16 GPUs are known to hold and have {plan.probability:.0%}: {SLOW_PROMPTS}")
    assert gpus(plan) <= most


@pytest.mark.parametrize("limit", (100.0, 60.0))
def test_shorter_chunks_keep_a_p99_itl_at_a_quarter_of_the_gpus(limit: float) -> None:
    """With the engine's own max_num_batched_tokens a prompt's chunk alone takes longer than 60 ms."""
    traffic = {
        "prompt_tokens": {"mean": 1200, "p95": 3600},
        "output_tokens": {"mean": 250, "p95": 700},
        "rate": 5.5,
    }
    level = {"itl": {"p99": limit}}
    model = "meta-llama/Llama-3.3-70B-Instruct"
    plan = search_deployments(
        asked(model, level, "H100", quantization=["fp8"], headroom=0.2, workload=traffic)
    )
    assert gpus(plan) <= 4
    assert plan.chosen is not None and plan.chosen.deployment.args.max_num_batched_tokens < 8192


def test_chunks_are_shortened_where_the_engines_own_miss_by_far() -> None:
    """Prompts of 4,000 tokens: the first limits that hold do so in chunks of 512 or fewer, not of 8,192."""
    traffic = {
        "prompt_tokens": {"mean": 4047, "p95": 8766},
        "output_tokens": {"mean": 63, "p95": 171},
        "rate": 1.98,
    }
    given = {
        "gpus": [{"gpu": "RTX-PRO-6000-Server", "at_most": 2}],
        "workload": traffic,
        "headroom": 0.2,
    }
    plan = next(
        found
        for k in range(20)
        if (
            found := search_deployments(
                asked(
                    "microsoft/phi-4", {"itl": {"p50": 41 * 1.1**k, "p99": 103 * 1.1**k}}, **given
                )
            )
        ).chosen
    )
    assert gpus(plan) == 2
    assert plan.chosen is not None and plan.chosen.deployment.args.max_num_batched_tokens <= 512


def test_another_engine_never_costs_more() -> None:
    limits = {"ttft": {"p95": 2000.0}, "tpot": {"p95": 40.0}}
    traffic = {"prompt_tokens": {"exactly": 800}, "output_tokens": {"exactly": 200}, "rate": 4}
    given = {"gpu": "L40S", "quantization": ["fp8"], "workload": traffic}
    one, both = (search_deployments(asked("meta-llama/Llama-3.1-8B-Instruct", limits, engine=engine, **given))
                 for engine in ("vllm", ["vllm", "sglang"]))  # fmt: skip
    assert one.chosen is not None and both.chosen is not None
    assert both.chosen.cost_key <= one.chosen.cost_key
    assert {c.deployment.engine.name for c in both.candidates} == {"vllm", "sglang"}
