"""Speculation: Leviathan's formula, published head sizes, measured speed-ups and slow-downs, in the replay too."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.analysis.speculation_tables import (
    sweep_draft_loads,
)
from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT
from planner.core.units import GIB
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.engines.speculation_methods import (
    explain_unsupported_method,
    explain_unsupported_pipeline,
    get_draft_method,
    load_draft_methods,
    resolve_draft_model,
)
from planner.latency.speculative_decoding import (
    evaluate_speculation,
    find_break_even_acceptance,
    infer_acceptance_rate,
)
from planner.latency.step_model import (
    build_speculative_step_models,
    build_step_model,
    build_target_step_model,
    compute_expected_tokens,
    estimate_draft_host_s,
)
from planner.memory.kv_cache import build_kv_layout
from planner.memory.memory_plan import plan_memory
from planner.memory.weights import compute_draft_bytes
from planner.models.registry import load_model
from planner.planning.prediction import evaluate, get_memory_plan
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.tools.lint.deployment_reader import read_speculation
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

TURNS = [round(1.25**n) for n in range(4, 32)]
"""Batches among which speculation stops to pay."""


def llama(gpu: str = "H100", **speculation: object) -> Deployment:
    asked = {"method": "eagle", "num_speculative_tokens": 3, "acceptance_rate": 0.6, **speculation}
    return deploy_on(
        "meta-llama/Llama-3.1-8B",
        gpu,
        max_model_len=8192,
        max_num_seqs=512,
        speculation=SpeculationConfig(**asked),
    )


def replayed(
    served: Deployment, batch: int, prompt: int = 400, output: int = 400, **traffic: object
) -> SimulationResult:
    """`batch` requests in flight, ten times over."""
    asked = {"concurrency": batch, "num_prompts": max(10 * batch, 20), **traffic}
    workload = Workload(
        LengthDistribution.from_uniform(prompt, 0.8),
        LengthDistribution.from_uniform(output, 0.8),
        **asked,
    )
    return simulate_workload(
        served, get_memory_plan(served).pool, build_step_model(served, workload), workload
    )


def replayed_speedup(served: Deployment, batch: int, **lengths: int) -> float:
    """Mean TPOT without / with speculation."""
    without = replayed(replace(served, speculation=None), batch, **lengths)
    return (
        without.summarize("tpot")["mean"]
        / replayed(served, batch, **lengths).summarize("tpot")["mean"]
    )


@given(st.floats(0, 1), st.integers(1, 16))
def test_acceptance_and_length_are_inverse(rate: float, k: int) -> None:
    length = compute_expected_tokens(rate, k)
    assert 1 <= length <= k + 1
    assert compute_expected_tokens(infer_acceptance_rate(length, k), k) == pytest.approx(
        length, abs=1e-6
    )


# https://github.com/vllm-project/vllm/issues/20780 (2025-07): EAGLE on Llama-3.1-8B, batch 1,
# mt-bench, H100 class.
VLLM_EAGLE = [
    (2, 2.10, 1.618),
    (3, 2.29, 1.648),
    (4, 2.39, 1.578),
    (5, 2.43, 1.501),
    (6, 2.45, 1.431),
    (7, 2.47, 1.360),
]


def measured_eagle(k: int, length: float) -> Deployment:
    """On the release of that month."""
    speculation = SpeculationConfig("eagle", k, infer_acceptance_rate(length, k))
    args = {"max_model_len": 8192, "max_num_seqs": 512, "engine_version": "0.9.2"}
    return deploy_on("meta-llama/Llama-3.1-8B", "H100", speculation=speculation, **args)


def test_measured_eagle_on_vllm() -> None:
    predicted = [
        evaluate_speculation(measured_eagle(k, length), 1, 500).speedup.mid
        for k, length, _ in VLLM_EAGLE
    ]
    for (_, _, measured), found in zip(VLLM_EAGLE, predicted, strict=True):
        assert found == pytest.approx(measured, rel=0.12)
    assert (
        predicted.index(max(predicted)) <= 1
    )  # as measured, two or three drafts are best and seven are not


# github.com/sgl-project/SpecForge a6b6b02, docs/spec_bundle (MIT): EAGLE-3 heads under SGLang; GPU
# and tp not stated.
SPECFORGE = [
    ("meta-llama/Llama-3.1-8B", 1, 1, 3, 2.9307, 2.1839),  # mt-bench
    ("meta-llama/Llama-3.1-8B", 1, 1, 7, 1.7743, 1.0885),  # gsm8k: an older head, hardly worth it
    ("Qwen/Qwen3-30B-A3B", 4, 8, 3, 3.4018, 2.0575),  # math500
    ("Qwen/Qwen3-30B-A3B", 4, 8, 7, 5.2930, 2.4753),
    ("Qwen/Qwen3-235B-A22B", 8, 8, 3, 2.3567, 1.3503),  # gsm8k
    ("Qwen/Qwen3-235B-A22B", 8, 8, 5, 4.0215, 2.1514),  # math500
]


@pytest.mark.parametrize(("name", "tp", "batch", "k", "length", "measured"), SPECFORGE)
def test_measured_eagle3_in_the_replay(
    name: str, tp: int, batch: int, k: int, length: float, measured: float
) -> None:
    speculation = SpeculationConfig("eagle3", k, infer_acceptance_rate(length, k))
    served = deploy_on(
        name, "H200", tp=tp, engine="sglang", max_model_len=8192, speculation=speculation
    )
    assert replayed_speedup(served, batch, prompt=500, output=1000) == pytest.approx(
        measured, rel=0.12
    )


def test_reported_slow_downs_at_large_batch() -> None:
    """vLLM blog 2024-10-17: Llama-3-70B, TP4, H100: up to 1.5x and 2.8x at QPS 1, 1.4x and 1.8x SLOWER at high QPS."""
    qwama = load_model({
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    })  # fmt: skip
    for how, draft in (("draft_model", qwama), ("ngram", None)):
        speculation = SpeculationConfig(how, 4, 0.6 if draft else 0.35, draft)
        served = deploy_on(
            "meta-llama/Meta-Llama-3.1-70B",
            "H100",
            tp=4,
            max_model_len=8192,
            speculation=speculation,
        )
        assert evaluate_speculation(served, 1, 1000).verdict == "pays"
        assert evaluate_speculation(served, 256, 1000).verdict == "does not pay"
        assert (
            replayed_speedup(served, 2, prompt=800) > 1 > replayed_speedup(served, 256, prompt=800)
        )


def test_a_head_that_pays_alone_and_costs_when_the_card_is_full() -> None:
    """https://huggingface.co/jbarrow/joecr-chandra-2-eagle3.1: 5 B model, RTX 3090 Ti, vLLM, k = 5, 2.31 tokens a step.

    1.79 times as fast at batch 1, 0.75 times at full batch (taken as 64; the shape is that of a 4 B
    sibling).
    """
    speculation = SpeculationConfig("eagle3.1", 5, infer_acceptance_rate(2.31, 5))
    served = deploy_on(
        "Qwen/Qwen3-VL-4B-Instruct", "RTX-3090", max_model_len=8192, speculation=speculation
    )
    for judged in (
        lambda batch: evaluate_speculation(served, batch, 1000).speedup.mid,
        lambda batch: replayed_speedup(served, batch),
    ):
        assert judged(1) == pytest.approx(1.79, rel=0.12)
        assert judged(64) == pytest.approx(0.75, rel=0.15)  # whose batch is not known so well


# https://github.com/vllm-project/vllm/issues/37551 (2026-03): GLM-OCR's own layer drafts one token,
# A100, vLLM 0.17.1 (config.json: 16 layers of 1536). 1.69 and 1.81 tokens a step, yet 0.56 and 0.70
# times as fast, prompts included.
def test_a_tiny_model_loses_by_drafting() -> None:
    tiny = load_model({
        "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4608,
        "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 59392,
        "max_position_embeddings": 32768,
    })  # fmt: skip
    for length, measured in ((1.69, 0.56), (1.81, 0.70)):
        speculation = SpeculationConfig("mtp", 1, infer_acceptance_rate(length, 1))
        served = deploy_on(
            tiny,
            "A100-SXM-40GB",
            engine_version="0.17.1",
            max_model_len=8192,
            speculation=speculation,
        )
        found = evaluate_speculation(served, 1, 600).speedup
        sigma = math.log(found.hi / found.mid) / Z_SCORE_80PCT
        # most of what is drafted is lost again
        assert found.mid < 0.6 * length and abs(math.log(measured / found.mid)) < 2 * sigma


def test_a_recurrent_layer_writes_a_state_for_every_token() -> None:
    """vLLM keeps 1 + k states per sequence (start-up logs of Qwen3.5); each is written, and one of them read."""
    served = deploy_on(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "H200",
        tp=4,
        speculation=SpeculationConfig("mtp", 3, 0.8),
    )
    plain = build_target_step_model(replace(served, speculation=None))
    verifying = build_speculative_step_models(served, estimate_draft_host_s(served))[1]
    assert verifying.state_s == pytest.approx(2.5 * plain.state_s)


def test_a_four_bit_checkpoint_drafts_in_sixteen_bit() -> None:
    """Qwen3.6-27B's MTP layer, 0.425 B parameters, stays in BF16 (cyankiwi/Qwen3.6-27B-AWQ-INT4, and Qwen3.8's GPTQ).

    On 256 GB/s every drafted token took 14 to 15 ms more (kyuz0/amd-strix-halo-vllm-toolboxes issue
    53, vLLM 0.26): the layer and the head of 248,320 x 5,120, both in 16 bit.
    """
    served = load_model("Qwen/Qwen3.6-27B", quantization="awq")
    draft = resolve_draft_model(served, SpeculationConfig("mtp", 2, 0.8))
    assert draft is not None and draft.quantization.method == "none"
    read = (
        sum(weight.num_elements for layer in draft.architecture.layers for weight in layer.weights)
        * 2
        + 248_320 * 5_120 * 2
    )
    assert 0.8 < read / 256e9 / 14.5e-3 < 1


def test_a_module_of_several_layers_drafts_as_a_whole() -> None:
    """Nemotron-3-Super's MTP module is an attention and an expert layer (its config.json)."""
    draft = resolve_draft_model(
        load_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B"), SpeculationConfig("mtp", 1, 0.8)
    )
    assert draft is not None and len(draft.architecture.layers) == 2


