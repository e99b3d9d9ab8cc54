"""Calibration finds back what a machine was made to do, says what it changed, and plans with it."""

import copy
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.calibration.benchmark_results import (
    plan_benchmarked_deployment,
    read_benchmark_results,
)
from planner.calibration.user_fit import (
    REPEAT_SIGMA_TTFT_TPOT,
    BenchmarkPoint,
    fit_calibration,
    predict_means,
    simulate_means,
)
from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT
from planner.engines.coefficients import StepCoefficients, UserCalibration, list_coefficient_names
from planner.engines.deployment import deploy_on
from planner.hardware.gpus import list_gpus
from planner.latency.coefficient_lookup import (
    apply_user_calibrations,
    get_deployment_coefficients,
    load_user_calibrations,
)
from planner.latency.step_model import build_step_model
from planner.planning.prediction import get_memory_plan
from planner.simulator.simulation import simulate_workload
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import Trace
from planner.workload.workload import Workload

DEPLOYMENT = deploy_on(
    "meta-llama/Llama-3.1-8B-Instruct", "L40S", max_model_len=8192, enable_prefix_caching=False
)
KNOWN = get_deployment_coefficients(DEPLOYMENT).coefficients
BENCH = {
    "completed": 20, "total_input_tokens": 640, "total_output_tokens": 320, "request_rate": "inf",
    "burstiness": 1.0, "max_concurrency": 8, "mean_ttft_ms": 25.0, "mean_tpot_ms": 7.0,
}  # fmt: skip


def machine(seed: int) -> StepCoefficients:
    """A made-up L40S, each of whose coefficients lies 25% above or below what the catalog says."""
    sides = np.random.default_rng(seed).choice([-1, 1], len(list_coefficient_names()))
    changed = {
        name: getattr(KNOWN, name) * 1.25**side
        for name, side in zip(list_coefficient_names(), sides, strict=True)
    }
    return replace(KNOWN, **changed)


