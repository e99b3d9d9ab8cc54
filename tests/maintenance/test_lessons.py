"""What lessons state, held against the formats' own arithmetic and against what must be so."""

import json
import re

import pytest

from planner.analysis.lessons import (
    build_traffic,
    compare_step_speed,
    read_pool,
    sweep_throughput,
)
from planner.analysis.tail_latency import sweep_utilization
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.engines.metric_names import get_metric_names
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import plan_memory
from planner.memory.weights import compute_bytes_per_parameter
from planner.ui.notebook_files import NOTEBOOK_DIR

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"


def test_a_bf16_parameter_takes_two_bytes_and_an_int4_one_more_than_half_a_byte():
    assert compute_bytes_per_parameter(deploy_on(LLAMA_8B, "H100")) == pytest.approx(2, rel=5e-3)
    # groups of 128 with a scale of 2 bytes and a zero point of half a byte; embedding and head in
    # BF16
    plain = 2 * 128_256 * 4096 / 8.03e9
    stored = compute_bytes_per_parameter(deploy_on(LLAMA_8B, "H100", quantization="awq"))
    assert stored == pytest.approx((1 - plain) * (0.5 + 2.5 / 128) + plain * 2, rel=0.01)


def test_nothing_is_faster_than_itself():
    served = {"BF16": deploy_on(LLAMA_8B, "L4", max_model_len=4096)}
    assert (compare_step_speed(served, (1, 64), 2000, 1000).iloc[0, 1:] == 1).all()


def test_what_does_not_start_holds_and_serves_nothing():
    none = deploy_on(LLAMA_70B, "L4")
    pool = read_pool(none)
    assert pool["KV pool (tokens)"] == pool["requests of 2,000 that fit"] == 0
    assert pool["starts"] == "does not fit"
    assert sweep_throughput({"70B on one L4": none}, 500, 50, (1,)).isna().all(axis=None)


def test_replicas_hold_what_each_holds_and_traffic_is_as_it_is_written():
    one, two = (
        read_pool(deploy_on(LLAMA_8B, "L4", replicas=n, max_model_len=4096)) for n in (1, 2)
    )
    assert two["KV pool (tokens)"] == 2 * one["KV pool (tokens)"] > 0
    spread, loop = build_traffic((1000, 2500), 300), build_traffic(60, 800, concurrency=4)
    assert (spread.rate, round(spread.prompt.mean), round(spread.prompt.p95)) == (1, 1000, 2500)
    assert spread.output.p95 == 300 and (loop.rate, loop.concurrency) == (None, 4)


def test_mean_ttft_of_closed_form_and_replay_agree_below_saturation_and_both_grow_with_load():
    load = build_traffic(1000, 100)
    found = sweep_utilization(
        deploy_on(LLAMA_8B, "H100", max_model_len=4096), load, (0.2, 0.5, 0.8)
    )
    assert found["mean, simulated"].to_numpy() == pytest.approx(
        found["mean, estimate"].to_numpy(), rel=0.15
    )
    assert found["mean, simulated"].is_monotonic_increasing
    assert (found["p99, simulated"] > found["mean, simulated"]).all()


def test_the_mistakes_that_the_lesson_names_are_mistakes():
    """Catalogs and memory plans say the opposite of each claim."""
    lesson = json.loads((NOTEBOOK_DIR / "learn" / "5-what-the-guides-say.ipynb").read_text("utf-8"))
    text = "".join("".join(cell["source"]) for cell in lesson["cells"])
    rows = dict(re.findall(r"(?m)^\| (.+?) \| (.+?) \|$", text))
    (metrics,) = (claim for claim in rows if "gpu_cache_usage_perc" in claim)
    for role, since in (("kv_usage", "0.10.0"), ("itl", "0.11.1")):
        old, new = (
            get_metric_names(get_engine("vllm", version)).names[role]
            for version in ("0.9.0", since)
        )
        assert old in metrics and new in rows[metrics] and old != new
        assert f"since {since.removesuffix('.0')}" in rows[metrics]
    memory = plan_memory(deploy_on(LLAMA_8B, "L40S", engine_version="0.20.2", max_model_len=8192))
    (l40s,) = (claim for claim in rows if "29 GB" in claim)
    assert rows[l40s].startswith(f"{memory.kv_available.mid / 1e9:.0f} GB with vLLM 0.20.2")
    defaults = [
        deploy_on(LLAMA_8B, "L40S", engine_version=version).args.enable_prefix_caching
        for version in ("0.7.0", "0.8.0")
    ]
    assert defaults == [False, True]
    chat = build_traffic((1000, 2500), (300, 800))
    asked = {"engine_version": "0.20.2", "max_model_len": 8192}
    served = {
        "8B": deploy_on(LLAMA_8B, "H100", **asked),
        "70B": deploy_on(LLAMA_70B, "A100-SXM-80GB", tp=8, **asked),
    }
    carried = [find_safe_max_num_seqs(plan_memory(each), chat) for each in served.values()]
    (start,) = (claim for claim in rows if claim.startswith("Start with `max_num_seqs` 4"))
    assert " and ".join(f"{seqs:,}" for seqs in carried) in rows[start]
    assert "since vLLM 0.8.0" in rows["Prefix caching is off until you ask for it."]