def test_a_mixture_of_experts_pays_most_in_the_middle() -> None:
    """As MoESD (arXiv 2505.19645) finds: at medium batch drafted tokens wake few experts that are not read anyway."""
    served = deploy_on(
        "deepseek-ai/DeepSeek-R1", "H200", tp=8, speculation=SpeculationConfig("mtp", 1, 0.8)
    )
    small, medium, large = (
        evaluate_speculation(served, batch, 500).speedup.mid for batch in (16, 128, 1024)
    )
    assert medium > small and medium > large


CHATS = Workload(
    LengthDistribution.from_uniform(1000, 0.8), LengthDistribution.from_uniform(400, 0.8), rate=3
)


def paying_eagle3() -> tuple[Deployment, float]:
    """Llama 70B on four H100 with EAGLE-3, and up to how many requests/s the chapter draws that it pays."""
    drafted = deploy_on(
        "meta-llama/Llama-3.3-70B-Instruct", "H100-SXM", tp=4, quantization="fp8", max_model_len=8192,
        max_num_seqs=256, speculation=SpeculationConfig("eagle3", 3, 0.62),
    )  # fmt: skip
    swept = sweep_draft_loads(drafted, CHATS)
    return drafted, swept.loc[swept["with"] < swept["without"], "requests/s"].max()


