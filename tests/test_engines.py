"""What engine versions do by default, as read from their sources or run."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.core.catalog import validate_entry
from planner.core.errors import PlannerError
from planner.core.versions import Version
from planner.engines.deployment import deploy_on
from planner.engines.engine import (
    EngineFacts,
    explain_unsupported_gpu,
    get_engine,
)
from planner.engines.engine_args import EngineArgs, list_cudagraph_sizes, resolve_engine_args
from planner.engines.metric_names import get_metric_names
from planner.hardware.gpus import get_gpu
from planner.models.registry import Model
from planner.simulator.simulation import uses_v033_scheduler
from planner.tools.lint.findings import OptionChange


def served(max_position: int = 131072, hybrid: bool = False, dtype: str = "bfloat16") -> Model:
    """A stand-in with the four fields that defaults depend on."""
    shape = SimpleNamespace(max_position=max_position, is_hybrid=hybrid)
    return cast(Model, SimpleNamespace(name="some/model", dtype=dtype, architecture=shape))


def defaults(version: str, card: str, **given: Any) -> EngineArgs:
    return resolve_engine_args(given, get_engine("vllm", version), get_gpu(card), served())


@pytest.mark.parametrize(
    ("version", "card", "tokens", "seqs"),
    [
        ("0.20.2", "A100 80GB", 2048, 256),  # vLLM's own code run on these devices
        ("0.20.2", "L4", 2048, 256),
        ("0.20.2", "L40S", 2048, 256),
        ("0.20.2", "H100", 8192, 1024),
        ("0.20.2", "H200", 8192, 1024),
        ("0.20.2", "B200", 8192, 1024),
        ("0.33.0", "A100 80GB", 2048, 256),
        ("0.33.0", "H100", 8192, 1024),
        ("0.33.0", "B200", 16384, 1024),
        ("0.33.0", "MI300X", 16384, 1024),
        ("0.33.0", "GB10", 2048, 256),
        ("0.19.0", "H100", 8192, 1024),  # 28 start-ups of llm-d-planner
        ("0.8.5", "A100 80GB", 8192, 1024),  # between vllm pulls 17073 and 17885
        ("0.8.0", "L4", 2048, 1024),  # before vllm pull 16158
    ],
)
def test_default_batch_limits(version: str, card: str, tokens: int, seqs: int) -> None:
    args = defaults(version, card)
    assert (args.max_num_batched_tokens, args.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("version", "share"), [("0.8.5", 0.90), ("0.19.0", 0.90), ("0.20.2", 0.92), ("0.33.0", 0.92)]
)
def test_default_utilization(version: str, share: float) -> None:
    assert defaults(version, "H100").gpu_memory_utilization == share


@pytest.mark.parametrize(
    ("version", "card", "given", "mib"),
    [  # SGLang's server_args.py of each release, at nvidia-smi's 143,771 and 183,359 MiB
        ("0.5.3", "H200", {}, 512 + 1.5 * 8192 + 2 * 256 + 128),
        ("0.5.12", "H200", {}, 512 + 1.5 * 8192 + 2 * 256 + 128 + 8 * 58),
        ("0.5.12", "H200", {"tp": 8}, 512 + 1.5 * 8192 + 2 * 512 + 1024 + 8 * 58),
        ("0.5.12", "B200", {"max_num_batched_tokens": 4096}, 10 * 1024),
    ],
)
def test_sglangs_share_of_memory(version: str, card: str, given: dict, mib: float) -> None:
    found = deploy_on("meta-llama/Llama-3.1-8B", card, engine="sglang", engine_version=version,
                      **given)  # fmt: skip
    total = {"H200": 143_771, "B200": 183_359}[card]
    assert found.args.gpu_memory_utilization == pytest.approx(1 - mib / total, abs=0.002)


def test_copies_of_sglangs_attention_share_limits_and_reserve_more() -> None:
    """GLM-5.2 FP8 on eight H200, 0.5.14: 26 sequences of 9,228 tokens decode where measured, 33 to 45
    GiB are reserved."""
    found = deploy_on("zai-org/GLM-5.2-FP8", "H200", dp=8, ep=8, engine="sglang",
                      engine_version="0.5.14")  # fmt: skip
    reserved = 512 + 1.5 * 8192 + 2 * 512 + 1024 + 4.5 * 8 * 512
    assert found.args.gpu_memory_utilization == pytest.approx(1 - reserved / 143_771, abs=0.002)
    assert found.args.max_num_batched_tokens == 8192 // 8
    flash = deploy_on("deepseek-ai/DeepSeek-V4-Flash", "B200", dp=4, ep=4, engine="sglang")
    assert flash.args.max_num_seqs == 256 // 4  # arg_groups/deepseek_v4_hook.py


@pytest.mark.parametrize(("version", "cached"), [("0.27.1", False), ("0.28.0", True)])
def test_prefix_caching_of_hybrids(version: str, cached: bool) -> None:
    args = resolve_engine_args(
        {}, get_engine("vllm", version), get_gpu("H100"), served(hybrid=True)
    )
    assert args.enable_prefix_caching is cached
    assert defaults(version, "H100").enable_prefix_caching is True


@pytest.mark.parametrize(
    ("version", "card", "given", "k", "count", "largest"),
    [
        ("0.20.2", "H100", {}, 0, 51, 512),  # vLLM's own code run on these
        ("0.33.0", "H100", {}, 0, 51, 512),
        ("0.20.2", "H100", {"max_num_seqs": 64}, 0, 19, 128),
        ("0.33.0", "B200", {}, 0, 83, 1024),
        ("0.19.0", "H100", {}, 0, 51, 512),  # logged by llm-d-planner's runs
        ("0.10.2", "H100", {}, 0, 67, 512),  # logged "67 PIECEWISE"
        ("0.20.0", "RTX 5090", {"max_num_seqs": 2}, 0, 3, 4),  # logged [1, 2, 4]
        ("0.20.2", "H100", {"max_num_seqs": 16}, 3, 19, 128),
        ("0.20.2", "H100", {"enforce_eager": True}, 0, 0, 0),
        ("0.20.2", "H100", {"max_num_batched_tokens": 100, "max_num_seqs": 100}, 0, 15, 96),
    ],
)
def test_cudagraph_sizes(
    version: str, card: str, given: dict[str, Any], k: int, count: int, largest: int
) -> None:
    sizes = list_cudagraph_sizes(
        get_engine("vllm", version), defaults(version, card, **given), get_gpu(card), k
    )
    assert (len(sizes), max(sizes, default=0)) == (count, largest)


@pytest.mark.parametrize("card", ["T4", "RTX 2080 Ti"])
@pytest.mark.parametrize(
    ("version", "runs"), [("0.23.0", True), ("0.24.0", False), ("0.33.0", False)]
)
def test_turing_refuses_an_fp8_kv_cache_from_0_24_on(card: str, version: str, runs: bool) -> None:
    """Vllm issue 47549: the backend that was left asks for compute capability 8 and up."""
    assert defaults(version, card, kv_cache_dtype="auto").kv_cache_dtype == "auto"
    assert defaults(version, "A10G", kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    if runs:
        assert defaults(version, card, kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    else:
        with pytest.raises(
            PlannerError,
            match=r"kv_cache_dtype fp8 does not run on .*compute capability 7\.5.*use auto",
        ):
            defaults(version, card, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("version", "package"),
    [("0.27.1", None), ("0.28.0", "vllm-bnb-plugin"), ("0.33.0", "vllm-bnb-plugin")],
)
def test_bitsandbytes_left_the_tree_at_0_28(version: str, package: str | None) -> None:
    assert get_engine("vllm", version).facts.plugins.get("bitsandbytes") == package
    assert get_engine("vllm", version).facts.plugins.get("awq") is None


def test_the_newest_known_releases() -> None:
    assert get_engine("vllm").version == "0.33.0"
    assert (
        get_engine("sglang").version == "0.5.23"
        and get_engine("sglang", "0.5.23").substitution_note == ""
    )
    assert (
        get_engine("trtllm", "1.2.1").substitution_note == ""
        and str(get_engine("trtllm", "1.3.0rc25").facts_version) == "1.3.0"
    )
    assert (
        "mxfp8" in get_engine("sglang").facts.kv_cache_dtypes
    )  # declared by 0.5.23, not by 0.5.10
    assert "mxfp8" not in get_engine("sglang", "0.5.10").facts.kv_cache_dtypes


def test_tensorrt_llm_reuses_blocks_by_default() -> None:
    assert get_engine("trtllm").facts.prefix_caching is True


def test_no_default_exceeds_what_the_model_can_use() -> None:
    args = resolve_engine_args(
        {"max_num_seqs": 4},
        get_engine("vllm", "0.20.2"),
        get_gpu("H100"),
        served(max_position=1024),
    )
    assert args.max_num_batched_tokens == 4 * 1024
    assert defaults("0.20.2", "H100", max_num_batched_tokens=512).max_num_seqs == 512
    assert defaults("0.20.2", "L4", enable_chunked_prefill=False).max_num_batched_tokens == 131072


def test_gpus_without_bfloat16_get_float16() -> None:
    assert defaults("0.19.0", "T4").dtype == "float16"
    with pytest.raises(PlannerError, match="bfloat16 does not run on T4"):
        defaults("0.19.0", "T4", dtype="bfloat16")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_batched_tokens": 128, "max_num_seqs": 256}, "greater than or equal to max_num_seqs"),
        ({"max_num_batched_tokens": 4096, "enable_chunked_prefill": False}, "smaller than max_model_len"),
        ({"max_model_len": 200_000}, "more than the 131072 tokens"),
        ({"gpu_memory_utilization": 92.0}, "at most 1"),
        ({"max_num_seqs": 0}, "it must be 1 to 1,048,576"),
        ({"max_num_seqs": 2**31, "max_num_batched_tokens": 2**31}, "it must be 1 to 1,048,576"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype 'fp9' is none of auto"),
        ({"max_loras": 2, "max_lora_rank": 48}, "max_lora_rank 48 is none of"),
        ({"scheduling_policy": "lifo"}, "neither fcfs nor priority"),
    ],
)  # fmt: skip
def test_refuses_what_the_engine_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(message)):
        defaults("0.20.2", "H100", **given)


@pytest.mark.parametrize(
    ("version", "facts"),
    [
        ("0.8", "0.8.0"),
        ("0.15.2rc1.dev93", "0.14.0"),
        ("v0.19.0", "0.18.0"),
        ("0.13.0rc2.dev112+g763963aa7.d20251213", "0.12.0"),
        ("0.20.2+cu130", "0.20.2"),
        ("0.25.1", "0.25.0"),
        ("0.27.1", "0.26.0"),
        ("0.33.0", "0.33.0"),
    ],
)
def test_versions_in_between_use_the_nearest_earlier_facts(version: str, facts: str) -> None:
    known = get_engine("vllm", version)
    assert str(known.facts_version) == facts
    exact = Version.parse(version) == Version.parse(facts)
    assert (known.substitution_note == "") is exact
    assert facts in known.substitution_note or exact


def test_a_nightly_build_is_the_newest_known() -> None:
    nightly, newest = get_engine("vllm", "nightly-5b8c30d62b754b57"), get_engine("vllm")
    assert nightly.release == newest.release and nightly.facts == newest.facts
    assert (
        nightly.substitution_note
        == f"vllm nightly-5b8c30d62b754b57 is planned with the facts of {newest.facts_version}"
    )


def test_versions_outside_are_refused() -> None:
    newest = get_engine("vllm").version
    major, minor = Version.parse(newest).series
    for outside in ("0.4.2", f"{major}.{minor + 1}.0"):
        with pytest.raises(PlannerError, match=f"accepted: 0.5.0 to {newest}"):
            get_engine("vllm", outside)
    with pytest.raises(PlannerError, match=r"write it like 0\.20\.2"):
        get_engine("vllm", "newest")


@pytest.mark.parametrize(
    ("version", "recent"),
    [
        ("0.20.2rc1", False),
        ("0.21.0.dev12+gabc", False),
        ("0.33.0rc2", True),
        ("nightly-5b8c30d62b754b57", True),
    ],
)
def test_builds_between_releases_schedule_as_their_release(version: str, recent: bool) -> None:
    assert uses_v033_scheduler(version) is recent


def test_unknown_engine() -> None:
    with pytest.raises(PlannerError, match="unknown engine 'vlm'; did you mean vllm"):
        get_engine("vlm")
    assert get_engine("TensorRT-LLM").name == "trtllm"


def test_metric_names_follow_the_version() -> None:
    assert (
        get_metric_names(get_engine("vllm", "0.8.5")).names["kv_usage"]
        == "vllm:gpu_cache_usage_perc"
    )
    for version in ("0.20.2", "0.33.0"):  # read from the running engines
        metrics = get_metric_names(get_engine("vllm", version)).names
        assert metrics["kv_usage"] == "vllm:kv_cache_usage_perc"
        assert metrics["itl"] == "vllm:inter_token_latency_seconds"
        assert metrics["tpot"] == "vllm:request_time_per_output_token_seconds"


def test_support_begins_and_ends() -> None:
    assert explain_unsupported_gpu(get_gpu("V100"), get_engine("vllm", "0.19.1")) is None
    assert "up to 0.19" in (
        explain_unsupported_gpu(get_gpu("V100"), get_engine("vllm", "0.20.2")) or ""
    )  # CUDA 13 wheels lack sm_70
    assert "from 0.9.0 on" in (
        explain_unsupported_gpu(get_gpu("B200"), get_engine("vllm", "0.8.5")) or ""
    )
    assert "does not support" in (
        explain_unsupported_gpu(get_gpu("MI300X"), get_engine("trtllm")) or ""
    )
    assert explain_unsupported_gpu(get_gpu("MI300X"), get_engine("sglang")) is None


def test_versions_compare_by_their_numbers_and_print_as_written() -> None:
    texts = ("0.20.2+cu130", "v0.9.0", "1.3.0rc25", "0.20", "0.10.1.dev7")
    ordered = sorted(map(Version.parse, texts))
    assert list(map(str, ordered)) == ["v0.9.0", "0.10.1.dev7", "0.20", "0.20.2+cu130", "1.3.0rc25"]
    assert Version.parse("1.3.0rc25") == Version(1, 3) and str(Version(1, 3)) == "1.3.0"
    assert Version.parse("0.20.2").series == Version(0, 20).series
    with pytest.raises(PlannerError, match="'nightly' is not a version"):
        Version.parse("nightly")


def test_a_catalog_entry_with_a_wrong_version_or_fact_is_named() -> None:
    change = {"old_from": "soon"}
    with pytest.raises(PlannerError, match=r"changes\.yaml, field old_from: .* is not a version"):
        validate_entry(OptionChange, change, "changes.yaml")
    facts = get_engine("vllm").facts.model_dump(mode="json") | {"upto": "0.33.0", "port": "here"}
    with pytest.raises(PlannerError, match=r"engines\.yaml, entry vllm, field port: "):
        validate_entry(EngineFacts, facts, "engines.yaml, entry vllm")
