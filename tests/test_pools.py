"""Pools of prefill and decode workers: chosen where they cost less and hold at the pessimistic end, and started so."""

import os
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import answer_of

from planner.analysis import layout_tables as pool_tables
from planner.answers import serialize_answer
from planner.core.errors import PlannerError
from planner.deploy import build_launches, list_artifact_files, render_artifacts
from planner.deploy.manifests import explain_unsupported_kinds
from planner.engines.cli_options import get_cli_options
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.disaggregated_search import search_pools
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, parse_scenario
from planner.planning.search import search_deployments
from planner.ui.plan_files import write_plan_files

CHEAPER = [[6000, 150, 6, 4000, 25], [3000, 200, 12, 3000, 16], [5000, 150, 7, 4000, 22]]
"""Prompt, output, rate, ms of p95 TTFT and p99 ITL: long prompts beside a strict gap between tokens."""
DEARER = ((500, 200, 10), (1000, 300, 4), (200, 500, 6))
EASY = {"ttft": {"p95": 1500}, "tpot": {"p95": 50}}


def asked(prompt: int, output: int, rate: float, level: dict[str, Any], **more: Any) -> Scenario:
    workload = {
        "prompt_tokens": {"mean": prompt, "p95": 1.5 * prompt},
        "output_tokens": {"mean": output, "p95": 2 * output},
    }
    data = {"question": "?", "model": "meta-llama/Llama-3.1-8B-Instruct", "gpus": [{"gpu": "H100-SXM", "at_most": 8}],
            "workload": {**workload, "rate": rate}, "service_level": level, "pools": True}  # fmt: skip
    return parse_scenario({**data, **more}, "pools")


@cache
def plan_of(prompt: int, output: int, rate: float, ttft: float, itl: float) -> Plan:
    return search_deployments(
        asked(prompt, output, rate, {"ttft": {"p95": ttft}, "itl": {"p99": itl}})
    )


@pytest.mark.parametrize(("prompt", "output", "rate"), DEARER)
def test_short_prompts_and_an_easy_pace_are_not(prompt: int, output: int, rate: float) -> None:
    plan = search_deployments(asked(prompt, output, rate, EASY))
    assert (
        plan.chosen
        and not plan.chosen.is_disaggregated
        and plan.chosen is plan.without_disaggregation.chosen
    )
    assert (
        plan.best_disaggregated
        and plan.best_disaggregated.is_simulated
        and plan.best_disaggregated.cost_key >= plan.chosen.cost_key
    )


@settings(max_examples=3, deadline=None)
@given(
    st.integers(200, 8000), st.integers(50, 500), st.floats(0.5, 12), st.floats(1000, 6000), st.floats(12, 60),
    st.integers(2, 8),
)  # fmt: skip
def test_allowing_pools_never_costs_more(
    prompt: int, output: int, rate: float, ttft: float, itl: float, gpus: int
) -> None:
    level = {"ttft": {"p95": ttft}, "itl": {"p99": itl}}
    question = asked(prompt, output, rate, level, gpus=[{"gpu": "H100-SXM", "at_most": gpus}])
    plan, without = (
        search_deployments(question),
        search_deployments(replace(question, allow_disaggregation=False)),
    )
    if without.chosen:
        assert plan.chosen and plan.chosen.rank_key <= without.chosen.rank_key
    if without.chosen and not without.chosen.at_risk:
        assert plan.chosen and plan.chosen.cost_key <= without.chosen.cost_key
    if plan.chosen and plan.chosen.is_disaggregated:
        assert plan.chosen.prediction.num_gpus_billed <= gpus