def test_up_to_the_load_that_is_told_drafts_pay_in_the_replay() -> None:
    """Below it the simulated schedule has the shorter TPOT with drafts, above it without."""
    drafted, most = paying_eagle3()

    def replay_tpot_s(served: Deployment, rate: float) -> float:
        workload = replace(CHATS, rate=rate, num_prompts=1500)
        run = simulate_workload(
            served, get_memory_plan(served).pool, build_step_model(served, workload), workload
        )
        return float(run.summarize("tpot")["mean"])

    for share, pays in ((0.5, True), (0.85, True), (1.12, False)):
        with_drafts = replay_tpot_s(drafted, share * most)
        assert (
            with_drafts < replay_tpot_s(replace(drafted, speculation=None), share * most)
        ) == pays


def test_the_draft_head_is_as_large_as_the_published_ones() -> None:
    """yuhuili/EAGLE-LLaMA3-Instruct-8B: 0.25 B parameters; EAGLE3-LLaMA3.1-Instruct-8B, with a 32k head: 0.43 B"""

    def parameters(how: str) -> float:
        return evaluate_speculation(llama(method=how), 1, 100).draft_bytes / 2

    assert parameters("eagle") == pytest.approx(0.25e9, rel=0.15)
    assert parameters("eagle3") == pytest.approx(0.43e9, rel=0.25)
    assert parameters("ngram") == 0


