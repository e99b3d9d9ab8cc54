"""The fits of the catalogs: what they find in made-up runs, and how right they are on measured ones, seen or not."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
from fits.pool_cost_fit import (
    DECODE_PRIOR_SIGMAS,
    POOL_NOISE_TPOT,
    MeasuredPoolRun,
    build_pool_costs,
    fit_pool_costs,
    load_pool_runs,
)
from fits.pooled_fit import (
    EFFECT_LEVELS,
    FIT_METRICS,
    MEASURED_RUNS_FILE,
    MeasuredRun,
    PooledRuns,
    fit_pooled,
    load_measured_runs,
)
from fits.power_fit import evaluate_power_holdout, load_power_runs
from fits.speculation_fit import (
    evaluate_speculation_holdout,
    fit_host_costs,
    load_speculation_runs,
)

from planner.core.catalog import load_catalog
from planner.engines.deployment import deploy_on
from planner.engines.speculation_methods import DraftHostCost
from planner.latency.step_work import count_step_work
from planner.latency.worker_pool_costs import get_pool_costs
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import evaluate
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

pytestmark = pytest.mark.slow


def test_left_out_groups():
    """Whole pairs, models and GPUs that the fit did not see: 10% at most, and an interval that holds."""
    found = evaluate_power_holdout(load_power_runs()).set_index("left out")
    assert (found["median error"] <= 0.10).all()
    assert found["inside 80%"].between(0.70, 0.90).all()


@pytest.fixture(scope="module")
def measured_runs() -> list[MeasuredRun]:
    """All of them: it takes seconds to read thousands."""
    return load_measured_runs()


def test_the_fit_finds_a_gpu_that_is_slower_than_its_kind(measured_runs: list[MeasuredRun]) -> None:
    """Runs of L4 as the catalog predicts them, of L20 20% slower: the pool tells them apart."""
    runs = [
        run
        for name in ("L4", "L20")
        for run in measured_runs
        if run.deployment.gpu.name == name and run.workload.rate is None
    ]
    runs = runs[:20] + runs[-20:]
    pool = PooledRuns(runs)
    even = pool.predict_logs(pool.compute_log_coefficients(np.zeros(len(pool.effects))))
    slower = np.where([run.deployment.gpu.name == "L20" for run in runs], 0.2, 0.0)[:, None]
    made = [
        replace(run, measured=np.where(np.isfinite(run.measured), value + shift, np.nan))
        for run, value, shift in zip(runs, even, slower, strict=True)
    ]
    found = fit_pooled(made, replays=0)
    logs = found.pool.compute_log_coefficients(found.effect_logs)
    paces = {run.deployment.gpu.name: row for run, row in zip(runs, logs, strict=True)}
    is_tpot = np.nonzero(found.pool.is_measured)[1] == 1
    assert np.median(np.abs(found.fit.errors[is_tpot])) < 0.03
    assert not np.allclose(paces["L4"], paces["L20"])


def test_every_measured_run_says_what_was_sent() -> None:
    """Offline throughput of thousands of requests, read as that of one at a time, is a hundred times off."""
    with MEASURED_RUNS_FILE.open(encoding="utf-8", newline="") as file:
        silent = [
            row["source"]
            for row in csv.DictReader(file)
            if not (row["concurrency"] or row["request_rate"])
        ]
    assert not silent


def test_no_measured_step_is_shorter_than_reading_its_weights(
    measured_runs: list[MeasuredRun],
) -> None:
    """What is, ran on another GPU: 7B in 16 bit on an L4, 15 GB at 300 GB/s, did not take 9.5 ms a token."""
    for run in measured_runs:
        counted = count_step_work(run.deployment)
        size = counted.head.bytes + sum(linears.bytes for linears in counted.matmuls)
        tpot = np.exp(run.measured[FIT_METRICS.index("tpot")])
        assert not tpot < size / run.deployment.gpu.memory_bandwidth, run.curve


@pytest.mark.parametrize(
    ("load", "least", "most", "served"),
    [({"rate": 20.0}, 1.3, 3.0, 0.0), ({"concurrency": 8}, 0.97, 1.03, -1.0)],
)
def test_slower_steps_hold_more_requests_of_an_open_loop_in_flight(
    load, least, most, served
) -> None:
    """There, TPOT grows by more than the step, and throughput stays; of a closed loop both change as the step does."""
    deployment = deploy_on("meta-llama/Llama-3.1-8B", "L40S", max_model_len=4096)
    workload = Workload(
        LengthDistribution.from_constant(300), LengthDistribution.from_constant(100), **load
    )
    pool = PooledRuns([MeasuredRun(deployment, workload, np.zeros(4), "")])
    logs = pool.compute_log_coefficients(np.zeros(len(pool.effects)))
    slopes = pool.compute_jacobian(logs)[0, :, pool.names.index("pace")]
    assert least < slopes[1] <= most
    assert slopes[2] == pytest.approx(served, abs=0.05)


def test_parts_of_a_coefficient_are_pulled_to_nothing() -> None:
    assert set(EFFECT_LEVELS) >= {"engine", "generation", "die", "release", "model", "pair"}
    assert "gpu" not in EFFECT_LEVELS  # what one GPU has of its own is its data sheet
    for parts in EFFECT_LEVELS.values():
        spreads = [parts.get("device", 0), parts.get("host", 0), *parts.get("own", {}).values()]
        assert all(0 <= spread <= 1 for spread in spreads)


def test_measured_speed_ups_with_whole_models_left_out() -> None:
    """154 rows of catalogs/validation/speculation.csv: SpecForge's bundle, vLLM's issues and pulls, model cards.

    The host's costs are fitted without the row's model, once with the planner's own plain step and
    once beside the measured one.
    """
    frame = evaluate_speculation_holdout()
    assert len(frame) == 154
    for column in ("error, model left out", "beside, model left out"):
        errors = frame[column].abs()
        assert errors.median() <= 0.06 and errors.quantile(0.9) <= 0.25
        families = errors.groupby(frame["family"]).agg(["median", "size"])
        assert families.query("size > 2")["median"].max() <= 0.15
    assert frame["within"].mean() >= 0.8


def test_the_host_costs_are_those_that_fit() -> None:
    """Beside the plain steps that were measured, up to two or three steps of the grid."""
    for name in ("vllm", "sglang"):
        cost, found = (
            load_catalog("drafting.yaml", DraftHostCost)[name],
            fit_host_costs(tuple(run for run in load_speculation_runs() if run.engine == name)),
        )
        assert found == (pytest.approx(cost.step_us, abs=600), pytest.approx(cost.pass_us, abs=200))


@pytest.fixture(scope="module")
def pool_runs() -> list[MeasuredPoolRun]:
    """InferenceX's runs of pools without speculation, 2025-12 to 2026-04."""
    return load_pool_runs()