def test_slower_steps_let_queues_grow_at_the_pessimistic_end() -> None:
    """Near its capacity a slower step means a queue, not a TTFT that is longer by the factor of the step."""
    first, rest = plan_of(*CHEAPER[0]).chosen.prediction.pools  # type: ignore[union-attr]
    load = plan_of(*CHEAPER[0]).scenario.workload
    calm, busy = (
        evaluate_disaggregated(first, rest, load.with_rate(rate)).performance for rate in (2.0, 9.5)
    )
    assert calm and busy
    reach = [found.get("ttft", "mean").hi / found.get("ttft", "mean").mid for found in (calm, busy)]
    assert reach[1] > 2 * reach[0]


@pytest.mark.parametrize(
    ("more", "why"),
    (
        ({"engine_version": "0.8.5"}, "vllm 0.8.5"),
        ({"adapters": {"count": 8}}, "adapters"),
    ),
)
def test_what_cannot_be_in_pools_is_said(more: dict[str, Any], why: str) -> None:
    few = {"gpus": [{"gpu": "H100-SXM", "at_most": 2}]}
    plan = search_deployments(asked(500, 200, 2, EASY, **few, **more))
    assert plan.best_disaggregated is None and any(
        "pools are not evaluated" in note and why in note for note in plan.notes
    )


def test_a_model_with_sliding_windows_has_no_pools() -> None:
    assert search_pools(asked(500, 200, 2, EASY, model="google/gemma-3-27b-it")) == []


def test_an_early_connector_takes_the_same_tensor_parallel_size() -> None:
    """vLLM pull 27274 brought a narrower decode worker; before, the engine refused it when it met the other."""
    level = {"ttft": {"p95": 4000}, "itl": {"p99": 25}}
    shapes = {version: {tuple(pool.layout.tp for pool in one.prediction.pools)
              for one in search_pools(asked(3000, 200, 4, level, engine_version=version))}
              for version in ("0.9.0", "0.12.0", "0.20.2")}  # fmt: skip
    assert all(before == after for before, after in shapes["0.9.0"]) and shapes["0.9.0"]
    assert all(before <= after for before, after in shapes["0.12.0"]) and (1, 2) in shapes["0.12.0"]
    assert (2, 1) in shapes["0.20.2"]


@pytest.mark.parametrize(
    ("engine", "version", "wanted"),
    (("vllm", "0.20.2", "--kv-transfer-config"), ("vllm", "0.33.0", "--kv-transfer-config"),
     ("sglang", "0.5.10", "--disaggregation-mode"), ("sglang", "0.5.23", "--disaggregation-mode")),
)  # fmt: skip
def test_both_workers_start_as_planned_by_the_engines_own_parser(
    engine: str, version: str, wanted: str
) -> None:
    """Every planned value is in the command, as this version's options take it."""
    question = asked(6000, 150, 3, EASY, engine=engine, engine_version=version)
    best = search_pools(question)[0]
    first, rest = build_launches(best.prediction)
    assert {first.role, rest.role} == {"prefill", "decode"}
    for start in (first, rest):
        words, args = start.command, start.deployment.args
        known = get_cli_options(engine, version)
        assert not known.parse(
            words[words.index(question.model) + 1 :] if engine == "vllm" else words[5:]
        ).errors
        flags = {flag.name: flag.value for flag in start.flags}
        assert wanted in flags
        seqs, length = ("--max-num-seqs", "--max-model-len") if engine == "vllm" else ("--max-running-requests",
                                                                                        "--context-length")  # fmt: skip
        assert flags[seqs] == str(args.max_num_seqs) and flags[length] == str(args.max_model_len)
    assert first.port != rest.port


def test_what_has_no_router_is_refused() -> None:
    best = plan_of(*CHEAPER[0]).chosen
    assert best
    other = asked(500, 200, 2, EASY, engine="trtllm")
    pools = [replace(pool, engine=other.engine) for pool in best.prediction.pools]
    found = replace(best.prediction, prefill=pools[0], deployment=pools[1])
    with pytest.raises(PlannerError, match="router"):
        render_artifacts(found, ())


