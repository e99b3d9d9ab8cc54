"""Facts that catch faults which no other test noticed; each was planted by hand, and is caught here."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import gamma, multivariate_normal, norm
from shipped import open_loop, plan_of

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import convert_gib_to_bytes, parse_bytes
from planner.deploy.artifacts import list_benchmark_lengths
from planner.engines.deployment import deploy_on
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.latency.lora_adapters import (
    compute_adapter_costs,
    estimate_distinct_adapters,
    limit_sequences_by_adapters,
)
from planner.latency.measured_residuals import OperatingPoint, estimate_residual, widen_sigma
from planner.latency.power import GpuActivity, estimate_gpu_activity
from planner.latency.startup_time import estimate_startup
from planner.latency.step_model import build_step_model
from planner.latency.step_work import count_step_work
from planner.latency.worker_pool_costs import UNMEASURED_POOL_COSTS, get_pool_coefficients
from planner.latency.workload_step_costs import build_workload_step_costs, estimate_kv_offload
from planner.memory.concurrency_limits import estimate_preemption_risk, find_safe_max_num_seqs
from planner.memory.deployment_changes import DeploymentChange
from planner.memory.kv_cache import KvCachePool, build_kv_layout, get_backend_block_size
from planner.memory.memory_plan import find_safe_memory_utilization, get_memory_plan
from planner.memory.runtime_overhead import FittedConstant
from planner.models.registry import load_model
from planner.parallelism.communication import estimate_collectives
from planner.planning.capacity import estimate_capacity
from planner.planning.engine_tuning import generate_neighbours
from planner.planning.growth import GrowthLimit
from planner.planning.max_load import find_max_load
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.plan import get_reference_deployment
from planner.planning.prediction import predict
from planner.planning.scenario import load_scenario
from planner.planning.simulation_runs import simulate_once
from planner.planning.slo import SloTarget, compute_joint_probability
from planner.planning.tolerance import EvaluationStore, compute_error_factor
from planner.queueing.percentiles import compute_gamma_quantiles
from planner.tools.lint.report import lint
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload


def deploy(**fields: Any) -> Any:
    return deploy_on("Qwen/Qwen3-8B", "L40S", **{"engine_version": "0.20.0", **fields})


def test_the_null_block_is_no_room_for_requests() -> None:
    """vLLM keeps block 0 as a placeholder: `BlockPool.__init__` pops it (v1/core/block_pool.py)."""
    pool = get_memory_plan(deploy(max_model_len=4096)).pool
    a_request = pool.layout.count_request_blocks(1024)
    for requests in (1, 7):
        exact = replace(pool, num_blocks=requests * a_request)
        assert exact.count_sequences(1024) == requests - 1
        assert replace(exact, num_blocks=exact.num_blocks + 1).count_sequences(1024) == requests


def test_the_safe_number_of_sequences_risks_five_percent() -> None:
    """Requests are drawn one by one: prompts, and a random moment of answers met by their length."""
    memory = get_memory_plan(deploy(max_model_len=8192))
    prompt, output = (
        LengthDistribution.from_uniform(1500, 0.9),
        LengthDistribution.from_uniform(500, 0.9),
    )
    safe = find_safe_max_num_seqs(memory, Workload(prompt, output, rate=1.0))
    rng = np.random.default_rng(5)
    prompts, outputs = np.asarray(prompt.values), np.asarray(output.values)
    met = outputs / outputs.sum()

    def risk(sequences: int) -> float:
        shape = (4000, sequences)
        contexts = rng.choice(prompts, shape) + rng.random(shape) * rng.choice(
            outputs, shape, p=met
        )
        blocks = np.ceil(contexts / memory.pool.layout.block_size).sum(axis=1)
        return float((blocks > memory.pool.num_blocks - 1).mean())

    assert 0.005 < risk(safe) < 0.09


def test_decode_contexts_multiply_the_tokens_that_a_pool_reports() -> None:
    """vLLM's log multiplies by them (v1/core/kv_cache_utils.py, `_report_kv_cache_config`)."""
    memory = get_memory_plan(
        deploy_on("Qwen/Qwen3-30B-A3B", "H100", tp=8, dcp=2, engine_version="0.20.0")
    )
    layout = memory.pool.layout
    assert layout.dcp == 2 and layout.counts_blocks and len(layout.groups) == 1
    assert KvCachePool(layout, 1000, 1).reported_tokens == 1000 * layout.block_size * 2