@pytest.mark.parametrize(
    ("engine", "ttft", "tpot"), [("sglang", 0.25, 0.09), ("trtllm", 0.22, 0.09)]
)
def test_measured_pools_are_predicted(
    pool_runs: list[MeasuredPoolRun], engine: str, ttft: float, tpot: float
) -> None:
    """Median errors on the runs with at most 600 requests in flight; up to 2.5 s of replay."""
    runs = [
        run
        for run in pool_runs
        if run.decode.engine.name == engine and (run.workload.concurrency or 0) <= 600
    ]
    costs = get_pool_costs(runs[0].decode.engine)
    off = np.abs([np.array(run.simulate(costs)) / (run.ttft, run.tpot) - 1 for run in runs])
    assert len(runs) > 60
    assert np.median(off[:, 0]) < ttft and np.median(off[:, 1]) < tpot


@pytest.mark.parametrize(("gpu", "most"), [("B200", 0.12), ("GB300", 0.18), ("H200-SXM", 0.15)])
def test_decoding_in_pools_carries_over_to_a_gpu_that_was_left_out(
    pool_runs: list[MeasuredPoolRun], gpu: str, most: float
) -> None:
    """TensorRT-LLM's decode workers: fitted without the GPU, Little's law gives its TPOT so well at the median."""
    runs = [run for run in pool_runs if run.decode.engine.name == "trtllm"]
    kept = [run for run in runs if run.decode.gpu.name != gpu]
    base = get_pool_costs(runs[0].decode.engine)
    found = fit_pool_costs(
        lambda x: np.log([run.predict_tpot(build_pool_costs(base, x)) / run.tpot for run in kept]),
        DECODE_PRIOR_SIGMAS,
        POOL_NOISE_TPOT,
        4,
    )
    costs = build_pool_costs(base, found.x)
    off = [
        abs(run.predict_tpot(costs) / run.tpot - 1) for run in runs if run.decode.gpu.name == gpu
    ]
    assert len(off) >= 11 and np.median(off) < most


def test_most_measurements_lie_in_the_intervals(pool_runs: list[MeasuredPoolRun]) -> None:
    """80% intervals, on runs of the fit."""
    inside = []
    for run in (run for run in pool_runs if (run.workload.concurrency or 0) <= 600):
        found = evaluate_disaggregated(run.prefill, run.decode, run.workload).performance
        assert found is not None
        pairs = (found.get("ttft", "mean"), run.ttft), (found.get("tpot", "mean"), run.tpot)
        inside.append([interval.lo < seen < interval.hi for interval, seen in pairs])
    assert (np.mean(inside, axis=0) > 0.7).all() and (np.mean(inside, axis=0) < 0.92).all()


def test_next_to_a_measured_run_the_mean_is_that_run(measured_runs: list[MeasuredRun]) -> None:
    """Every fortieth measured run comes out about as it was measured, in closed form."""
    off = []
    for run in measured_runs[::40]:
        if run.deployment.engine.name == "vllm" and np.isfinite(run.measured[1]):
            found = evaluate(run.deployment, run.workload).performance
            assert found
            off.append(abs(math.log(found.get("tpot", "mean").mid) - run.measured[1]))
    assert np.median(off) < 0.04
