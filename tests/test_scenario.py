"""Scenario files: what they may say, and how a mistake in one is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.models.registry import load_model
from planner.planning.prediction import evaluate
from planner.planning.scenario import (
    list_scenarios,
    load_scenario,
    parse_scenario,
)
from planner.planning.scenario_schema import ScenarioEntry
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

SMALL = {
    "question": "?",
    "model": "meta-llama/Llama-3.1-8B",
    "gpus": [{"gpu": "h100 sxm", "at_most": 4}],
    "workload": {
        "prompt_tokens": {"mean": 500},
        "output_tokens": {"mean": 100, "p95": 200},
        "rate": 2,
    },
    "service_level": {"ttft": {"p95": 500}},
}


def test_at_least_six_scenarios_load_and_cite_their_traffic() -> None:
    assert len(list_scenarios()) >= 6 and "chat-70b" in list_scenarios()
    for name in list_scenarios():
        found = load_scenario(name)
        assert found.name == name and found.gpus and (found.slo_targets or found.offline)


def test_the_default_has_the_azure_traces_figures() -> None:
    workload = load_scenario("chat-70b").workload
    assert workload.rate == 5.53
    assert (workload.prompt.mean, workload.output.mean) == (
        pytest.approx(1154.7),
        pytest.approx(211.1),
    )
    assert (workload.prompt.p95, workload.output.p50) == (
        pytest.approx(4083, rel=0.02),
        pytest.approx(129, rel=0.02),
    )


def test_units_are_taken_in_at_the_edge() -> None:
    changes = {
        "other_tenants_gib": 2,
        "prices": {"H100 SXM": 2.5},
        "memory_calibration": {"non_torch": -0.5},
    }
    found = parse_scenario({**SMALL, **changes}, "mine")
    assert found.memory_calibration == {"non_torch": -0.5 * GIB}
    assert found.other_tenants == 2 * GIB
    assert found.prices.user_prices == {"H100-SXM": 2.5}
    assert (
        found.slo_targets[0].seconds == 0.5
        and str(found.slo_targets[0]) == "p95 TTFT of at most 500 ms"
    )


def test_a_fifth_of_the_capacity_stays_free_and_one_request_in_a_hundred_may_be_refused() -> None:
    found = parse_scenario(SMALL, "mine")
    assert (found.headroom, found.refused_at_most) == (0.2, 0.01)
    found = parse_scenario({**SMALL, "headroom": 0, "refused_at_most": 0.05}, "mine")
    assert (found.headroom, found.refused_at_most) == (0, 0.05)


def test_one_item_needs_no_list() -> None:
    found = parse_scenario({**SMALL, "quantization": "fp8", "gpus": SMALL["gpus"][0]}, "mine")
    assert found.quantizations == ("fp8",) and len(found.gpus) == 1


NEWEST_SGLANG = str(get_engine("sglang"))


@pytest.mark.parametrize(
    ("asked", "engines"),
    [
        (["vllm", "sglang"], ["vllm 0.20.2", NEWEST_SGLANG]),
        (["sglang", "vllm"], [NEWEST_SGLANG, "vllm 0.20.2"]),
        (["vllm 0.19.0", "sglang 0.5.9"], ["vllm 0.19.0", "sglang 0.5.9"]),
    ],
)
def test_engine_version_is_that_of_the_engine_that_has_such_a_release(
    asked: list[str], engines: list[str]
) -> None:
    """vLLM has a release 0.20.2; SGLang's end with 0.5."""
    scenario = load_scenario("chat-70b", {"engine": asked})
    assert scenario.fields["engine_version"] == "0.20.2"
    assert [str(each.engine) for each in scenario.split_by_engine] == engines


def test_an_engine_version_that_no_engine_has_is_refused() -> None:
    with pytest.raises(PlannerError, match=r"engine_version 9\.9 of sglang is not known"):
        load_scenario("chat-70b", {"engine": ["sglang", "vllm"], "engine_version": "9.9"})


@pytest.mark.parametrize(
    ("engine", "version", "told"),
    [
        ("vllm", "0.33.0", "--runner pooling"),
        ("vllm", "0.8.5", "--task embed"),  # --runner came later
        ("sglang", "0.5.10", "--is-embedding"),  # server_args.py
        ("trtllm", None, "no option for embeddings"),
    ],
)
def test_the_option_for_embeddings_is_that_of_the_engine(
    engine: str, version: str | None, told: str
) -> None:
    lengths = {"prompt_tokens": {"exactly": 512}, "output_tokens": {"exactly": 1}}
    fields = {"engine": engine, "workload": {**lengths, "rate": 5}}
    if version:
        fields["engine_version"] = version
    told_all = " ".join(parse_scenario({**SMALL, **fields}, "mine").assumptions)
    assert told in told_all and (engine == "vllm") == ("vllm" in told_all)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-Reranker-4B"])