def test_deepseek_mtp_is_one_layer_of_the_model() -> None:
    """arXiv 2412.19437: 14 B parameters of DeepSeek-V3's checkpoint are the MTP module, 11.5 B without shared ends."""
    served = deploy_on(
        "deepseek-ai/DeepSeek-R1", "H200", tp=8, speculation=SpeculationConfig("mtp", 1, 0.8)
    )
    assert served.speculation is not None
    draft = resolve_draft_model(served.model, served.speculation)
    assert draft is not None
    assert sum(
        weight.num_elements for layer in draft.architecture.layers for weight in layer.weights
    ) == pytest.approx(11.5e9, rel=0.02)


@given(st.integers(1, 512), st.integers(1, 8), st.floats(0, 1))
def test_nothing_speeds_up_more_than_it_accepts(batch: int, k: int, rate: float) -> None:
    found = evaluate_speculation(llama(num_speculative_tokens=k, acceptance_rate=rate), batch, 1000)
    assert 0 < found.speedup.mid < found.tokens_per_step <= k + 1
    assert found.verify_s >= found.plain_s


def test_below_capacity_all_that_comes_is_served() -> None:
    """And requests that leave sooner leave a smaller batch behind; an output holds more tokens, and comes later."""
    workload = Workload(
        LengthDistribution.from_constant(500), LengthDistribution.from_constant(300), rate=5.0
    )
    plain, drafted = (
        evaluate(served, workload).performance
        for served in (replace(llama(), speculation=None), llama())
    )
    assert plain is not None and drafted is not None
    for served in (plain, drafted):
        assert (served.request_tps.lo, served.request_tps.mid, served.request_tps.hi) == (5, 5, 5)
    assert (
        drafted.get("tpot", "mean").mid
        < plain.get("tpot", "mean").mid
        < drafted.get("itl", "mean").mid
    )
    assert drafted.decode_batch < plain.decode_batch
    assert drafted.get("itl", "mean").mid / drafted.get("tpot", "mean").mid == pytest.approx(
        compute_expected_tokens(0.6, 3), rel=0.01
    )


def test_break_even_acceptance_is_where_the_speedup_is_one() -> None:
    served = llama()
    rate = find_break_even_acceptance(served, 64, 1000)
    assert rate is not None
    assert served.speculation is not None
    at = replace(served, speculation=replace(served.speculation, acceptance_rate=rate))
    assert evaluate_speculation(at, 64, 1000).speedup.mid == pytest.approx(1, abs=1e-3)


def test_a_draft_costs_sequences() -> None:
    """Its weights leave the pool, and its layer caches every token as each of the target's 32 layers does."""
    served = llama()
    memory = plan_memory(replace(served, speculation=None))
    found = evaluate_speculation(served, 8, 1000, memory)
    assert 0.2 < found.draft_bytes / GIB < 1
    left = (memory.kv_available.mid - found.draft_bytes) / (
        memory.pool.layout.kv_bytes_per_token * 33 / 32
    )
    least = memory.pool.count_sequences(1000) - left / 1000
    assert found.num_sequences_lost is not None
    assert least - 1 < found.num_sequences_lost < 2 * least  # more CUDA graphs take the rest