def measure(
    c: StepCoefficients, concurrency: int, rate: float = np.inf, isl: int = 800, osl: int = 150
) -> dict:
    """What `vllm bench serve --save-result --save-detailed` would write of such a machine; 2% of noise."""
    rng = np.random.default_rng(int(concurrency + 10 * min(rate, 10)))
    n = 10 * concurrency
    prompt, output = (
        rng.integers(isl // 2, isl * 3 // 2, n),
        rng.integers(osl // 2, osl * 3 // 2, n),
    )
    arrival = np.zeros(n) if np.isinf(rate) else np.cumsum(rng.exponential(1 / rate, n))
    trace = Trace(Path(), arrival - arrival[0], prompt, output)
    load = {"concurrency": concurrency} if np.isinf(rate) else {"rate": trace.rate}
    work = Workload(
        LengthDistribution.from_samples(prompt),
        LengthDistribution.from_samples(output),
        num_prompts=n,
        trace=trace,
        **load,
    )
    found = simulate_workload(
        DEPLOYMENT, get_memory_plan(DEPLOYMENT).pool, build_step_model(DEPLOYMENT, work, c), work
    )
    ttft, tpot = (
        found.summarize(metric)["mean"] * 1e3 * np.exp(0.02 * rng.standard_normal())
        for metric in ("ttft", "tpot")
    )
    return {
        "completed": n, "total_input_tokens": int(prompt.sum()),
        "total_output_tokens": int(output.sum()),
        "request_rate": rate if np.isfinite(rate) else "inf", "burstiness": 1.0,
        "max_concurrency": concurrency if np.isinf(rate) else None, "mean_ttft_ms": ttft,
        "mean_tpot_ms": tpot,
        "input_lens": prompt.tolist(), "output_lens": output.tolist(),
        "start_times": (found.sent + 5172.9).tolist(),
    }  # fmt: skip


def runs(c: StepCoefficients, folder: Path) -> list[BenchmarkPoint]:
    """Seven runs of a made-up machine, through the files that vLLM would write: closed loops, and two open ones."""
    closed, opened = folder / "closed.json", folder / "open.json"
    closed.write_text("\n".join(json.dumps(measure(c, many)) for many in (1, 4, 16, 64, 128)))
    opened.write_text(json.dumps([measure(c, 20, rate) for rate in (1.0, 4.0)]))
    return list(read_benchmark_results([closed, opened], DEPLOYMENT).points)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_machine_a_quarter_off_is_predicted_within_a_few_per_cent(seed, tmp_path):
    """After seven runs, so are loads that were not among them, and the intervals hold them."""
    truth = machine(seed)
    found = fit_calibration(
        runs(truth, tmp_path), means=simulate_means, noise=REPEAT_SIGMA_TTFT_TPOT
    )
    before, after = (np.median(np.abs(found.errors[:, index]), axis=0) for index in (0, 1))
    assert (before > 0.06).all()
    assert (after < 0.04).all()
    unseen = tmp_path / "unseen.json"
    loads = [
        measure(truth, 32),
        measure(truth, 96, isl=3000, osl=100),
        measure(truth, 40, 2.0, isl=500, osl=400),
    ]
    unseen.write_text(json.dumps(loads))
    for point in read_benchmark_results([unseen], DEPLOYMENT).points:
        found_s, measured = (
            np.array(simulate_means(point, found.after)),
            np.array([point.ttft, point.tpot]),
        )
        assert found_s == pytest.approx(measured, rel=0.08)
        assert (
            np.abs(np.log(found_s / measured))
            < Z_SCORE_80PCT * np.array([found.estimate_sigma(0), found.estimate_sigma(1)])
        ).all()
        assert predict_means(point, found.after)[1] == pytest.approx(point.tpot, rel=0.12), (
            "in closed form as well"
        )


def test_more_runs_narrow_the_interval_and_never_below_what_repeats_differ_by(tmp_path):
    points = runs(machine(1), tmp_path)
    known = build_step_model(DEPLOYMENT, points[1].workload)
    few, some, many = (
        fit_calibration(chosen, max_evaluations=7) for chosen in (points[1:3], points, points * 2)
    )
    for column, prior in ((0, known.sigma_ttft), (1, known.sigma_tpot)):
        assert (
            prior
            > few.estimate_sigma(column)
            > some.estimate_sigma(column)
            > many.estimate_sigma(column)
            >= REPEAT_SIGMA_TTFT_TPOT[column]
        )


def test_one_bad_run_does_no_harm(tmp_path):
    """Another process had the GPU in one of seven runs: it took three times as long."""
    points = runs(machine(1), tmp_path)
    good = fit_calibration(points)
    points[2] = replace(
        points[2], name="disturbed", ttft=3 * points[2].ttft, tpot=3 * points[2].tpot
    )
    found = fit_calibration(points)
    others = np.delete(np.arange(len(points)), 2)
    assert np.abs(found.errors[others, 1, 1] - good.errors[others, 1, 1]).max() < 0.03
    assert found.estimate_sigma(1) < 1.5 * good.estimate_sigma(1)


def test_what_is_held_back_is_what_a_fit_without_that_run_misses(tmp_path):
    """To first order, and so within a few per cent where the whole fit moves little."""
    points = runs(machine(0), tmp_path)
    found = fit_calibration(points, max_evaluations=31)
    for index in (0, 6):
        without = fit_calibration(points[:index] + points[index + 1 :], max_evaluations=31)
        missed = np.log(predict_means(points[index], without.after)) - np.log(
            [points[index].ttft, points[index].tpot]
        )
        assert found.held_out_errors[index] == pytest.approx(missed, abs=0.06)


def test_one_run_as_predicted_hardly_narrows_the_interval():
    """It says nothing of other loads."""
    work = Workload(
        LengthDistribution.from_constant(512), LengthDistribution.from_constant(256), concurrency=8
    )
    bare = BenchmarkPoint("only", DEPLOYMENT, work, None, None)
    ttft, tpot = predict_means(bare, KNOWN)
    assert (
        fit_calibration(
            [replace(bare, ttft=ttft, tpot=tpot)], noise=REPEAT_SIGMA_TTFT_TPOT
        ).estimate_sigma(1)
        > 0.07
    )


def test_an_owners_calibration_is_planned_with(tmp_path):
    """It replaces what the catalog says of its GPU, for its models with its own interval, and of nothing else."""
    found = fit_calibration(runs(machine(0), tmp_path)[:4], max_evaluations=3)
    mine = tmp_path / "mine.yaml"
    found.save(mine, "2026-11-21")
    engine = apply_user_calibrations(DEPLOYMENT.engine, load_user_calibrations(mine))
    coefficients = get_deployment_coefficients(replace(DEPLOYMENT, engine=engine)).coefficients
    own = build_step_model(replace(DEPLOYMENT, engine=engine))
    assert own.basis == "measured" and own.sigma_tpot == pytest.approx(
        found.estimate_sigma(1), abs=1e-3
    )
    assert coefficients.memory == pytest.approx(found.after.memory, rel=0.01)
    planned_step, catalog_step = (
        build_step_model(replace(DEPLOYMENT, engine=e)) for e in (engine, DEPLOYMENT.engine)
    )
    assert planned_step.sigma_tpot < catalog_step.sigma_tpot
    other = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100")
    assert get_deployment_coefficients(
        replace(other, engine=engine)
    ) == get_deployment_coefficients(other)
    entry = load_user_calibrations(mine)["L40S"]
    assert (entry.points, entry.models, entry.versions) == (
        4,
        ("llama",),
        (DEPLOYMENT.engine.version,),
    )
    assert entry.source == "headroom calibrate on closed.json" and entry.date == "2026-11-21"


def test_a_release_with_an_entry_of_its_own_is_replaced_by_the_owners():
    """The catalog knows older releases on H100 apart; who measured one means it for what they run."""
    old = deploy_on("Qwen/Qwen3-32B", "H100", engine_version="0.12.0")
    measured = UserCalibration(
        coefficients={"memory": 0.5}, engine="vllm", source="mine", date="2026-11-21"
    )
    engine = apply_user_calibrations(old.engine, {"H100-SXM": measured})
    assert get_deployment_coefficients(replace(old, engine=engine)).coefficients.memory == 0.5


def test_a_saved_entry_takes_the_place_of_the_one_before(tmp_path):
    found = fit_calibration(runs(machine(0), tmp_path)[:3], max_evaluations=2)
    mine, rest = tmp_path / "mine.yaml", "  coefficients: {memory: 0.7}\n  date: '2026-11'\n"
    mine.write_text(f"# guide\n\nL40S:\n  source: old\n{rest}\nH100-SXM:\n  source: kept\n{rest}")
    found.save(mine, "2026-11")
    text = mine.read_text()
    assert text.startswith("# guide") and "kept" in text and "old" not in text
    assert "points: 3" in text


def test_calibrations_that_save_at_once_all_stay(tmp_path):
    """Each reads the file, and writes it anew with its entry: none may read between those two."""
    found = fit_calibration(runs(machine(0), tmp_path)[:2], max_evaluations=2)
    mine, names = tmp_path / "mine.yaml", [gpu.name for gpu in list_gpus()[:12]]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: replace(found, entry=name).save(mine, "2026-11"), names))
    assert load_user_calibrations(mine).keys() == set(names)


