"""GPUs come out in the order of their data sheets: a faster one never answers later for the same work."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
import pytest

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine
from planner.hardware.gpus import Gpu, get_gpu
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import load_model
from planner.planning.simulation_runs import run_short_simulation
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

SMALL = (
    "A10", "A100-SXM-40GB", "A6000", "GB10", "L4", "L40S", "RTX-3090", "RTX-4090", "RTX-5090",
    "RTX-PRO-6000-Server",
)  # fmt: skip
LARGE = (
    "A100-SXM-80GB", "B200", "B300", "GB200", "GB300", "H100-NVL", "H100-PCIe", "H100-SXM",
    "H200-SXM", "MI300X", "MI325X", "MI350X", "MI355X",
)  # fmt: skip
BOTH = ("L40S", "RTX-PRO-6000-Server")
GRID = {
    "meta-llama/Llama-3.1-8B-Instruct": ((1, 2), {*SMALL, *LARGE}, (None, "fp8", "awq")),
    "meta-llama/Llama-3.3-70B-Instruct": ((8,), {*LARGE, *BOTH}, (None, "fp8", "awq")),
    "Qwen/Qwen3-32B": ((2,), {*SMALL, *LARGE}, (None, "fp8", "awq")),
    "Qwen/Qwen3-30B-A3B": ((1,), {*SMALL, *LARGE}, (None, "fp8", "awq")),
    "openai/gpt-oss-120b": ((1, 2, 4), {*LARGE, *BOTH}, (None,)),
    "Qwen/Qwen3-235B-A22B": ((8,), {*LARGE, *BOTH}, (None, "fp8", "awq")),
    "deepseek-ai/DeepSeek-V3": ((8,), {*LARGE, *BOTH}, (None,)),
}
LOADS = ((1024, 1), (1024, 64), (8192, 16))
SLACK, MOST_SLACK = 1.03, 1.10
"""A latency may be so much longer in one comparison of a hundred, and in none."""


def exceeds(one: Gpu, other: Gpu) -> bool:
    """Whether a data sheet has at least another's bandwidth, memory, links, clock and 16- and 8-bit peaks."""
    peaks = [(one.peak_flops.get(k, 0), other.peak_flops.get(k, 0)) for k in ("fp16", "fp8")]
    figures = [
        (one.memory_bandwidth, other.memory_bandwidth), (one.memory_bytes, other.memory_bytes),
        (one.link_bandwidth, other.link_bandwidth),
        (one.boost_clock_hz or 0, other.boost_clock_hz or 0), *peaks,
    ]  # fmt: skip
    return one.vendor == other.vendor and all(mine >= 0.999 * theirs for mine, theirs in figures)


def list_pairs() -> list[tuple[str, str]]:
    """Pairs of a GPU and a faster one with none between them."""
    names = sorted({*SMALL, *LARGE})
    above = {(a, b) for a, b in permutations(names, 2) if exceeds(get_gpu(b), get_gpu(a))}
    return [
        (a, b)
        for a, b in sorted(above)
        if not any((a, c) in above and (c, b) in above for c in names)
    ]


def list_deployments() -> Iterator[tuple[tuple[object, ...], str, Deployment]]:
    """What the grid holds and can start, with the same arguments on all GPUs, by what is served."""
    engine = get_engine("vllm", "0.20.2")
    for name, (sizes, gpus, formats) in GRID.items():
        for method, tp, gpu in product(formats, sizes, sorted(gpus)):
            try:
                deployed = deploy_on(
                    load_model(name, quantization=method), gpu, engine=engine, tp=tp, max_model_len=10240,
                    max_num_seqs=64, max_num_batched_tokens=8192, enable_prefix_caching=False,
                )  # fmt: skip
            except PlannerError:  # no kernels for this format, or no memory for it
                continue
            if get_memory_plan(deployed).can_start:
                yield (name, method, tp), gpu, deployed


@pytest.fixture(scope="module")
def latencies() -> dict[tuple[object, ...], dict[str, tuple[float, float]]]:
    """TTFT and TPOT (s) by what is served and the load, then by GPU, where all requests fit at once."""
    found: dict[tuple[object, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for served, gpu, deployed in list_deployments():
        for prompt, load in LOADS:
            if served[1] == "awq" and (prompt == 8192 or "B" in gpu[:2]):
                continue
            if get_memory_plan(deployed).pool.reported_tokens >= load * (prompt + 256):
                lengths = (LengthDistribution.from_uniform(most, 0.8) for most in (prompt, 256))
                run = run_short_simulation(deployed, Workload(*lengths, concurrency=load), 2 * load)
                times = (run.get(metric, "mean").mid for metric in ("ttft", "tpot"))
                found[*served, prompt, load][gpu] = tuple(times)
    return found


def test_a_faster_gpu_never_answers_later(latencies) -> None:
    ratios = {
        (metric, slow, fast, *key): by_gpu[fast][k] / by_gpu[slow][k]
        for key, by_gpu in latencies.items()
        for slow, fast in list_pairs()
        for k, metric in enumerate(("ttft", "tpot"))
        if slow in by_gpu and fast in by_gpu
    }
    late = {key: ratio for key, ratio in ratios.items() if ratio > SLACK}
    assert len(ratios) > 1000
    assert len(late) <= 0.01 * len(ratios), late
    assert not {key: ratio for key, ratio in late.items() if ratio > MOST_SLACK}


def test_narrower_weights_do_not_slow_prompts_where_kernels_widen_them_well(latencies) -> None:
    """Kernels that widen 4-bit weights reach 0.92 to 0.96 of BF16's on Ampere (AIConfigurator's tables)."""
    ratios = []
    for (name, method, *rest), by_gpu in latencies.items():
        plain = latencies.get((name, None, *rest), {})
        ratios += [
            by_gpu[gpu][0] / plain[gpu][0]
            for gpu in ("A100-SXM-80GB", "A6000", "L40S", "RTX-3090", "RTX-4090")
            if method == "awq" and gpu in by_gpu and gpu in plain
        ]
    assert len(ratios) > 20
    assert np.median(ratios) < 1.1 and max(ratios) < 1.3
