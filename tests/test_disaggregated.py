"""Prefill and decode pools in series: laws of queues, a schedule worked out by hand, and published runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import resolve_dynamo_version
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.latency.performance import Performance
from planner.parallelism.communication import estimate_collectives
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction
from planner.simulator.disaggregated_pools import simulate_tandem_pools
from planner.simulator.kernel_types import (
    DecodeWorkerPool,
    PoolTimeline,
    PrefillWorkerPool,
)
from planner.tools.batch import predict_row
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

WORKERS = st.integers(1, 4)


def pool(workers: int, tp: int = 1, **args: object) -> Deployment:
    return deploy_on(
        "meta-llama/Llama-3.1-8B-Instruct",
        "H100",
        tp=tp,
        replicas=workers,
        max_model_len=16384,
        **args,
    )


def closed(concurrency: int, isl: int = 2048, osl: int = 256, runs: int = 10) -> Workload:
    lengths = LengthDistribution.from_uniform(isl, 0.8), LengthDistribution.from_uniform(osl, 0.8)
    return Workload(*lengths, concurrency=concurrency, num_prompts=runs * concurrency)


def served(prefill: int, decode: int, workload: Workload, **args: object) -> Performance:
    found = evaluate_disaggregated(pool(prefill), pool(decode, **args), workload)
    assert found.performance is not None
    return found.performance


def by_hand(
    concurrency: int, requests: int, prefill_s: float, step_s: float, steps: int, seats: int = 9,
    workers: int = 1,
    decoders: int = 1, handover: float = 0.0,
) -> PoolTimeline:  # fmt: skip
    """Prompts of 10 tokens, of which a worker computes one at a time, and decode steps of one length."""
    first = PrefillWorkerPool(workers, 1, np.full(11, prefill_s), np.zeros(11), 0.0)
    rest = DecodeWorkerPool(decoders, np.full(seats + 1, step_s), handover)
    same = np.ones(requests)
    return PoolTimeline(
        *simulate_tandem_pools(
            first, rest, 0 * same, concurrency, 10 * same, 0 * same, 0 * same, float(steps) * same
        )
    )


def test_a_schedule_worked_out_by_hand() -> None:
    """Two in flight, 1 s of prefill each, 5 s of decode: the second waits for the first, from then on nobody does."""
    run = by_hand(concurrency=2, requests=4, prefill_s=1.0, step_s=0.5, steps=10)
    assert run.sent == pytest.approx([0, 0, 6, 7])
    assert run.prefilled == pytest.approx([1, 2, 7, 8])
    assert run.ended == pytest.approx([6, 7, 12, 13])


def test_who_finds_no_seat_waits_for_one() -> None:
    """One seat: a prompt that is computed after 2 s begins to decode when the one before it ends, after 6 s."""
    run = by_hand(concurrency=2, requests=2, prefill_s=1.0, step_s=0.5, steps=10, seats=1)
    assert run.prefilled == pytest.approx([1, 2])
    assert run.joined == pytest.approx([1, 6])


def test_requests_are_dealt_in_turn_not_to_the_freest_worker() -> None:
    """Two decode workers of one seat, prompts of no time: the third follows the first, where a seat is free again."""
    run = by_hand(
        concurrency=3, requests=4, prefill_s=0.0, step_s=0.5, steps=10, seats=1, decoders=2
    )
    assert run.joined == pytest.approx([0, 0, 5, 5])
    assert run.sent == pytest.approx([0, 0, 0, 5])


def test_the_first_token_follows_the_steps_of_the_handover() -> None:
    run = by_hand(concurrency=1, requests=1, prefill_s=1.0, step_s=0.5, steps=10, handover=2.0)
    assert (
        run.prefilled == pytest.approx([1])
        and run.joined == pytest.approx([2])
        and run.ended == pytest.approx([7])
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), WORKERS, st.floats(0.01, 3), st.integers(1, 30), st.integers(1, 12))
def test_every_request_passes_once_and_every_token_is_decoded(
    concurrency: int, workers: int, prefill_s: float, steps: int, seats: int
) -> None:
    run = by_hand(concurrency, 60, prefill_s, 0.1, steps, seats, workers)
    assert (run.sent <= run.prefilled).all() and (run.prefilled <= run.joined).all()
    assert run.ended - run.joined == pytest.approx(np.full(60, 0.1 * steps))
    assert run.tokens.sum() == pytest.approx(60 * steps)
    moments = np.sort(np.concatenate([run.sent, run.ended]))[:-1] + 1e-9
    flying = (run.sent[:, None] <= moments).sum(0) - (run.ended[:, None] <= moments).sum(0)
    assert flying.max() <= concurrency
    decoding = (run.joined[:, None] <= moments).sum(0) - (run.ended[:, None] <= moments).sum(0)
    assert decoding.max() <= seats


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 400), WORKERS, WORKERS)
def test_littles_law_holds_over_both_pools(concurrency: int, prefill: int, decode: int) -> None:
    """Requests in flight = requests a second x seconds that each stays; the rate is counted, not derived from it."""
    found = served(prefill, decode, closed(concurrency, runs=30))
    in_flight = found.request_tps.mid * found.get("e2e", "mean").mid
    assert in_flight == pytest.approx(concurrency, rel=0.06)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 600), WORKERS, WORKERS)
def test_a_further_decode_worker_never_raises_tpot(
    concurrency: int, prefill: int, decode: int
) -> None:
    fewer, more = (served(prefill, n, closed(concurrency)) for n in (decode, decode + 1))
    assert more.get("tpot", "mean").mid <= fewer.get("tpot", "mean").mid * 1.001


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 600), WORKERS, WORKERS)
def test_a_further_prefill_worker_never_raises_ttft(
    concurrency: int, prefill: int, decode: int
) -> None:
    fewer, more = (served(n, decode, closed(concurrency)) for n in (prefill, prefill + 1))
    assert more.get("ttft", "mean").mid <= fewer.get("ttft", "mean").mid * 1.01


def test_where_prefill_is_the_bottleneck_more_requests_only_wait_longer() -> None:
    """8,192-token prompts on one worker: decode keeps its batch, and TTFT grows by what is added to the queue."""
    some, many = (served(1, 2, closed(n, isl=8192, osl=128, runs=40)) for n in (64, 256))
    assert many.bottleneck == some.bottleneck == "compute"
    assert many.get("tpot", "mean").mid == pytest.approx(some.get("tpot", "mean").mid, rel=0.03)
    assert many.request_tps.mid == pytest.approx(some.request_tps.mid, rel=0.03)
    assert many.get("ttft", "mean").mid - some.get("ttft", "mean").mid == pytest.approx(
        192 / some.request_tps.mid, rel=0.05
    )


def test_a_cap_on_the_decode_batch_is_waited_for_before_the_first_token() -> None:
    """48 in flight on 32 seats: 16 wait for half a stay each (by Little's law, 16/32 of it)."""
    capped = served(2, 1, closed(48, isl=256, osl=512, runs=40), max_num_seqs=32)
    assert capped.decode_batch == pytest.approx(32, rel=0.03)
    stay = 460 * capped.get("tpot", "mean").mid
    assert capped.get("ttft", "mean").mid == pytest.approx(stay * 16 / 32, rel=0.15)


def test_an_offered_rate_is_served_until_a_pool_is_full() -> None:
    lengths = LengthDistribution.from_constant(2048), LengthDistribution.from_constant(256)
    light, heavy = (
        served(1, 1, Workload(*lengths, rate=rate, num_prompts=2000)) for rate in (2.0, 200.0)
    )
    assert light.request_tps.mid == pytest.approx(2.0, rel=0.1) and not light.saturated
    assert heavy.saturated and heavy.request_tps.mid < 100
    assert heavy.get("ttft", "mean").mid > 10 * light.get("ttft", "mean").mid


def test_requests_longer_than_the_model_length_are_refused() -> None:
    with pytest.raises(PlannerError, match="do not fit into max_model_len"):
        served(1, 1, closed(2, isl=32768))


def test_a_pool_that_does_not_fit_says_so() -> None:
    big = deploy_on("meta-llama/Llama-3.1-70B-Instruct", "H100", tp=1)
    found: Prediction = evaluate_disaggregated(pool(1), big, closed(4))
    assert found.performance is None and found.memory.remedy


def test_dynamos_version_stands_for_the_engine_that_it_ships() -> None:
    """NVIDIA Dynamo's support matrix: 0.8.1 comes with TensorRT-LLM 1.2.0rc6; SGLang's tables give SGLang's own."""
    assert resolve_dynamo_version("trtllm", "0.8.1.post2") == "1.2.0rc6"
    assert resolve_dynamo_version("TensorRT-LLM", "0.7.0.post2") == "1.2.0rc2"
    pairs = {
        "0.9.1": "rc3",
        "1.1.1": "rc11",
        "1.2.2": "rc14",
        "1.3.1": "rc19",
        "1.4.2": "rc22",
        "1.5.1": "rc25",
    }
    assert {release: resolve_dynamo_version("trtllm", release) for release in pairs} == {
        release: f"1.3.0{candidate}" for release, candidate in pairs.items()
    }
    assert (
        resolve_dynamo_version("trtllm", "1.3.0rc5") == "1.3.0rc5"
        and resolve_dynamo_version("trtllm", "1.2.1") == "1.2.1"
    )
    assert (
        resolve_dynamo_version("trtllm", "1.1.0") == "1.1.0"
        and resolve_dynamo_version("sglang", "0.5.8") == "0.5.8"
    )


def test_the_exchange_of_experts_takes_what_deepep_measured() -> None:
    """DeepEP, docs/legacy.md: 128 tokens a rank on 8 H800 are dispatched in 77 us and combined in 114 us."""
    decode = deploy_on("deepseek-ai/DeepSeek-V3", "H200", dp=8, ep=8, engine="sglang")
    coefficients = get_deployment_coefficients(decode).coefficients
    (exchange,) = (
        c
        for c in estimate_collectives(decode, np.array([128.0]), coefficients)
        if "dispatch" in c.name
    )
    assert 0.5 < exchange.seconds[0] / exchange.count / 191e-6 < 2


RUNS = {  # InferenceX (SemiAnalysis, Apache-2.0), DeepSeek-R1, ms
    "SGLang, wide EP": (
        {"gpu": "GB200", "engine": "sglang", "engine_version": "0.5.8", "quantization": "nvfp4", "isl": "1024",
         "concurrency": "2048", "prefill_workers": "4", "prefill_dp": "4",
         "decode_workers": "1", "decode_dp": "32"}, 1227, 17.0,
    ),
    "TensorRT-LLM, five decode workers": (
        {"gpu": "B200", "engine": "trtllm", "quantization": "nvfp4", "isl": "1024", "concurrency": "45",
         "prefill_workers": "1", "prefill_dp": "4", "decode_workers": "5",
         "decode_tp": "8"}, 249, 7.9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_published_runs_lie_in_their_intervals(name: str) -> None:
    row, ttft, tpot = RUNS[name]
    gpus = {
        side: int(row.get(f"{side}_tp", 1)) * int(row.get(f"{side}_dp", 1))
        for side in ("prefill", "decode")
    }
    experts = {f"{side}_ep": str(count) for side, count in gpus.items()}
    common = {"model": "deepseek-ai/DeepSeek-R1", "osl": "1024", "length_range_ratio": "0.8"}
    answer = predict_row(common | experts | row)
    assert answer["status"] == "ok"
    assert answer["ttft_ms_mean_lo"] < ttft < answer["ttft_ms_mean_hi"]
    assert answer["tpot_ms_mean_lo"] < 1.08 * tpot and tpot < answer["tpot_ms_mean_hi"]