def test_files_that_cannot_be_written_or_hold_something_else_are_told(tmp_path):
    found = fit_calibration(runs(machine(0), tmp_path)[:2], max_evaluations=2)
    with pytest.raises(PlannerError, match=r"cannot write .*such\.yaml: No such file"):
        found.save(tmp_path / "no" / "such.yaml", "2026-11")
    other = tmp_path / "other.yaml"
    other.write_text(
        "L40S: {coefficients: {memory: 0.7}, engine: sglang, source: mine, date: '2026-11'}"
    )
    with pytest.raises(PlannerError, match="L40S under sglang; keep vllm in another file"):
        found.save(other, "2026-11")
    other.write_text("L4OS: {coefficients: {memory: 0.7}, source: mine, date: '2026-11'}")
    with pytest.raises(PlannerError, match=r"L4OS.*did you mean"):
        found.save(other, "2026-11")


def test_a_result_of_vllm_bench_serve_is_read(tmp_path):
    """Field names of vLLM 0.33.0's `--save-result`, several runs as `--append-result` writes them."""
    path = tmp_path / "result.json"
    detailed = {
        "input_lens": [32] * 19 + [64],
        "output_lens": [16] * 19 + [0],
        "start_times": [5172.0 + i for i in range(20)],
    }
    path.write_text("\n".join(json.dumps(run) for run in (BENCH, BENCH | {"request_rate": 2.0}, BENCH | detailed,
                                                           BENCH | detailed | {"request_rate": 1.0})))  # fmt: skip
    closed, opened, exact, sent = read_benchmark_results([path], DEPLOYMENT).points
    assert closed.workload.concurrency == 8 and closed.workload.rate is None
    assert closed.workload.prompt.mean == 32 and closed.tpot == pytest.approx(0.007)
    assert opened.workload.rate == 2.0
    assert len(exact.workload.trace.prompt) == 19, (
        "a request without output failed, and its prompt does not count"
    )
    assert not exact.workload.trace.arrival.any()
    assert sent.workload.trace.arrival[-1] == 18.0