def test_a_larger_error_takes_more_of_every_limit() -> None:
    """By definition of z: steps take exp(sigma z) times as long, and no limit likes slower steps."""
    scenario = load_scenario("edge-8b-24gb")
    deployment = get_reference_deployment(plan_of("edge-8b-24gb"))
    store = EvaluationStore(scenario)
    shares = [store.get_margin(deployment, z) for z in (-1.0, 0.0, 1.0)]
    assert shares[0] < shares[1] < shares[2]
    workload = Workload(
        LengthDistribution.from_constant(500), LengthDistribution.from_constant(100), rate=0.2
    )
    step = build_step_model(deployment, workload)
    # a first token is less certain than the next ones, so that its error goes beyond that of steps
    assert step.sigma_ttft > step.sigma_tpot
    for z in (-1.5, 2.0):
        extra = compute_error_factor(step, SloTarget("ttft", "p50", 1.0), z)
        assert math.log(extra) == pytest.approx(z * (step.sigma_ttft - step.sigma_tpot), rel=1e-6)
        for at, more in (("p50", 0.0), ("p95", 0.25), ("p99", 0.5)):  # a tail is further off
            extra = compute_error_factor(step, SloTarget("tpot", at, 1.0), z)
            assert math.log(extra) == pytest.approx(z * more * step.sigma_tpot, abs=1e-9)


def test_traffic_that_may_be_more_takes_more_of_a_limit_and_that_may_be_less_takes_less() -> None:
    """Of a loaded engine, 8 to 32 requests/s against their middle: the load takes most of what it may."""
    middle, spread = (
        EvaluationStore(load_scenario("edge-8b-24gb", {"workload.rate": rate}))
        for rate in (16, [8, 32])
    )
    deployment = deploy(max_model_len=4096)
    assert spread.get_margin(deployment, 0.0) == middle.get_margin(deployment, 0.0)
    assert spread.get_margin(deployment, 1.5) > middle.get_margin(deployment, 1.5)
    assert spread.get_margin(deployment, -1.5) < middle.get_margin(deployment, -1.5)


@pytest.mark.parametrize(
    "option",
    ["--worker-use-ray", "--num-lookahead-slots 2", "--use-v2-block-manager", "--swap-space 4"],
)
def test_an_option_is_gone_after_the_version_that_had_it(option: str) -> None:
    """Time runs forward: a version that no longer has an option is later than one that had it."""
    findings = lint(f"vllm serve Qwen/Qwen3-8B {option}", "0.33.0").findings
    (match,) = filter(
        None,
        (re.search(r"gone since (\S+), if not before; (\S+) had it", one.why) for one in findings),
    )
    since, had = (tuple(map(int, text.split("."))) for text in match.groups())
    assert had < since
    # and what is said is so: a server of the one version takes it, one of the other does not
    for version, refused in ((match[2], False), (match[1], True)):
        (one,) = (f for f in lint(f"vllm serve Qwen/Qwen3-8B {option}", version).findings
                  if f.name == option.split()[0])  # fmt: skip
        assert one.refused is refused


KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
metadata: {{name: llm}}
spec:
  template:
    spec:
      containers:
      - name: llm
        image: vllm/vllm-openai:v0.18.0
        args: [--model, meta-llama/Llama-3.1-70B-Instruct, --tensor-parallel-size, "4"]
        startupProbe: {{httpGet: {{path: /health, port: 8000}}, {fields}}}
"""


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ("initialDelaySeconds: 11, periodSeconds: 2, failureThreshold: 7", 25),
        ("periodSeconds: 5, failureThreshold: 4", 20),
        ("initialDelaySeconds: 9", 39),  # every 10 s, three times
    ],
)
def test_a_probe_kills_after_its_delay_and_all_its_failures(fields: str, seconds: int) -> None:
    """kubernetes.io, configure probes: the delay, then failureThreshold times periodSeconds."""
    report = lint(KUBERNETES.format(fields=fields), gpu="4xH100")
    (finding,) = (one for one in report.findings if "startupProbe" in one.name)
    assert f"after {seconds} s" in finding.why and finding.verdict == "contradicts"


def test_requests_that_all_run_at_once_take_no_share_of_the_load() -> None:
    """In a closed loop nobody waits for a slot that is free: only the latencies, far from their limits, count."""
    workload = Workload(
        LengthDistribution.from_constant(500), LengthDistribution.from_constant(100), concurrency=8
    )
    slack = (SloTarget("tpot", "p95", 2.0),)
    scenario = replace(load_scenario("edge-8b-24gb"), workload=workload, slo_targets=slack)
    store = EvaluationStore(scenario, quick=False)
    for slots in (8, 16):
        deployment = deploy(max_model_len=4096, max_num_seqs=slots)
        assert store.get_margin(deployment, 0.0) < 0.1
    hard = replace(scenario, slo_targets=(SloTarget("tpot", "p95", 1e-6),))
    assert EvaluationStore(hard, quick=False).get_margin(deployment, 0.0) > 1000, "of a millisecond"


def test_no_load_is_small_enough_for_more_than_the_memory_holds() -> None:
    """Whether it starts does not depend on the traffic: the probability of both is at most the memory's."""
    tight = deploy(max_model_len=4096, gpu_memory_utilization=0.4)
    starts = estimate_memory_probability(tight)
    assert 0.5 < starts < 0.999
    assert find_max_load(load_scenario("edge-8b-24gb"), tight, (1 + starts) / 2) == 0.0