def test_an_embedding_is_a_prompt_alone(model: str) -> None:
    """No decode step and no sequence that stays; 2 FLOPs a weight and token and the GPU's peak bound it."""
    lengths = {"prompt_tokens": {"exactly": 512}, "output_tokens": {"exactly": 1}}
    fields = {
        "model": model,
        "service_level": {"e2e": {"p95": 500}},
        "gpus": {"gpu": "H100-SXM", "at_most": 8},
    }
    scenario = parse_scenario({**SMALL, **fields, "workload": {**lengths, "rate": 5}}, "mine")
    assert any("only prompts are computed" in text for text in scenario.assumptions)
    prediction = evaluate(deploy_on(model, "H100-SXM"), scenario.workload)
    performance = prediction.performance
    assert performance is not None and performance.capacity is not None
    assert performance.decode_batch == performance.kv_usage == 0
    weights = load_model(model).architecture.params_total
    fastest_rps = 989.4e12 / (2 * 0.8 * weights * 512)  # a fifth may be embeddings
    assert 0.15 * fastest_rps < performance.capacity.mid < fastest_rps


def test_an_encoder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    config = {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlannerError, match="encoders have no KV cache and generate nothing"):
        parse_scenario({**SMALL, "model": "config.json"}, "mine", tmp_path)


def test_requests_within_hours_are_a_rate() -> None:
    workload = {**SMALL["workload"], "requests": 36_000, "within_hours": 2}
    del workload["rate"]
    found = parse_scenario({**SMALL, "workload": workload, "service_level": {}}, "mine")
    assert found.offline and found.workload.rate == 5


def test_a_trace_lies_beside_the_scenario_and_figures_beside_it_win(tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text(
        "arrival,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n2,300,30\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({**SMALL, "workload": {"trace": "day.csv", "output_tokens": {"mean": 50}}})
    )
    workload = load_scenario(path).workload
    assert (workload.prompt.mean, workload.output.mean, workload.rate) == (
        200,
        pytest.approx(50),
        1,
    )


def test_a_config_json_lies_beside_the_scenario_and_bears_its_folders_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
              "max_position_embeddings": 8192}  # fmt: skip
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "config.json").write_text(json.dumps(config))
    for written in ("acme", "acme/config.json"):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**SMALL, "model": written}))
        found = load_scenario(tmp_path / "mine.yaml")
        assert found.model == str(tmp_path / written)
        deployment = deploy_on(found.model, "L40S")
        assert deployment.model.served_name == "acme"


def served(**workload: object) -> Workload:
    """SMALL's workload, with other fields; None takes one out."""
    changed = {
        name: value
        for name, value in {**SMALL["workload"], **workload}.items()
        if value is not None
    }
    return parse_scenario({**SMALL, "workload": changed}, "mine").workload


def test_a_mean_alone_is_spread_as_in_public_traffic_and_exactly_is_not() -> None:
    """Azure's conversations (2023) again from their mean: p95 3.5 x, p99 3.6 x the mean of prompts."""
    told, known = (
        served(prompt_tokens={"mean": 1154.7}),
        LengthDistribution.from_lognormal(1154.7, 4083, 1020, 4142),
    )
    assert np.allclose(told.prompt.values, known.values, rtol=1e-3)
    assert (
        "Azure conversation 2023" in told.assumptions[0]
        and "{exactly: 1154.7}" in told.assumptions[0]
    )
    constant = served(prompt_tokens={"exactly": 1154.7}, output_tokens={"exactly": 211.1})
    assert constant.prompt.p99 == 1154.7 and constant.assumptions == ()
    assert parse_scenario(
        {**SMALL, "workload": {**SMALL["workload"], "prompt_tokens": {"mean": 9}}}, "mine"
    ).assumptions


def test_assumed_lengths_stay_within_the_context() -> None:
    """Llama-3.1-8B takes 131,072 tokens of prompt and output: a mean alone must not ask for more."""
    long = served(prompt_tokens={"mean": 60_000}, output_tokens={"mean": 1000})
    assert (
        long.prompt.mean == pytest.approx(60_000, rel=2e-3)
        and long.prompt.max_tokens <= 131_072 - 1000 + 1
    )
    limited = served(prompt_tokens={"mean": 500, "max": 700})
    assert limited.prompt.mean == pytest.approx(500, rel=2e-3) and limited.prompt.max_tokens <= 701
    shorter = {
        "engine_args": {"max_model_len": 1024},
        "workload": {**SMALL["workload"], "prompt_tokens": {"mean": 500}},
    }
    assert parse_scenario({**SMALL, **shorter}, "mine").workload.prompt.max_tokens <= 1024 - 100 + 1