def test_the_scripts_start_the_planned_workers(tmp_path: Path) -> None:
    """Run with programs that only say how they were called: ports and GPUs count up, and the router has them all."""
    plan = plan_of(*CHEAPER[0])
    names = write_plan_files(answer_of(plan), tmp_path)
    assert {"prefill.sh", "decode.sh", "router.sh", "bench.sh"} <= set(names)
    for program in ("vllm", "vllm-router"):
        (tmp_path / program).write_text(
            '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $VLLM_NIXL_SIDE_CHANNEL_PORT $@"\n'
        )
        (tmp_path / program).chmod(0o755)
    base = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
    }

    def run(name: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(tmp_path / name), *args]
        return subprocess.run(
            command, env={**base, **environment}, capture_output=True, text=True, check=False
        )

    second = run("prefill.sh", "1", FIRST_GPU="4").stdout
    assert (
        second.startswith("5 5601 serve") and "--port 8001" in second and "NixlConnector" in second
    )
    assert run("decode.sh").stdout.startswith("0 5700 serve")
    urls = ["http://a:8000", "http://a:8001"]
    routed = run("router.sh", PREFILL=" ".join(urls), DECODE="http://b:8100").stdout
    assert (
        f"--prefill {urls[0]} --prefill {urls[1]} --decode http://b:8100" in routed
        and "round_robin" in routed
    )
    assert run("router.sh", PREFILL=urls[0], DECODE="http://b:8100").returncode == 2


def test_what_is_not_written_for_pools_is_said() -> None:
    best = plan_of(*CHEAPER[0]).chosen.prediction
    kinds = ("alerts", "dashboard", "compose", "kubernetes", "runpod")
    assert set(explain_unsupported_kinds(best, ("script", *kinds))) == set(kinds)
    with pytest.raises(PlannerError, match="files: not compose: pools have none"):
        render_artifacts(best, (), wanted=("compose",))


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_the_units_of_pools_pass_systemd_analyze(tmp_path: Path) -> None:
    """One of each pool and the router's; each starts its own script."""
    write_plan_files(answer_of(plan_of(*CHEAPER[0])), tmp_path)
    for name, words in {
        "headroom-prefill@": "prefill.sh %i",
        "headroom-decode@": "decode.sh %i",
        "headroom-router": "router.sh",
    }.items():
        unit = tmp_path / f"{name}.service"
        assert f"\nExecStart=/bin/bash /opt/headroom/{words}\n" in unit.read_text()
        checked = subprocess.run(
            ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
        )
        assert unit.name not in checked.stderr, checked.stderr


def test_more_workers_of_either_pool_never_bring_it_nearer_to_a_limit() -> None:
    plan = plan_of(*CHEAPER[0])
    assert plan.chosen
    grid = pool_tables.sweep_pool_sizes(plan, plan.chosen).pivot(
        index="prefill workers", columns="decode workers", values="share of the tightest limit"
    )
    assert (grid.diff().dropna() < 0.02).all(axis=None) and (grid.T.diff().dropna() < 0.02).all(
        axis=None
    )
    assert grid.loc[1].min() > 1


def test_plan_json_has_both_pools_and_their_sum() -> None:
    plan = plan_of(*CHEAPER[0])
    found = serialize_answer(answer_of(plan))
    pools = found["pools"]
    assert (
        found["gpus"]
        == pools["prefill"]["gpus"] + pools["decode"]["gpus"]
        == plan.chosen.prediction.num_gpus
    )  # type: ignore[union-attr]
    assert set(found["commands"]) == {"prefill", "decode"} and found["command"] is None
    assert found["runner_up"]["pools"] is None and found["verdict"] == "holds"
    # 2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes a token over 50 GB/s (400 Gbit/s)
    assert pools["kv_transfer_ms_mean"] == pytest.approx(6000 * 131072 / 50e9 * 1e3, rel=1e-3)
    own_files = list_artifact_files(plan.chosen.prediction, plan.scenario.output_kinds)  # type: ignore[union-attr]
    assert sorted(found["files"]) == sorted(own_files)