@pytest.mark.parametrize(
    ("confident", "growth"), [(0.0, 0.0), (2.0, 0.0), (2.001, 0.0), (2.8, 0.4)]
)
def test_growth_is_what_is_kept_beyond_the_offered_load(confident: float, growth: float) -> None:
    limit = GrowthLimit(2.0, confident, 0.9)
    assert limit.growth == pytest.approx(growth)


def test_workers_that_nobody_measured_cost_what_engines_do() -> None:
    """Also with data-parallel attention: `attention_dp` is 1 of an entry that names no pace."""
    deployment = deploy_on("deepseek-ai/DeepSeek-R1", "B200", tp=1, dp=8)
    for phase in ("prefill", "decode"):
        found = get_pool_coefficients(deployment, phase, UNMEASURED_POOL_COSTS)  # type: ignore[arg-type]
        assert found == get_deployment_coefficients(deployment).coefficients


def test_an_arrival_waits_for_what_is_left_of_a_step() -> None:
    """Inspection of a regular cycle: what is left is uniform, of mean t / 2 and variance t^2 / 12.

    Prompts are so short and rare that they only wait, and answers so long that steps never stop.
    The closed form takes a gamma distribution of these moments, scipy's is the oracle.
    """
    workload = Workload(
        LengthDistribution.from_constant(1), LengthDistribution.from_constant(3000), rate=0.1
    )
    deployment = deploy(max_model_len=4096, async_scheduling=False)
    found = open_loop(deployment, get_memory_plan(deployment), workload)
    assert found.decode_batch > 7, "a step is under way whenever a prompt arrives"
    step, mean = found.get("tpot", "mean").mid, found.get("ttft", "mean").mid
    for name, share in (("p95", 0.95), ("p99", 0.99)):
        beyond = gamma.ppf(share, 3, scale=step / 6) - step / 2
        assert found.get("ttft", name).mid - mean == pytest.approx(beyond, rel=0.01), name


@pytest.mark.parametrize(
    ("model", "gpu"), [("Qwen/Qwen3-8B", "L40S"), ("meta-llama/Llama-3.1-8B-Instruct", "A100-80GB")]
)
def test_the_safe_share_of_memory_is_where_nine_of_ten_starts_hold(model: str, gpu: str) -> None:
    """It is read off the ends of 80% intervals, which one in ten errors passes on either side."""
    planned = deploy_on(model, gpu, engine_version="0.20.0", max_model_len=4096)
    safe = find_safe_memory_utilization(planned)
    assert 0.8 < safe < 1
    at_it, beyond = (
        get_memory_plan(planned.with_args(gpu_memory_utilization=share)).p_fits
        for share in (safe, safe + 0.01)
    )
    assert at_it >= 0.9 > beyond


@pytest.mark.parametrize(("is_on", "share"), [(False, 0.5), (True, 0.0), (True, 0.5)])
def test_a_prefix_is_found_where_it_is_kept_and_comes_again(is_on: bool, share: float) -> None:
    """`--no-enable-prefix-caching` finds nothing, whatever the prompts share; nor do prompts that share nothing."""
    workload = Workload(
        LengthDistribution.from_constant(1024), LengthDistribution.from_constant(4), rate=1.0,
        prefix_tokens=512, prefix_hit_rate=share,
    )  # fmt: skip
    deployment = deploy(max_model_len=4096, enable_prefix_caching=is_on)
    found = simulate_once(deployment, workload, 50).outcome.cached.sum()
    assert (found > 0) == (is_on and share > 0)
    costs = build_workload_step_costs(deployment, workload, get_memory_plan(deployment).pool)
    assert costs.reuses_prefixes == (is_on and share > 0)