@pytest.mark.parametrize(
    ("spelled", "known"),
    [("EAGLE-3", "eagle3"), ("eagle3.1", "eagle3"), ("EAGLE2", "eagle"), ("deepseek_mtp", "mtp"), ("NextN", "mtp"),
     ("ngram_gpu", "ngram"), ("draft-model", "draft_model")],
)  # fmt: skip
def test_engines_spell_methods_in_their_own_ways(spelled: str, known: str) -> None:
    assert get_draft_method(spelled) is load_draft_methods()[known]


@pytest.mark.parametrize(
    ("name", "engine_name", "version", "has"),
    # vllm pulls 16937, 12755, 24322, issue 26547; 0.33.0 --spec-method; SGLang 0.5.10
    # --speculative-algorithm
    [
        ("eagle3", "vllm", "0.8.4", False), ("eagle3", "vllm", "0.8.5", True), ("mtp", "vllm", "0.7.2", False),
        ("draft_model", "vllm", "0.9.2", True), ("draft_model", "vllm", "0.11.0", False),
        ("draft_model", "vllm", "0.20.2", True), ("medusa", "vllm", "0.20.2", True),
        ("medusa", "vllm", "0.33.0", False), ("suffix", "sglang", "0.5.10", False),
        ("NEXTN", "sglang", "0.5.10", True), ("ngram", "vllm", "0.8.0", True),
    ],
)  # fmt: skip
def test_methods_by_release(name: str, engine_name: str, version: str, has: bool) -> None:
    reason = explain_unsupported_method(name, get_engine(engine_name, version))
    assert (reason is None) is has
    if not has:
        args = {"engine": engine_name, "engine_version": version, "max_model_len": 4096}
        served = deploy_on(
            "meta-llama/Llama-3.1-8B", "H100", speculation=SpeculationConfig(name, 3, 0.6), **args
        )
        with pytest.raises(PlannerError, match="speculative method"):
            evaluate_speculation(served, 1, 100)


def test_eagle3_runs_over_pipeline_stages_from_vllm_028_on() -> None:
    """vllm pull 50514, merged after 0.26; SGLang does not (issue 39634)."""
    assert explain_unsupported_pipeline("eagle3", get_engine("vllm", "0.28.0")) is None
    for engine, version in (("vllm", "0.26.0"), ("sglang", "0.5.10")):
        assert explain_unsupported_pipeline("eagle3", get_engine(engine, version))
    assert explain_unsupported_pipeline("mtp", get_engine("vllm", "0.28.0"))


def test_bad_input_is_one_clear_sentence() -> None:
    with pytest.raises(PlannerError, match="did you mean eagle3"):
        evaluate_speculation(llama(method="eagel3"), 1, 100)
    with pytest.raises(PlannerError, match="needs the draft model"):
        evaluate_speculation(llama(method="draft_model"), 1, 100)
    with pytest.raises(PlannerError, match="no speculation to judge"):
        evaluate_speculation(replace(llama(), speculation=None), 1, 100)
    with pytest.raises(PlannerError, match="yields 1 to 4 tokens"):
        infer_acceptance_rate(5.0, 3)


def test_gemma_4s_assistants_are_small_and_read_the_targets_cache() -> None:
    """vLLM pull 41745: layers without keys and values; 78.5 million parameters and a 0.93 GB file.

    The method may be called mtp or left out (vLLM pull 42180).
    """
    named = {"num_speculative_tokens": 4, "model": "google/gemma-4-31B-it-assistant"}
    for config in (named, named | {"method": "mtp"}):
        found = read_speculation("vllm", {"speculative_config": config})
        deployment = deploy_on("google/gemma-4-31B-it", "H100", engine_version="0.24.0", tp=2)
        drafted = replace(deployment, speculation=found)
        alone, both = build_kv_layout(deployment), build_kv_layout(drafted)
        assert both.stage_bytes_per_block == alone.stage_bytes_per_block
        assert both.kv_bytes_per_token == alone.kv_bytes_per_token
        single = compute_draft_bytes(deployment.model, found, ParallelLayout())
        assert single == pytest.approx(0.93e9, rel=0.05)
    smallest = load_model("google/gemma-4-E4B-it-assistant").architecture
    assert smallest.params_total == pytest.approx(78.5e6, rel=0.04)
