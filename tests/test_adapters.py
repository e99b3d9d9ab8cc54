"""Multi-LoRA in the replay: at most `max_loras` adapters in a step, as vLLM has it; loads; what a step costs more."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launch_plans import TOKENIZER
from shipped import plan_once

from planner.analysis.memory_sweeps import build_budget_table
from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.deploy import build_launch, render_artifacts
from planner.engines.deployment import deploy_on
from planner.latency.lora_adapters import (
    compute_adapter_bytes,
    compute_adapter_costs,
    estimate_distinct_adapters,
)
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import ADAPTERS_LABEL, get_memory_plan
from planner.planning.prediction import evaluate
from planner.planning.scenario import parse_scenario
from planner.planning.simulation_runs import simulate_once
from planner.simulator.kernel_types import NOTE_ENTRY, EngineRules, RequestBatch, StepCostTable
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import (
    build_engine_rules,
    build_step_cost_table,
    simulate_requests,
    simulate_workload,
)
from planner.workload.length_distribution import LengthDistribution
from planner.workload.request_generator import sample_arrivals
from planner.workload.workload import Workload, compute_zipf_fractions

STEPS = StepCostTable(np.linspace(0.004, 0.03, 4097), np.linspace(0, 0.002, 300))
N, ADAPTERS = 1500, 16


def served(
    slots: int, host: int = ADAPTERS, table: StepCostTable = STEPS, log: bool = False
) -> SimulationResult:
    rng = np.random.default_rng(0)
    rules = EngineRules(
        64, 512, 3000, 1024, False, True, 0, False, False, False, np.array([[0, 16]]),
        max_loras=slots,
        max_cpu_loras=host,
    )  # fmt: skip
    prompt, output, adapter = (
        rng.integers(10, 300, N),
        rng.integers(1, 200, N),
        rng.integers(-1, ADAPTERS, N),
    )
    return simulate_requests(
        rules,
        table,
        RequestBatch(sample_arrivals(N, 8.0, 1.0, rng), prompt, output, adapter=adapter),
        log_steps=log,
    )


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_step_has_at_most_so_many_adapters_and_lets_others_past(slots: int) -> None:
    rng = np.random.default_rng(0)
    rng.integers(10, 300, N), rng.integers(1, 200, N)
    adapter = rng.integers(-1, ADAPTERS, N)
    step, request = served(slots, log=True).outcome.get_notes(NOTE_ENTRY, 2).astype(int).T
    pairs = np.unique(np.stack([step, adapter[request]])[:, adapter[request] >= 0], axis=1)
    assert np.bincount(pairs[0]).max() == slots
    found = served(slots).outcome
    order = np.argsort(found.scheduled, kind="stable")
    assert (np.diff(order) < 0).any(), "some are let past others that wait for a slot"
    for a in range(-1, ADAPTERS):
        assert (np.diff(found.scheduled[adapter == a]) >= 0).all(), (
            "but not past their own adapter's"
        )
    assert not np.isnan(found.last_token).any()


def test_each_adapter_is_loaded_once_where_all_have_a_slot() -> None:
    dear = STEPS._replace(adapter_load_s=1e-6)
    without, loads = served(ADAPTERS).outcome, served(ADAPTERS, table=dear).outcome
    assert loads.totals[1] - without.totals[1] == pytest.approx(ADAPTERS * 1e-6, rel=0.5)
    table = STEPS._replace(adapter_load_s=0.01, adapter_cold_s=0.1)
    few = served(4, 4, table)
    assert few.ttft.mean() > served(4, ADAPTERS, table).ttft.mean()


@pytest.mark.parametrize(
    ("model", "slots", "adapters", "per_adapter", "out_tps"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 8, 384, (0.1, 0.05, 0.025), 3374),
        ("Qwen/Qwen2.5-7B-Instruct", 64, 128, (0.4, 0.05, 0.0125), 3798),
        ("Qwen/Qwen2.5-7B-Instruct", 160, 320, (0.05, 0.0125, 0.003125), 1360),
        ("meta-llama/Llama-3.1-8B-Instruct", 128, 384, (0.1, 0.05, 0.025), 3014),
    ],
)
def test_an_hour_with_hundreds_of_adapters(
    model: str, slots: int, adapters: int, per_adapter: tuple[float, ...], out_tps: float
) -> None:
    """Output tokens/s measured on H100 64 GB: arXiv 2508.08343, runs of 2025 (223 / 193 tokens on average)."""
    deployment = deploy_on(
        model, "H100-SXM-64GB", engine_version="0.9.2", max_num_seqs=2048, max_loras=slots,
        max_lora_rank=16,
        enable_prefix_caching=False,
    )  # fmt: skip
    rng, seconds, step = np.random.default_rng(0), 3600.0, build_step_model(deployment)
    asked = np.resize(per_adapter, adapters)
    n = int(asked.sum() * seconds)
    prompt, output = (
        rng.gamma(1.2, 223 / 1.2, n).astype(int) + 1,
        rng.gamma(1.6, 193 / 1.6, n).astype(int) + 1,
    )
    adapter = rng.choice(adapters, n, p=asked / asked.sum())
    sent = RequestBatch(np.sort(rng.random(n)) * seconds, prompt, output, adapter=adapter)
    rules = build_engine_rules(deployment, get_memory_plan(deployment).pool)._replace(
        max_loras=slots, max_cpu_loras=adapters
    )
    found = simulate_requests(
        rules,
        build_step_cost_table(step)._replace(**compute_adapter_costs(deployment)._asdict()),
        sent,
    ).outcome
    served = output[found.last_token <= seconds].sum() / seconds
    assert served == pytest.approx(out_tps, rel=0.17)


def test_first_requests_wait_for_adapters_that_come_from_disk() -> None:
    """Llama-3.1-8B, 160 adapters of rank 16, 64 slots, 3.53 requests/s for an hour, measured: arXiv 2508.08343."""
    deployment = deploy_on(
        "meta-llama/Llama-3.1-8B-Instruct", "H100-SXM-64GB", engine_version="0.9.2",
        max_num_seqs=2048, max_loras=64,
        max_lora_rank=16, enable_prefix_caching=False,
    )  # fmt: skip
    rng, n = np.random.default_rng(0), 12_827
    prompt, output = (
        rng.gamma(1.2, 223 / 1.2, n).astype(int) + 1,
        rng.gamma(1.6, 193 / 1.6, n).astype(int) + 1,
    )
    asked = np.resize((0.05, 0.0125, 0.003125), 160)
    adapter = rng.choice(160, n, p=asked / asked.sum())
    sent = RequestBatch(np.sort(rng.random(n)) * 3600, prompt, output, adapter=adapter)
    rules = build_engine_rules(deployment, get_memory_plan(deployment).pool)._replace(
        max_loras=64, max_cpu_loras=160
    )
    costs = compute_adapter_costs(deployment)._asdict()
    found = simulate_requests(
        rules, build_step_cost_table(build_step_model(deployment))._replace(**costs), sent
    )
    assert found.compute_quantile("ttft", 0.5) * 1e3 == pytest.approx(51.6, rel=0.1)
    assert found.ttft.mean() * 1e3 == pytest.approx(80.0, rel=0.25)
    assert found.compute_quantile("ttft", 0.99) * 1e3 == pytest.approx(423.6, rel=0.2)
    warm = simulate_requests(
        rules,
        build_step_cost_table(build_step_model(deployment))._replace(
            **{**costs, "adapter_cold_s": 0.0}
        ),
        sent,
    )
    assert warm.compute_quantile("ttft", 0.99) * 1e3 < 0.3 * 423.6


def test_adapters_without_slots_are_refused() -> None:
    deployment = deploy_on("meta-llama/Llama-3.1-8B", "H100", engine_version="0.20.2")
    workload = Workload(
        LengthDistribution.from_constant(200),
        LengthDistribution.from_constant(20),
        rate=1.0,
        num_prompts=50,
        adapters=8,
        adapter_zipf=1.0,
    )
    pool, step = get_memory_plan(deployment).pool, build_step_model(deployment)
    with pytest.raises(PlannerError, match="max_loras"):
        simulate_workload(deployment, pool, step, workload)
    with_slots = deployment.with_args(max_loras=4)
    loads = workload, replace(workload, adapters=0)
    adapted, plain = (simulate_workload(with_slots, pool, step, load) for load in loads)
    assert adapted.tpot.mean() > plain.tpot.mean()


ASKED = {
    "question": "A customer, an adapter?", "model": "meta-llama/Llama-3.1-8B-Instruct",
    "engine_version": "0.20.2",
    "gpus": [{"gpu": "H100-SXM", "at_most": 2}],
    "adapters": {"count": 40, "ranks": [8, 12], "zipf": 1.0},
    "workload": {"prompt_tokens": {"mean": 600, "p95": 2000}, "output_tokens": {"mean": 200, "p95": 500}, "rate": 6},
    "service_level": {"tpot": {"p95": 40}},
}  # fmt: skip


@pytest.mark.parametrize("zipf", [0.0, 1.0])
@pytest.mark.parametrize(
    "load", [{"rate": 2.0}, {"rate": 6.0}, {"concurrency": 64, "num_prompts": 1500}]
)
def test_the_closed_form_counts_adapters_as_the_replay_does_where_all_have_a_slot(
    zipf: float, load: dict[str, float]
) -> None:
    deployment = deploy_on(
        "meta-llama/Llama-3.1-8B", "H100", engine_version="0.20.2", max_model_len=4096, max_loras=64
    )
    lengths = (
        LengthDistribution.from_lognormal(600, 2000),
        LengthDistribution.from_lognormal(200, 500),
    )
    workload = Workload(*lengths, adapters=64, adapter_zipf=zipf, **load)  # type: ignore[arg-type]
    steady, replayed = (
        evaluate(deployment, workload).performance,
        simulate_once(deployment, workload, 1500),
    )
    assert steady is not None
    assert steady.get("tpot", "mean").mid == pytest.approx(replayed.tpot.mean(), rel=0.06)
    plain = evaluate(deployment, replace(workload, adapters=0)).performance
    assert (
        plain is not None and steady.get("tpot", "mean").mid > 1.1 * plain.get("tpot", "mean").mid
    )


def test_a_mean_number_of_different_adapters_is_what_chance_makes_of_it() -> None:
    drawn = np.random.default_rng(0).choice(40, (4000, 24), p=compute_zipf_fractions(40, 1.2))
    found = np.mean([len(set(row)) for row in drawn.tolist()])
    assert estimate_distinct_adapters(40, 1.2, 24)[24] == pytest.approx(found, rel=0.01)


def test_a_higher_rank_costs_its_bytes_and_a_cold_adapter_more_than_one_in_host_memory() -> None:
    low, high = (
        deploy_on(
            "meta-llama/Llama-3.1-8B",
            "H100",
            engine_version="0.20.2",
            max_loras=4,
            max_lora_rank=rank,
        )
        for rank in (16, 64)
    )
    costs = compute_adapter_costs(low), compute_adapter_costs(high)
    assert compute_adapter_bytes(high) == 4 * compute_adapter_bytes(low)
    more = costs[1].adapter_s - costs[0].adapter_s
    assert more == pytest.approx(3 * compute_adapter_bytes(low) / low.gpu.memory_bandwidth)
    assert costs[0].adapter_cold_s > costs[0].adapter_load_s > costs[0].adapter_s
    read_s = compute_adapter_bytes(low) / low.gpu.memory_bandwidth
    assert costs[0].adapter_s > read_s, "kernels are launched, too"


def test_the_slots_of_adapters_are_no_weights() -> None:
    """Rank 32 on every linear layer of an 8B Llama trains 83,886,080 parameters, as PEFT prints."""
    base = deploy_on("meta-llama/Llama-3.1-8B", "L40S", engine_version="0.33.0")
    slots = base.with_args(max_loras=8, max_lora_rank=32)
    without, found = get_memory_plan(base).bytes_by_part, get_memory_plan(slots).bytes_by_part
    assert found["weights"] == pytest.approx(without["weights"], rel=1e-6)
    assert ADAPTERS_LABEL not in without
    layers = 8 * 2 * 83_886_080
    assert layers <= found[ADAPTERS_LABEL] <= 1.15 * layers  # embedding and head have slots too
    table = build_budget_table(get_memory_plan(slots)).set_index("term")["GiB"]
    assert table[ADAPTERS_LABEL].mid * GIB == found[ADAPTERS_LABEL]


def test_a_scenario_with_adapters_is_planned_and_started_with_their_slots() -> None:
    asked = parse_scenario(ASKED, "adapters")
    plan = plan_once(asked)
    assert plan.chosen is not None and plan.chosen.is_simulated
    args = plan.chosen.deployment.args
    assert (args.max_lora_rank, args.max_cpu_loras) == (16, 40) and 1 <= args.max_loras <= 40
    started = str(build_launch(plan.chosen.prediction))
    for flag in (
        "--enable-lora",
        f"--max-loras {args.max_loras}",
        "--max-cpu-loras 40",
        "--lora-modules",
        "ADAPTERS",
    ):
        assert flag in started
    (rented,) = render_artifacts(plan.chosen.prediction, (), wanted=["runpod"]).values()
    assert "\n# LORA_MODULES=[" in rented and "$" not in rented, (
        "an environment file fills nothing in"
    )


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"count": 0}, "adapters.count"),
        ({"count": 4, "ranks": [1024]}, "adapters.ranks"),
        ({"count": 4, "ranks": []}, "adapters.ranks"),
        (
            {"count": 9, "max_loras": 8, "max_cpu_loras": 4},
            "max_cpu_loras 4 is less than max_loras 8",
        ),
    ],
)
def test_adapters_that_no_engine_serves_are_refused(
    adapters: dict[str, object], message: str
) -> None:
    with pytest.raises(PlannerError, match=message):
        parse_scenario({**ASKED, "adapters": adapters}, "wrong")


def test_the_scripts_start_and_ask_for_all_adapters_and_warm_up_first(tmp_path: Path) -> None:
    plan = plan_once(parse_scenario({**ASKED, "adapters": {"count": 3}}, "adapters"))
    assert plan.chosen is not None
    texts = render_artifacts(plan.chosen.prediction, (), wanted=["script", "benchmark"])
    stub = tmp_path / "vllm"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> ran\n')
    stub.chmod(0o755)
    (tmp_path / "transformers.py").write_text(TOKENIZER)

    def run(name: str, adapters: str) -> tuple[list[str], str]:
        (tmp_path / name).write_text(texts[name])
        (tmp_path / "ran").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", name], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "ADAPTERS": adapters},
        )  # fmt: skip
        return (tmp_path / "ran").read_text().splitlines(), done.stderr

    ((command,), said) = run("serve.sh", "a=/x b=/y c=/z")
    assert " --lora-modules a=/x b=/y c=/z --" in command and not said
    assert "the plan has 3 adapters, ADAPTERS names 1" in run("serve.sh", "a=/x")[1]
    warm_up, *measured = run("bench.sh", "a=/x b=/y c")[0]
    assert "--save-result" not in warm_up and all("--save-result" in line for line in measured)
    assert all(" --lora-modules a b c --" in line for line in (warm_up, *measured))
    seeds = [re.search(r"--seed (\d+)", line)[1] for line in (warm_up, *measured)]  # type: ignore[index]
    assert len({*seeds}) == len(seeds) > 3  # equal prompts would be found in the prefix cache
