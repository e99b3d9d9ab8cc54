"""Rules of thumb, held against the formats' own arithmetic and against what must be so."""

import json
import re

import pytest

from planner.analysis import rules_of_thumb
from planner.analysis.tail_latency import sweep_utilization
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.engines.metric_names import get_metric_names
from planner.memory.memory_plan import plan_memory
from planner.memory.weights import compute_bytes_per_parameter
from planner.ui.notebook_files import NOTEBOOK_DIR
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"


def test_a_bf16_parameter_takes_two_bytes_and_an_int4_one_more_than_half_a_byte():
    assert compute_bytes_per_parameter(deploy_on(LLAMA_8B, "H100")) == pytest.approx(2, rel=5e-3)
    # groups of 128 with a scale of 2 bytes and a zero point of half a byte; embedding and head in
    # BF16
    plain = 2 * 128_256 * 4096 / 8.03e9
    stored = compute_bytes_per_parameter(deploy_on(LLAMA_8B, "H100", quantization="awq"))
    assert stored == pytest.approx((1 - plain) * (0.5 + 2.5 / 128) + plain * 2, rel=0.01)


def test_a_single_gpu_exchanges_nothing_and_more_gpus_more_of_the_step():
    cases = {f"{tp}": deploy_on(LLAMA_70B, "B200", tp=tp) for tp in (1, 2, 4, 8)}
    shares = rules_of_thumb.build_communication_table(cases, 64, 8192, 1000)[
        "prefill (% of the step)"
    ]
    assert shares[0] == 0
    assert shares.is_monotonic_increasing


def test_nothing_is_faster_than_itself_and_longer_requests_leave_room_for_fewer():
    served = {"BF16": deploy_on(LLAMA_8B, "L4", max_model_len=4096)}
    assert (rules_of_thumb.compare_step_speed(served, (1, 64), 2000, 1000).iloc[0, 1:] == 1).all()
    traffics = {
        f"{n}": Workload(
            LengthDistribution.from_constant(n), LengthDistribution.from_constant(50), rate=1
        )
        for n in (500, 1000, 2000)
    }
    held = rules_of_thumb.build_sequence_capacity_table(served, traffics).iloc[0, 2:]
    assert held.is_monotonic_decreasing
    assert held.iloc[-1] >= 1


def test_what_does_not_start_carries_and_serves_nothing():
    load = Workload(
        LengthDistribution.from_constant(500), LengthDistribution.from_constant(50), rate=1
    )
    none = {"70B on one L4": deploy_on(LLAMA_70B, "L4")}
    assert rules_of_thumb.build_sequence_capacity_table(none, {"chat": load})["chat"].item() == 0
    assert rules_of_thumb.sweep_throughput(none, load, (1,)).isna().all(axis=None)


def test_mean_ttft_of_closed_form_and_replay_agree_below_saturation_and_both_grow_with_load():
    load = Workload(
        LengthDistribution.from_constant(1000), LengthDistribution.from_constant(100), rate=1
    )
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
    chat = Workload(
        LengthDistribution.from_lognormal(1000, p95=2500),
        LengthDistribution.from_lognormal(300, p95=800),
        rate=1,
    )
    asked = {"engine_version": "0.20.2", "max_model_len": 8192}
    served = {
        "8B": deploy_on(LLAMA_8B, "H100", **asked),
        "70B": deploy_on(LLAMA_70B, "A100-SXM-80GB", tp=8, **asked),
    }
    table = rules_of_thumb.build_sequence_capacity_table(served, {"chat": chat})
    (start,) = (claim for claim in rows if claim.startswith("Start with `max_num_seqs` 4"))
    assert " and ".join(f"{seqs:,}" for seqs in table["chat"]) in rows[start]
    assert "since vLLM 0.8.0" in rows["Prefix caching is off until you ask for it."]