def test_users_in_a_closed_loop_instead_of_a_rate() -> None:
    workload = served(concurrency=64, rate=None)
    assert (workload.rate, workload.concurrency, workload.num_requests) == (None, 64, 640)
    assert served(rate=0.5).num_requests == 300


def test_overrides_reach_fields_and_items_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "prices": None}))
    before = path.read_text()
    changes = {
        "workload.rate": 12,
        "gpus.0.at_most": 8,
        "prices.L40S": 1.5,
        "workload.shared_prefix.tokens": 7,
    }
    found = load_scenario(path, changes)
    assert (found.workload.rate, found.gpus[0].max_gpus, found.workload.prefix_tokens) == (12, 8, 7)
    assert found.prices.user_prices == {"L40S": 1.5}
    assert path.read_text() == before and [*tmp_path.iterdir()] == [path]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "day.csv").write_text(
        "arrival,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_scenario(path, {"workload": {"trace": "day.csv"}}).workload.prompt.mean == 150


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("gpus.3.at_most", "cannot set gpus.3.at_most: mine.yaml has 1 items there, numbered from 0, not 3"),
        ("gpus.at_most", "numbered from 0, not at_most"),
        ("question.short", "cannot set question.short: mine.yaml has '[?]' there"),
        ("workload.think_time", "set rate to N / T; for N users who ask again at once"),
        ("workload.users", "set rate to N / T"),
        ("service_level.ttft.p96", "field service_level.ttft.p96: must be 'mean'"),
        ("workload.rat", "mine, field workload.rat: unknown field; did you mean rate?"),
        ("gpus.0.at_mots", r"field gpus\.0\.at_mots: unknown field; did you mean at_most?"),
        ("headrom", "mine, field headrom: unknown field; did you mean headroom"),
        ("rate", "mine, field rate: unknown field; it is workload.rate"),
        ("workload.headroom", r"workload\.headroom: unknown field; it is headroom, at the top"),
    ],
)  # fmt: skip
def test_an_override_that_leads_nowhere(key: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(SMALL))
    with pytest.raises(PlannerError, match=message):
        load_scenario(tmp_path / "mine.yaml", {key: 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "x"}, "mine, field modle: unknown field; did you mean model"),
        ({"model": "meta-llama/Llama-3.1-8"}, "did you mean meta-llama/Llama-3.1-8B"),
        ({"gpus": [{"gpu": "H1000-SXM", "at_most": 1}]}, "unknown GPU 'H1000-SXM'; did you mean .*H100-SXM"),
        ({"gpus": []}, "at least one candidate GPU"),
        ({"gpus": [{"gpu": "L40S", "at_most": 0}]}, r"gpus\.0\.at_most: .*above 0, got 0"),
        (
            {"gpus": [{"gpu": "L40S", "at_most": 2, "interconnect": "nvlink"}]},
            "L40S has no (?i:nvlink)",
        ),
        (
            {"workload": {**SMALL["workload"], "rate": 0}},
            r"workload\.rate: .*at least 0.000001, got 0",
        ),
        (
            {"workload": {**SMALL["workload"], "prompt_tokens": {"exactly": 200_000}}},
            (
                r"prompt_tokens and output_tokens, .* do not fit into the model's context length"
                r" \(131,072 tokens\)"
            ),
        ),
        (
            {"engine_args": {"max_model_len": 500}},
            r"do not fit into engine_args, field max_model_len \(500 tokens\)",
        ),
        ({"workload": {"rate": 1, "output_tokens": {"mean": 9}}}, "needs prompt_tokens"),
        ({"workload": {**SMALL["workload"], "requests": 10}}, "requests within_hours say the rate: leave out rate"),
        ({"workload": {**SMALL["workload"], "prompt_tokens": {"mean": 9, "p95": 8}}}, "prompt_tokens: no lognormal"),
        ({"workload": {"trace": "no-such.csv"}}, f"no trace no-such.csv in {Path.cwd()}"),
        ({"service_level": {}}, "service_level: state at least one limit"),
        ({"service_level": {"latency": {"p95": 3}}}, r"service_level\.latency.*'ttft', 'tpot', 'itl' or 'e2e'"),
        ({"engine": "vlm"}, "unknown engine 'vlm'; did you mean vllm"),
        ({"engine_args": {"max_num_seq": 4}}, r"unknown engine argument of vllm \S+ 'max_num_seq'"),
        ({"engine_args": {"max_num_seqs": 64000}}, "max_num_batched_tokens .* must be greater than"),
        ({"engine_version": "0.20.2", "kv_cache_dtype": ["fp9"]}, "mine: kv_cache_dtype 'fp9' is none of auto"),
        ({"engine_args": {"max_num_seqs": 6.4}}, "engine_args, field max_num_seqs: must be a whole number, got 6.4"),
        ({"quantization": ["fp7"]}, "unknown quantization 'fp7'"),
        ({"prices": {"H100": 0}}, r"prices\.H100: .*at least 0.001"),
        ({"memory_calibration": {"nccl": 1}}, "memory_calibration.nccl.*'weights', 'activation', 'non_torch' or 'cuda"),
        ({"headroom": 1}, "field headroom: .*below 1, got 1"),
        ({"refused_at_most": float("nan")}, "field refused_at_most: .*got nan"),
        ({"quantization": []}, "field quantization: .*at least 1 item"),
        (
            {"other_tenants_gib": 1e300},
            "other_tenants_gib: .*at most 1000000, got 1e",
        ),
        (
            {"workload": {**SMALL["workload"], "prompt_tokens": 1000}},
            r"prompt_tokens: must be fields with values, .*got 1000; accepted: exactly, .*mean",
        ),
        ({"headroom": True}, "field headroom: must be a number, got True"),
        ({"workload": {**SMALL["workload"], "rate": "60/24"}}, r"a number, got '60/24'"),
        ({"workload": {**SMALL["workload"], "concurrency": 8}}, "workload: with a concurrency .* leave out rate"),
        ({"workload": {**SMALL["workload"], "rate": None, "concurrency": 2.5}},
         r"workload\.concurrency: .*whole number"),
        ({"workload": {"concurrency": 8, "trace": "day.csv"}}, "leave out trace"),
        ({"workload": {**SMALL["workload"], "rate": None}}, "needs a rate .*, a concurrency"),
        (
            {"workload": {**SMALL["workload"], "prompt_tokens": {"mean": 9, "exactly": 9}}},
            "prompt_tokens: exactly says .* leave out mean",
        ),
        (
            {"workload": {**SMALL["workload"], "prompt_tokens": {"p95": 9}}},
            "prompt_tokens: needs the mean",
        ),
        (
            {"workload": {**SMALL["workload"], "prompt_tokens": {"mean": 9, "max": 8}}},
            "prompt_tokens: max must not be",
        ),
        (
            {"workload": {**SMALL["workload"], "output_tokens": {"mean": 0.5}}},
            "output_tokens: .*at least 1 token",
        ),
        (
            {"traits": {"agentic": True}},
            "traits.agentic",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_names_the_field(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlannerError, match=message) as caught:
        parse_scenario({**SMALL, **changes}, "mine")
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


def test_a_model_that_is_not_known_by_its_name_is_said_to_be_taken_for_another() -> None:
    """A slip of the pen must not look like the model that was meant."""
    slip = parse_scenario({**SMALL, "model": "Qwen/Qwen2.5-72B-Instuct"}, "slip")
    assert any("Instuct is not in the catalog" in said for said in slip.assumptions)
    assert all(said.endswith(".") for said in slip.assumptions)  # they stand one after another
    known = parse_scenario({**SMALL, "model": "Qwen/Qwen2.5-72B-Instruct"}, "known")
    assert not any("catalog" in said for said in known.assumptions)


def test_all_mistakes_of_a_file_are_told_at_once_and_none_is_cut() -> None:
    """Four fields and a name are wrong; every field that exists is listed."""
    wrong = {
        **SMALL, "modle": "x", "headroom": "20%", "gpus": [{"gpu": "H1000", "at_most": 0}],
        "service_level": {"ttft": {"p95": "2s"}},
    }  # fmt: skip
    with pytest.raises(PlannerError) as caught:
        parse_scenario(wrong, "mine")
    unknown, *others = caught.value.problems
    assert "did you mean model?" in unknown and "..." not in unknown
    assert all(field in unknown for field in ScenarioEntry.model_fields)
    for field, hint in (
        ("gpus.0.at_most: must be above 0", ""),
        ("service_level.ttft.p95: must be a number, got '2s'", ""),
        ("headroom: must be a number, got '20%'", ""),
        ("unknown GPU 'H1000'", "did you mean"),
    ):
        assert any(field in problem and hint in problem for problem in others), field
    assert len(others) == 4 and "Entry" not in " ".join(others)
    assert str(caught.value).endswith("(and 4 more)") and len(str(caught.value)) <= 400


def test_a_scenario_needs_no_question() -> None:
    fields = {name: value for name, value in SMALL.items() if name != "question"}
    assert SMALL["model"] in parse_scenario(fields, "mine").question


@pytest.mark.parametrize(
    ("rate", "accepted"),
    [([6, 4], "two rising ones"), ([4], "two rising ones"), ([0, 3], "at least 0.000001"), ([1, "max"], "a number")],
)  # fmt: skip
def test_a_range_of_traffic_rises(rate: list[Any], accepted: str) -> None:
    with pytest.raises(PlannerError, match=accepted):
        load_scenario("chat-70b", {"workload.rate": rate})