FORMS = {
    # a run of SGLang's bench_serving on ShareGPT, as it was published
    "sglang": {
        "backend": "sglang", "dataset_name": "sharegpt", "request_rate": 5.0,
        "max_concurrency": 256, "duration": 204.5, "completed": 1000, "total_input_tokens": 302118,
        "total_output_tokens": 195775, "request_throughput": 4.889, "output_throughput": 957.2,
        "mean_e2e_latency_ms": 2409.5, "median_e2e_latency_ms": 1537.9,
        "p99_e2e_latency_ms": 9813.9, "mean_ttft_ms": 91.7, "median_ttft_ms": 76.4,
        "p99_ttft_ms": 328.0, "mean_tpot_ms": 11.81, "median_tpot_ms": 11.83, "p99_tpot_ms": 19.04,
        "mean_itl_ms": 11.92, "p95_itl_ms": 18.84, "p99_itl_ms": 21.48, "accept_length": None,
    },
}  # fmt: skip
EXPECTED = {
    "sglang": (302.1, 195.8, 5.0, 256, {"mean ttft": 0.0917, "p99 e2e": 9.8139, "p95 itl": 0.01884}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_results_of_other_load_generators_are_read(name, tmp_path):
    path = tmp_path / "result.jsonl"
    path.write_text(json.dumps(FORMS[name]) + "\n")
    (point,) = read_benchmark_results([path], DEPLOYMENT).points
    prompt, output, rate, concurrency, statistics = EXPECTED[name]
    load = point.workload
    assert load.prompt.mean == pytest.approx(prompt, rel=0.01)
    assert load.output.mean == pytest.approx(output, rel=0.01)
    assert load.rate == (rate and pytest.approx(rate, rel=0.15))  # of drawn arrivals
    assert load.concurrency == concurrency
    assert {key: point.statistics[key] for key in statistics} == pytest.approx(statistics, rel=1e-3)


# printed by vLLM on an H100 and by SGLang, as people posted them
PRINTED = """Traffic request rate: inf
Burstiness factor: 1.0 (Poisson process)
Maximum request concurrency: 32
100%|##########| 32/32 [02:30<00:00,  4.71s/it]
============ Serving Benchmark Result ============
Successful requests:                     32
Benchmark duration (s):                  150.87
Total input tokens:                      65536
Total generated tokens:                  65536
Request throughput (req/s):              0.21
Output token throughput (tok/s):         434.40
---------------Time to First Token----------------
Mean TTFT (ms):                          7279.56
Median TTFT (ms):                        7099.88
P99 TTFT (ms):                           10999.46
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          70.14
P99 TPOT (ms):                           72.63
==================================================

============ Serving Benchmark Result ============
Backend:                                 sglang-oai-chat
Traffic request rate:                    20.0
Max request concurrency:                 20
Successful requests:                     100
Total input tokens:                      50561
Total generated tokens:                  25883
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   2098.07
Mean TTFT (ms):                          274.09
Mean TPOT (ms):                          7.76
==================================================
"""


def test_printed_tables_are_read(tmp_path):
    path = tmp_path / "terminal.txt"
    path.write_text(PRINTED)
    first, second = read_benchmark_results([path], DEPLOYMENT).points
    assert (first.workload.concurrency, first.workload.rate) == (32, None)
    assert first.workload.prompt.mean == 2048 and first.tpot == pytest.approx(0.07014)
    assert first.statistics["p50 ttft"] == pytest.approx(7.09988)
    assert (second.workload.concurrency, second.workload.rate) == (20, 20.0)
    assert second.statistics["mean e2e"] == pytest.approx(2.09807)


ODD = ("x", "", None, True, [], {}, [1], -1, 1e300, 10**400, math.nan, math.inf)
"""What a field of a result may hold and no load generator writes."""


def fields(data: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every field of a result."""
    for name, inside in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*path, name)
        if isinstance(inside, dict | list):
            yield from fields(inside, *path, name)


@pytest.mark.parametrize("name", FORMS)
def test_whatever_a_field_holds_the_answer_names_a_field_and_what_it_takes(name, tmp_path):
    """In no word of Python's; what is read all the same has finite latencies."""
    for number, (way, odd) in enumerate(product(fields(FORMS[name]), ODD)):
        if number % 5 == 0:
            result = copy.deepcopy(FORMS[name])
            reduce(lambda inside, step: inside[step], way[:-1], result)[way[-1]] = odd
            (path := tmp_path / "a.json").write_text(json.dumps(result))
            try:
                (point,) = read_benchmark_results([path], DEPLOYMENT).points
                assert 0 < point.ttft < math.inf, (way, odd)
            except PlannerError as error:
                assert re.search(
                    r"field \w.*(takes|must|missing)|there is no run|a request has",
                    str(error),
                ), error
                assert not re.search(r"Error\b|NoneType|not supported|object is", str(error)), error


HEAD = "model,gpu,isl,osl,concurrency,engine,speculative_method,measured_ttft_ms,measured_tpot_ms\n"
ROW = "meta-llama/Llama-3.1-8B-Instruct,L40S,512,256,8,vllm,,60,24\n"


def test_rows_of_other_machines_are_left_out_and_counted(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(
        HEAD
        + ROW
        + ROW.replace("L40S", "L4")
        + ROW.replace("vllm", "sglang")
        + ROW.replace("vllm,", "vllm,eagle")
    )
    found = read_benchmark_results([path], DEPLOYMENT)
    assert len(found.points) == 1
    assert all(
        told in found.notes[0]
        for told in ("1 of L4 under vllm", "1 of L40S under sglang", "with speculative")
    )
    with pytest.raises(PlannerError, match=r"one GPU and engine at a time, got L40S under vllm"):
        fit_calibration(read_benchmark_results([path]).points)
    path.write_text(HEAD + ROW.replace("L40S", "L4"))
    with pytest.raises(
        PlannerError,
        match=r"no run to calibrate with\. points\.csv: rows left out: 1 of L4 under vllm",
    ):
        read_benchmark_results([path], DEPLOYMENT)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.json", "{}", "x.json, as a benchmark's result, field completed: field is missing"),
        ("x.json", "hello", "x.json is not JSON"),
        ("x.json", json.dumps(BENCH) + "\n{\n", "x.json, line 2 is not JSON"),
        ("x.json", json.dumps([BENCH, BENCH | {"completed": 0}]), "x.json, run 2.*field completed.*above 0"),
        ("x.json", json.dumps(BENCH | {"mean_ttft_ms": -1}), "field mean_ttft_ms.*above 0, got -1"),
        ("x.json", json.dumps(BENCH | {"mean_tpot_ms": float("nan")}), "field mean_tpot_ms"),
        ("x.json", json.dumps(BENCH | {"request_rate": "fast"}), "field request_rate.*other text"),
        ("x.json", json.dumps(BENCH | {"input_lens": [3], "output_lens": [3, 4]}), "field input_lens has 1 entries"),
        ("x.json", json.dumps(BENCH | {"ramp_up_strategy": "linear"}), "field ramp_up_strategy.*--save-detailed"),
        ("x.csv", "a,b\n1,2\n", "x.csv, line 1: expected the batch interface's columns"),
        ("x.csv", HEAD + ROW.replace(",60,24", ",,"), "line 2: measured_ttft_ms and measured_tpot_ms are both empty"),
        ("x.csv", HEAD + ROW.replace("60", "soon"), "x.csv, line 2: measured_ttft_ms: expected milliseconds above 0"),
        ("x.csv", HEAD + ROW.replace("512", "many"), "x.csv, line 2: isl: expected a number above 0, got 'many'"),
        ("x.csv", HEAD + ROW.replace(",8,", ",,"), "x.csv, line 2: concurrency .* is missing"),
        ("x.csv", HEAD, "there is no run to calibrate with"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_told_with_file_place_and_field(name, text, told, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlannerError, match=told) as error:
        read_benchmark_results([path], DEPLOYMENT)
    assert "\n" not in str(error.value)


def test_a_run_that_the_deployment_could_not_have_done_is_named(tmp_path):
    path = tmp_path / "long.json"
    path.write_text(json.dumps(BENCH | {"input_lens": [9000] * 20, "output_lens": [16] * 20}))
    with pytest.raises(
        PlannerError,
        match=r"long\.json: a request has 9,016 tokens, over the plan's max_model_len 8,192",
    ):
        read_benchmark_results([path], DEPLOYMENT)
    path.write_text(json.dumps(BENCH | {"input_lens": [32] * 20, "output_lens": [1] * 20}))
    with pytest.raises(
        PlannerError, match=r"long\.json: a TPOT of 7 ms was measured, but it can have none"
    ):
        fit_calibration(read_benchmark_results([path], DEPLOYMENT).points, means=simulate_means)
    with pytest.raises(PlannerError, match="one GPU and engine"):
        fit_calibration([])


def test_a_json_says_only_how_it_went(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(BENCH))
    with pytest.raises(PlannerError, match="not what ran: name its scenario"):
        read_benchmark_results([tmp_path / "x.json"])
    with pytest.raises(PlannerError, match="without speculation"):
        from planner.engines.layout import SpeculationConfig

        read_benchmark_results(
            [tmp_path / "x.json"], replace(DEPLOYMENT, speculation=SpeculationConfig("eagle3", 3))
        )


def test_what_a_scenario_s_benchmark_ran_on_is_one_replica_as_the_catalog_knows_it():
    """As its `bench.sh` does; whoever calibrates twice starts from the same place."""
    deployment, _ = plan_benchmarked_deployment("chat-70b")
    assert deployment.layout.replicas == 1 and not deployment.engine.calibration
