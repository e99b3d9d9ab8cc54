"""Scenario files: what they may say, and how a mistake in one is told."""

from pathlib import Path

import pytest
import yaml

from planner.quantities import GIB, PlannerError
from planner.scenario import load_scenario, scenario, scenarios

SMALL = {
    "question": "?",
    "model": "meta-llama/Llama-3.1-8B",
    "gpus": [{"gpu": "h100 sxm", "at_most": 4}],
    "workload": {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100, "p95": 200}, "rate": 2},
    "service_level": {"ttft": {"p95": 500}},
}


def test_at_least_six_scenarios_load_and_cite_their_traffic() -> None:
    assert len(scenarios()) >= 6 and "chat-70b" in scenarios()
    for name in scenarios():
        found = load_scenario(name)
        assert found.name == name and found.gpus and (found.service_level or found.offline)


def test_the_default_has_the_azure_traces_figures() -> None:
    workload = load_scenario("chat-70b").workload
    assert workload.rate == 5.53
    assert (workload.prompt.mean, workload.output.mean) == (pytest.approx(1154.7), pytest.approx(211.1))
    assert (workload.prompt.p95, workload.output.p50) == (pytest.approx(4083, rel=0.02), pytest.approx(129, rel=0.02))


def test_units_are_taken_in_at_the_edge() -> None:
    changes = {"other_tenants_gib": 2, "prices": {"H100 SXM": 2.5}, "memory_calibration": {"non_torch": -0.5}}
    found = scenario({**SMALL, **changes}, "mine")
    assert found.memory_calibration == {"non_torch": -0.5 * GIB}
    assert found.other_tenants == 2 * GIB
    assert found.prices == {"H100-SXM": 2.5}
    assert found.service_level[0].seconds == 0.5 and str(found.service_level[0]) == "p95 TTFT of at most 500 ms"


def test_a_fifth_of_the_capacity_stays_free_and_one_request_in_a_hundred_may_be_refused() -> None:
    found = scenario(SMALL, "mine")
    assert (found.headroom, found.refused_at_most) == (0.2, 0.01)
    found = scenario({**SMALL, "headroom": 0, "refused_at_most": 0.05}, "mine")
    assert (found.headroom, found.refused_at_most) == (0, 0.05)


def test_requests_within_hours_are_a_rate() -> None:
    workload = {**SMALL["workload"], "requests": 36_000, "within_hours": 2}
    del workload["rate"]
    found = scenario({**SMALL, "workload": workload, "service_level": {}}, "mine")
    assert found.offline and found.workload.rate == 5


def test_a_trace_lies_beside_the_scenario_and_figures_beside_it_win(tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("arrival,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n2,300,30\n")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "workload": {"trace": "day.csv", "output_tokens": {"mean": 50}}}))
    workload = load_scenario(path).workload
    assert (workload.prompt.mean, workload.output.mean, workload.rate) == (200, 50, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "x"}, "mine, field modle: unknown field; did you mean model"),
        ({"model": "meta-llama/Llama-3.1-8"}, "did you mean meta-llama/Llama-3.1-8B"),
        ({"gpus": [{"gpu": "H1000-SXM", "at_most": 1}]}, "unknown GPU 'H1000-SXM'; did you mean .*H100-SXM"),
        ({"gpus": []}, "at least one candidate GPU"),
        ({"gpus": [{"gpu": "L40S", "at_most": 0}]}, r"gpus\.0\.at_most: .*greater than 0, got 0"),
        ({"gpus": [{"gpu": "L40S", "at_most": 2, "interconnect": "nvlink"}]}, "L40S has no (?i:nvlink)"),
        ({"workload": {**SMALL["workload"], "rate": 0}}, r"workload\.rate: .*greater than 0, got 0"),
        ({"workload": {"rate": 1, "output_tokens": {"mean": 9}}}, "needs prompt_tokens"),
        ({"workload": {**SMALL["workload"], "requests": 10}}, "requests and within_hours go together"),
        ({"workload": {**SMALL["workload"], "prompt_tokens": {"mean": 9, "p95": 8}}}, "prompt_tokens: no lognormal"),
        ({"workload": {"trace": "no-such.csv"}}, "cannot read the trace"),
        ({"service_level": {}}, "service_level: state at least one limit"),
        ({"service_level": {"latency": {"p95": 3}}}, r"service_level\.latency.*'ttft', 'itl', 'tpot' or 'e2e'"),
        ({"service_level": {"ttft": {"p42": 3}}}, r"service_level\.ttft\.p42.*'mean', 'p50', 'p95' or 'p99'"),
        ({"engine": "vlm"}, "unknown engine 'vlm'; did you mean vllm"),
        ({"engine_version": "9.9"}, "engine_version 9.9"),
        ({"engine_args": {"max_num_seq": 4}}, "unknown engine argument 'max_num_seq'; did you mean max_num_seqs"),
        (
            {"engine_args": {"max_num_seqs": 64000}},
            "max_num_batched_tokens .* must be greater than",
        ),
        ({"engine_version": "0.20.2", "kv_cache_dtype": ["fp9"]}, "mine: kv_cache_dtype 'fp9' is none of auto"),
        ({"engine_args": {"max_num_seqs": 6.4}}, "engine_args, field max_num_seqs: .*integer.*, got 6.4"),
        ({"engine_args": {"enforce_eager": "banana"}}, "engine_args, field enforce_eager: .*boolean.*, got 'banana'"),
        ({"quantization": ["fp7"]}, "unknown quantization 'fp7'"),
        ({"prices": {"H100": 0}}, r"prices\.H100: .*greater than 0"),
        ({"memory_calibration": {"nccl": 1}}, "memory_calibration.nccl.*'weights', 'activation', 'non_torch' or 'cuda"),
        (
            {"memory_calibration": {"weights": 1e9}},
            r"memory_calibration\.weights: .*less than or equal to 10000, got 1000000000",
        ),
        ({"headroom": 1}, "field headroom: .*less than 1, got 1"),
        ({"headroom": -0.1}, "field headroom: .*greater than or equal to 0"),
        ({"refused_at_most": float("nan")}, "field refused_at_most: .*got nan"),
        ({"traits": {"agentic": True}}, "unknown trait 'agentic'; did you mean structured_or_agentic"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerError, match=message) as caught:
        scenario({**SMALL, **changes}, "mine")
    assert str(caught.value).startswith("mine") and "\n" not in str(caught.value)


def test_an_unknown_scenario_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="unknown scenario 'chat-70'; did you mean chat-70b"):
        load_scenario("chat-70")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(PlannerError, match="expected fields such as model"):
        load_scenario(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("a: [1\n")
    with pytest.raises(PlannerError, match="not valid YAML"):
        load_scenario(tmp_path / "torn.yaml")
    with pytest.raises(PlannerError, match="cannot read"):
        load_scenario(tmp_path / "absent.yaml")
