"""Calibration finds back what a machine was made to do, and says what it changed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from planner.calibrate import Point, bench_points, fit, predicted
from planner.coefficients import calibration_of, calibrations
from planner.deployment import deploy_on
from planner.quantities import PlannerError
from planner.workload import Lengths, Workload

DEPLOYMENT = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "L40S", enable_prefix_caching=False)


def slow_machine() -> list[Point]:
    """A made-up L40S whose memory is 15 % and whose front end 60 % slower than the catalog says, with 2 % of noise."""
    c = calibration_of(DEPLOYMENT.model, DEPLOYMENT.gpu, DEPLOYMENT.engine).coefficients
    truth = replace(c, memory=c.memory * 0.85, request_s=c.request_s * 1.6)
    rng, points = np.random.default_rng(5), []
    for concurrency in (1, 2, 4, 8, 16, 32, 64):
        load = Workload(Lengths.fixed(512), Lengths.fixed(256), concurrency=concurrency)
        bare = Point(f"c{concurrency}", DEPLOYMENT, load, None, None)
        ttft, tpot = np.array(predicted(bare, truth)) * np.exp(0.02 * rng.standard_normal(2))
        points.append(replace(bare, ttft=float(ttft), tpot=float(tpot)))
    return points


def test_a_slower_machine_is_recognised():
    found = fit(slow_machine(), rounds=4)
    before, after = (np.median(np.abs(found.errors[:, index, 1])) for index in (0, 1))
    assert before > 0.08
    assert after < 0.04
    assert found.after.memory < 0.93 * found.before.memory
    assert found.sigma(1) < 0.06
    assert "TPOT" in str(found)


def test_a_saved_entry_is_read_again(tmp_path):
    found = fit(slow_machine()[:3], rounds=1)
    catalog = tmp_path / "vllm.yaml"
    catalog.write_text("# guide\n\nL40S:\n  source: old\n\nprior:\n  source: kept\n")
    found.save(catalog, "2026-11")
    text = catalog.read_text()
    assert text.startswith("# guide") and "kept" in text and "old" not in text
    assert "points: 3" in text
    calibrations.cache_clear()


def test_a_result_of_vllm_bench_serve_is_read(tmp_path):
    """Field names of vLLM 0.33.0's `--save-result`."""
    run = {
        "completed": 20, "total_input_tokens": 640, "total_output_tokens": 320, "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": 8, "mean_ttft_ms": 25.0, "mean_tpot_ms": 7.0,
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(run) + "\n" + json.dumps({**run, "request_rate": 2.0, "input_lens": [32] * 20}) + "\n")
    closed, opened = bench_points(path, DEPLOYMENT)
    assert closed.workload.concurrency == 8 and closed.workload.rate is None
    assert closed.workload.prompt.mean == 32 and closed.tpot == pytest.approx(0.007)
    assert opened.workload.rate == 2.0


def test_what_is_no_result_is_told_in_a_sentence(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(PlannerError, match="not a result of vllm bench serve"):
        bench_points(path, DEPLOYMENT)
    path.write_text("hello")
    with pytest.raises(PlannerError, match="not a benchmark result"):
        bench_points(path, DEPLOYMENT)
    with pytest.raises(PlannerError, match="one GPU and engine"):
        fit([])