@pytest.mark.parametrize(
    "given", [{}, {"max_num_batched_tokens": 2048}, {"gpu_memory_utilization": 0.9}, {"max_num_seqs": 64}]
)  # fmt: skip
def test_only_what_the_user_left_open_is_tried_otherwise(given: dict[str, float]) -> None:
    scenario = replace(load_scenario("edge-8b-24gb"), engine_args=given)
    usual = deploy(
        **{"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048, **given}
    )
    tried = list(generate_neighbours(scenario, usual))
    for name in ("max_num_batched_tokens", "gpu_memory_utilization", "max_num_seqs"):
        values = {getattr(variant.args, name) for variant in tried} - {getattr(usual.args, name)}
        assert bool(values) == (name not in given), name


def test_what_fits_no_gpu_is_told_how_large_one_would_be() -> None:
    """671 B weights in FP8 are 625 GiB before anything else, and this engine has no pipelines."""
    remedy = get_memory_plan(deploy_on("deepseek-ai/DeepSeek-R1", "L4", engine="tgi")).remedy
    (needed,) = map(int, re.findall(r"^use GPUs with (\d+) GiB or more$", remedy))
    assert 625 < needed < 850


def test_what_kernels_pass_on_by_the_shapes_of_a_checkpoint() -> None:
    """Llama-3.1-8B's config.json: 32 layers, hidden 4096, 32 heads of 128, 8 for keys and values, MLP of 14336.

    Two blocks of 6 hidden values each, and every value between linears written and read, of 2 bytes:
    q, k, v, the attention's result, gate, up and their product, halved by two ranks.
    """
    inner = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 14336
    for tp in (1, 2):
        work = count_step_work(deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100", tp=tp))
        assert work.token_bytes == 2 * 32 * (2 * 6 * 4096 + 2 * inner / tp)


@pytest.mark.parametrize(("tp", "gbs"), [(4, 450), (8, 50)])
def test_a_stage_sends_the_sum_and_its_residual_over_the_line_between(tp: int, gbs: float) -> None:
    """vLLM's IntermediateTensors: two tensors of 4096 values of 2 bytes. 8 GPUs of a machine: NVLink 4, 450 GB/s."""
    deployment = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100", tp=tp, pp=2)
    coefficients = get_deployment_coefficients(deployment).coefficients
    *_, sent = estimate_collectives(deployment, np.array([1e4, 1.1e5]), coefficients)
    assert sent.count == 1 and sent.bytes.tolist() == [1e4 * 16384, 1.1e5 * 16384]
    reached = 1e5 * 16384 / (sent.seconds[1] - sent.seconds[0]) / 1e9
    assert reached == pytest.approx(gbs * coefficients.link)


def test_workers_start_wherever_there_is_more_than_one_gpu() -> None:
    """Stages are processes as ranks are, each compiles its own half of the layers; a lone GPU has its process alone."""
    alone, ranks, stages = (estimate_startup(deploy(**how)) for how in ({}, {"tp": 2}, {"pp": 2}))
    assert alone and ranks and stages
    assert alone.process.mid < ranks.process.mid == stages.process.mid
    assert stages.compilation.mid == alone.compilation.mid / 2
    for phase in (alone.process, alone.compilation, alone.graphs):
        assert phase.lo * phase.hi == pytest.approx(phase.mid**2), "lognormal: as far in factors"
    eager = estimate_startup(deploy(enforce_eager=True))
    assert eager and eager.compilation.hi == eager.graphs.hi == 0


def test_a_gpu_does_what_its_model_and_traffic_come_to() -> None:
    """Llama-3.1-8B by its shapes: 2 FLOP a weight and token, half of each prompt's square in attention.

    Every step reads all weights but the embedding, and every token all keys and values before it.
    """
    deployment = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100")
    layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head, token = 128256 * 4096, 32 * 2 * 1024 * 2

    def work(prompt: int, output: int, rate: float, batch: float) -> GpuActivity:
        lengths = map(LengthDistribution.from_constant, (prompt, output))
        return estimate_gpu_activity(deployment, Workload(*lengths, rate=1.0), rate, batch)

    done = work(1000, 1, 3, 1)
    pairs = 3 * 32 * 4 * 4096 * 1000**2 / 2
    assert done.flops[0] == pytest.approx(2 * (3000 * layers + 3 * head) + pairs, rel=1e-3)
    assert done.bytes == pytest.approx(3 * 2 * (layers + head), rel=1e-3) and done.prompts == 1
    done = work(500, 3001, 0.02, 8)  # 60 tokens/s in steps of 8, each behind 2,000 others
    assert done.bytes == pytest.approx(7.5 * 2 * (layers + head) + 60 * 2000 * token, rel=2e-3)
    assert done.prompts == pytest.approx(10 / 70)
    assert work(500, 2, 1, 1).prompts == 500 / 501, "the first token comes of the prompt's step"


def test_block_scaled_fp8_takes_the_energy_of_16_bits() -> None:
    """DeepGEMM adds each block of 128 in FP32: no run in public shows fewer joules a FLOP."""
    lengths = map(LengthDistribution.from_constant, (1000, 1))
    load = Workload(*lengths, rate=1.0)
    blocks, whole = (
        estimate_gpu_activity(deploy_on(f"Qwen/Qwen3-30B-A3B{name}", "H100"), load, 3, 1).flops
        for name in ("-FP8", "")
    )
    assert blocks == pytest.approx(whole)


@pytest.mark.parametrize(
    ("model", "dtype", "capability", "block"),
    [
        ("deepseek-ai/DeepSeek-R1", "fp8", 9.0, 64), ("deepseek-ai/DeepSeek-R1", "auto", 9.0, 16),
        ("deepseek-ai/DeepSeek-R1", "auto", 10.0, 32), ("deepseek-ai/DeepSeek-R1", "auto", 10.3, 32),
        ("deepseek-ai/DeepSeek-V3.2", "auto", 9.0, 64), ("Qwen/Qwen3-8B", "fp8", 10.0, 16),
    ],
)  # fmt: skip
def test_blocks_are_those_of_the_attention_backend(
    model: str, dtype: str, capability: float, block: int
) -> None:
    """vLLM 0.33.0: FLASHMLA and FLASHMLA_SPARSE take blocks of 64, FlashInfer-MLA on Blackwell of 32."""
    architecture = load_model(model).architecture
    assert get_backend_block_size(architecture, dtype, capability) == block


def test_errors_of_independent_parts_add_as_squares_do() -> None:
    """3 and 4 make 5; 90% of a normal distribution lie below 1.2816 of its deviations."""
    total = Interval(7, 10, 13) + Interval(16, 20, 24)
    assert (total.lo, total.mid, total.hi) == (25, 30, 35)
    assert Interval.from_normal(10, 2).hi == pytest.approx(norm.ppf(0.9, 10, 2), rel=1e-4)
    assert Interval.from_lognormal(10, 0.2).hi == pytest.approx(
        10 * math.exp(norm.ppf(0.9) * 0.2), rel=1e-4
    )
    below = Interval(1, 2, 4) - Interval(1, 1, 1)
    assert (below.lo, below.mid, below.hi) == (0, 1, 3)
    assert (-Interval(1, 2, 4)).lo == -4 and Interval(1, 2, 4).map_monotone(lambda x: -x).hi == -1


@pytest.mark.parametrize(
    ("text", "size"),
    [("16Gi", 2**34), ("64m", 2**26), ("1.5 GB", 1.5 * 2**30), ("2TiB", 2**41), ("7", 7), ("8k", 8192),
     ("1.2.3", None), (".", None), ("Gi", None), ("5 apples", None)],
)  # fmt: skip
def test_sizes_are_in_powers_of_1024(text: str, size: float | None) -> None:
    """As Docker and vLLM read them; 10,000 MiB written for GiB are 9.77 of these."""
    assert parse_bytes(text) == size
    with pytest.raises(PlannerError, match=r"if it is MiB, write 9.766$"):
        convert_gib_to_bytes(10_000, 24 * 2**30, "field")


def test_one_adapter_is_one_however_many_ask_for_it() -> None:
    assert estimate_distinct_adapters(1, 1.0, 3).tolist() == pytest.approx([0, 1, 1, 1], abs=1e-9)


def test_paces_of_a_prefill_pool_multiply() -> None:
    """Half as fast for the hand-over and half as fast for data-parallel attention: a quarter."""
    deployment = deploy_on("deepseek-ai/DeepSeek-R1", "B200", tp=1, dp=8)
    slow = UNMEASURED_POOL_COSTS.model_copy(update={"prefill": {"pace": 0.5}, "attention_dp": 0.5})
    found, usual = (
        get_pool_coefficients(deployment, "prefill", costs).pace
        for costs in (slow, UNMEASURED_POOL_COSTS)
    )
    assert found == pytest.approx(usual / 4)


def test_a_smaller_share_of_the_memory_leaves_more_to_others() -> None:
    deployment = deploy(gpu_memory_utilization=0.9)
    for share, word in ((0.8, "more"), (0.95, "less")):
        change = DeploymentChange("gpu_memory_utilization", share)
        assert change.describe_price(deployment).startswith(f"leaves {word} for")


def test_percentiles_are_those_of_a_gamma_distribution() -> None:
    """scipy's, of the same mean and variance."""
    means, variances = np.array([1.0, 2.0, 0.5]), np.array([0.1, 1.5, 0.02])
    found = compute_gamma_quantiles(means[:, None, None], variances[:, None, None]).reshape(3, -1)
    shape, scale = means**2 / variances, variances / means
    for at, share in enumerate((0.5, 0.95, 0.99)):
        assert found[:, at] == pytest.approx(gamma.ppf(share, shape, scale=scale), rel=0.01)


@pytest.mark.parametrize("metric", ["tpot", "ttft"])
def test_where_no_run_is_near_the_error_is_that_of_all_levels_together(metric: str) -> None:
    """Independent errors add as squares: each level's two, what it leaves open if new, and repeats of a run."""
    fields = yaml.safe_load((CATALOG_DIR / "calibration/process.yaml").read_text())[metric]
    levels = [
        {"offset": 0, "varying": 0, "unseen": 0} | level for level in fields["levels"].values()
    ]
    squares = sum(one[part] ** 2 for one in levels for part in ("offset", "varying", "unseen"))
    traits = {trait: "new" for level in levels for trait in level["shares"]}
    point = OperatingPoint("vllm", tuple(traits.items()), (50.0,) * 5)
    mean, sigma = estimate_residual(point, metric)  # type: ignore[arg-type]
    assert (mean, sigma**2) == pytest.approx((0, squares + fields["noise"] ** 2))


def test_the_fullest_stage_is_the_one_that_is_planned() -> None:
    """Llama-3.3-70B at TP2 x PP4 in vLLM: 16.95 GiB on the end stages, 15.97 in the middle.

    In three stages the last has 26 layers, and the head, which is larger than a layer: it holds the fewest blocks.
    """
    deployment = deploy_on("meta-llama/Llama-3.1-70B-Instruct", "H100", tp=2, pp=4)
    memory = get_memory_plan(deployment)
    assert memory.weights.mid / 2**30 == pytest.approx(16.95, abs=0.06)
    per_token = 2 * 4 * 128 * 2  # keys and values of four heads, of a layer on each of two ranks
    three = get_memory_plan(replace(deployment, layout=replace(deployment.layout, pp=3)))
    sizes = three.pool.layout.stage_bytes_per_block
    assert sorted(size / per_token / 16 for size in sizes) == [26, 27, 27]
    assert three.pool.bytes_per_block == min(sizes) == sizes[-1]
    assert three.pool.num_blocks == three.kv_available.mid // min(sizes)


def test_a_performance_is_printed_in_milliseconds() -> None:
    lengths = map(LengthDistribution.from_constant, (500, 100))
    found = open_loop(
        deployed := deploy(max_model_len=4096),
        get_memory_plan(deployed),
        Workload(*lengths, rate=0.2),
    )
    ttft = dict.fromkeys(found.latencies["ttft"], Interval.from_value(0.25))
    known = replace(found, latencies={**found.latencies, "ttft": ttft})
    assert str(known).startswith("TTFT mean 250.0 ms, p99 250.0 ms; ITL mean ")


@pytest.mark.parametrize("correlation", [0.0, 0.2, -0.3, 0.5])
def test_errors_that_go_together_are_both_small_as_scipy_says(correlation: float) -> None:
    oracle = multivariate_normal([0, 0], [[1, correlation], [correlation, 1]])
    for ends in ((0.8, 0.8), (-0.5, 1.3), (0.0, 2.0)):
        found = compute_joint_probability(*ends, correlation)
        assert found == pytest.approx(oracle.cdf(ends), abs=1e-4)


def test_memory_that_fits_at_the_low_end_of_an_80_percent_interval_fits_in_nine_of_ten() -> None:
    memory = get_memory_plan(deploy(max_model_len=4096))
    want = memory.layout.max_blocks_per_request * memory.pool.bytes_per_block
    narrow = replace(memory, kv_available=Interval(want, want + 1e9, want + 3e9))
    assert narrow.p_fits == pytest.approx(0.9, abs=1e-3)


def test_a_relative_error_grows_with_what_it_is_of() -> None:
    """Five of 2 GiB, each a tenth off together: a normal error of one, of which 80% lie within 1.2816."""
    found = FittedConstant(value=2, unit="GiB", sigma=0.1, source="?", date="2026-11").multiply(5)
    assert (found.lo, found.mid, found.hi) == pytest.approx((8.7184, 10, 11.2816), abs=1e-4)


def test_an_error_grows_with_the_sequences_beyond_what_was_usually_measured() -> None:
    """64 and fewer are alike; a hundred times as many grow it by the stated power of a hundred."""
    stated = yaml.safe_load((CATALOG_DIR / "calibration/process.yaml").read_text())["tpot"]
    one, usual, many = (
        widen_sigma(OperatingPoint("vllm", (("layout_kind", "tp"),), (math.log(n), 0, 0, 0, 0)), "tpot", 3.0, 4.0)
        for n in (1, 64, 6400)
    )  # fmt: skip
    assert one == usual == pytest.approx(5 * stated["widths"]["vllm"])  # errors of 3 and 4 are 5
    assert many / usual == pytest.approx(100 ** stated["load"])


def test_latent_attention_is_expanded_for_prompts_and_stored_as_its_kernels_read_it() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 for keys, 128 for values; V3.2's FP8 latents take 656 bytes (FlashMLA)."""
    (context,) = count_step_work(deploy_on("deepseek-ai/DeepSeek-V3", "H200", tp=8)).contexts
    assert context.prefill_flops == 61 * 2 * 16 * (128 + 64 + 128)
    plain, sparse = (
        build_kv_layout(deploy_on(f"deepseek-ai/{name}", "H200", tp=8, kv_cache_dtype="fp8")).kv_bytes_per_token / 61
        for name in ("DeepSeek-V3", "DeepSeek-V3.2")
    )  # fmt: skip
    assert (plain, sparse) == (512 + 64, 656 + 128 + 4)  # and an index key with its scale


def test_ranks_gather_all_tokens_for_the_experts_and_reduce_their_results() -> None:
    """A ring passes 7 of 8 parts twice: 8 ranks' tokens of 7168 values of 2 bytes, in each of 58 layers of experts."""
    served = deploy_on("deepseek-ai/DeepSeek-R1", "H200", dp=8, ep=8)
    coefficients = get_deployment_coefficients(served).coefficients
    (exchange,) = estimate_collectives(served, np.array([0.0, 1000.0]), coefficients)
    assert exchange.count == 58 and exchange.bytes.tolist() == [0, 8 * 1000 * 7168 * 2]
    passed = exchange.seconds[1] - exchange.seconds[0]
    line = served.link_bandwidth * coefficients.link
    assert passed == pytest.approx(58 * 2 * 7 / 8 * exchange.bytes[1] / line)


def test_a_rank_of_a_pipeline_keeps_its_own_layers_of_what_goes_to_the_host() -> None:
    """Half of the layers: half of a block's bytes over a line of its own, into half of the memory: as many blocks."""
    one, two = (deploy_on("Qwen/Qwen3-32B", "H100", pp=pp, kv_offloading_size=64) for pp in (1, 2))
    kept, cut = (estimate_kv_offload(d, get_memory_plan(d).pool) for d in (one, two))
    assert cut.num_blocks == pytest.approx(kept.num_blocks, abs=1)
    assert cut.load_block_s == pytest.approx(kept.load_block_s / 2)
    windows = deploy_on("google/gemma-3-27b-it", "H100", kv_offloading_size=64)
    assert not any(estimate_kv_offload(windows, get_memory_plan(windows).pool))  # unlike by release


def test_an_adapter_on_two_stages_is_read_and_launched_by_halves() -> None:
    one, two = (deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100", pp=pp, max_loras=2, max_lora_rank=16)
                for pp in (1, 2))  # fmt: skip
    whole, half = compute_adapter_costs(one), compute_adapter_costs(two)
    assert half.adapter_token_s == pytest.approx(whole.adapter_token_s / 2)
    assert half.adapter_s == pytest.approx(whole.adapter_s / 2, rel=0.1)  # ends of the model apart
    assert half.adapter_cold_s == whole.adapter_cold_s


def test_whole_requests_differ_as_their_answers_do() -> None:
    """Alone on a GPU a request takes its tokens times their pace: uniform answers are known."""
    outputs = LengthDistribution.from_uniform(1333, 0.5)  # up to 1,333, from half of that
    workload = Workload(LengthDistribution.from_constant(100), outputs, rate=0.001)
    deployment = deploy(max_model_len=4096)
    found = open_loop(deployment, get_memory_plan(deployment), workload)
    for name in ("p50", "p95"):
        whole = (
            found.get("ttft", "mean").mid + getattr(outputs, name) * found.get("tpot", "mean").mid
        )
        assert found.get("e2e", name).mid == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("quick", [True, False])
def test_headroom_takes_its_share_of_what_all_replicas_serve(quick: bool) -> None:
    """4/5 of the capacity may be used: 5/4 of the share. Twice the traffic on twice the replicas is the same share.

    Where more arrives than is served a first token waits without end, and the pace stays one.
    """
    base = replace(load_scenario("edge-8b-24gb"), slo_targets=(SloTarget("tpot", "p95", 1.0),))
    alone = deploy(max_model_len=4096, max_num_seqs=16)
    most = estimate_capacity(alone, base.workload).mid

    def use(load: float, headroom: float, replicas: int = 1, metric: str = "tpot") -> float:
        scenario = replace(
            base, workload=base.workload.with_rate(load * replicas * most), headroom=headroom,
            slo_targets=(SloTarget(metric, "p95", 100.0),),
        )  # fmt: skip
        return EvaluationStore(scenario, quick).get_margin(alone.with_replicas(replicas), 0.0)

    assert use(0.75, 0.0) == pytest.approx(0.75, rel=0.2)  # in closed form, if quick
    assert use(0.75, 0.2) == pytest.approx(use(0.75, 0.0) / 0.8, rel=0.03)
    assert use(0.75, 0.0, replicas=2) == pytest.approx(use(0.75, 0.0), rel=0.02)
    assert use(2.0, 0.0) < 3 and (quick or math.isinf(use(2.0, 0.0, metric="ttft")))


def test_a_pool_of_exactly_the_blocks_that_are_held_is_even_odds() -> None:
    """Prompts of 1,001 tokens hold 63 blocks of 16 until the last token, and one more is a placeholder."""
    memory = get_memory_plan(deploy(max_model_len=4096))
    lengths = (LengthDistribution.from_constant(tokens) for tokens in (1001, 2))
    load = Workload(*lengths, rate=1.0)
    pools = [replace(memory, pool=replace(memory.pool, num_blocks=n)) for n in (314, 315, 316, 318)]
    odds = [estimate_preemption_risk(pool, load, 5) for pool in pools]
    assert odds == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert [find_safe_max_num_seqs(pool, load) for pool in pools] == [4, 4, 5, 5]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_of_a_thousand_adapters_as_many_run_as_have_slots(slots: int) -> None:
    """Asked evenly, hardly two requests of so few have the same one."""
    deployment = deploy(max_loras=slots, max_lora_rank=16, max_num_seqs=64)
    lengths = (LengthDistribution.from_constant(tokens) for tokens in (100, 10))
    load = Workload(*lengths, rate=1.0, adapters=1000)
    assert limit_sequences_by_adapters(deployment, load) == slots


def test_requests_of_a_benchmark_fit_and_keep_their_lengths() -> None:
    """Answers that are often longer than the context end at it; else the mean is that of the workload."""
    means = []
    for most in (1400, 16384):
        deployment = deploy(max_model_len=most)
        load = Workload(
            LengthDistribution.from_uniform(900, 0.5), LengthDistribution.from_uniform(800, 0.5), rate=1.0
        )  # fmt: skip
        sent = list_benchmark_lengths(predict(deployment, load))
        assert max(prompt + output for prompt, output in sent) <= most
        means.append(np.mean([output for _, output in sent]))
    assert means[0] < 0.99 * means[1] and means[1] == pytest.approx(load.output.mean, rel=0.02)


def test_blocks_are_demanded_for_recurrent_states_and_windows_were_stored_in_full() -> None:
    """vLLM 0.20 wants a block for each sequence's states; before 0.10 Gemma 3 had one pool for 34 layers."""
    hybrid = deploy_on(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "H200", tp=4, max_num_seqs=200, engine_version="0.20.2"
    )
    assert [get_memory_plan(d).num_state_blocks for d in (hybrid, deploy())] == [200, 0]
    old = deploy_on("google/gemma-3-4b-it", "L40S", engine_version="0.8.5")
    assert [(g.kind, g.layers) for g in get_memory_plan(old).pool.layout.groups] == [("full", 34)]
