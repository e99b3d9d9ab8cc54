"""What cannot start is refused with its reason, by plan, lint and predict alike."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from planner.core.catalog import CATALOG_DIR, load_catalog
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine
from planner.engines.layout import ParallelLayout
from planner.engines.model_support import (
    ModelRegistry,
    judge_model_support,
    list_model_classes,
    load_model_classes,
)
from planner.hardware.gpus import get_gpu
from planner.memory.deployment_changes import list_changes
from planner.models.registry import list_models, load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.parallelism.start_gate import explain_refused_model, explain_refused_start
from planner.planning.plan import Plan
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments
from planner.tools.batch import predict_row
from planner.tools.lint.report import lint

REGISTRIES = load_catalog("registries.yaml", ModelRegistry)
COMMANDS = {
    "vllm": "vllm serve {}",
    "sglang": "python -m sglang.launch_server --model-path {}",
    "trtllm": "trtllm-serve {}",
}
BEFORE_SUPPORT = [
    # model, engine, a release without it, the first one read that has it; by the registries of the wheels
    ("openai/gpt-oss-20b", "vllm", "0.8.5", "0.10.1"),
    ("openai/gpt-oss-120b", "vllm", "0.10.0", "0.10.1"),
    ("Qwen/Qwen3.5-9B", "vllm", "0.11.0", "0.17.1"),
    ("deepseek-ai/DeepSeek-V3.2", "vllm", "0.9.0", "0.11.0"),
    ("google/gemma-4-31B", "vllm", "0.11.0", "0.19.1"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "vllm", "0.10.1", "0.10.2"),
    ("Qwen/Qwen3-8B", "vllm", "0.7.3", "0.8.5"),
    ("zai-org/GLM-4.5-Air", "vllm", "0.9.2", "0.10.0"),
    ("moonshotai/Kimi-K2.5", "vllm", "0.14.1", "0.15.1"),
    ("zai-org/GLM-5", "vllm", "0.15.1", "0.16.0"),
    ("deepseek-ai/DeepSeek-V4-Flash", "vllm", "0.19.1", "0.20.2"),
    ("openai/gpt-oss-20b", "sglang", "0.4.9", "0.5.2"),
    ("google/gemma-4-31B", "sglang", "0.5.10", "0.5.11"),
    ("zai-org/GLM-5", "sglang", "0.5.8", "0.5.9"),
    ("deepseek-ai/DeepSeek-V4-Flash", "sglang", "0.5.11", "0.5.12"),
]
IMPOSSIBLE_FORMATS = [
    # model, GPU, engine, release, the compute capability that it needs, by get_min_capability and docs
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "V100-SXM-32GB", "vllm", "0.12.0", "8.0"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "V100-SXM-32GB", "vllm", "0.16.0", "7.5"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "T4", "vllm", "0.12.0", "8.0"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "RTX-2080-Ti", "vllm", "0.10.0", "8.0"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "T4", "sglang", "0.5.10", "8.0"),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "A100-SXM-80GB", "trtllm", "1.2.0", "8.9"),
    ("Qwen/Qwen2.5-7B-Instruct-AWQ", "V100-SXM-32GB", "vllm", "0.12.0", "7.5"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "T4", "vllm", "0.12.0", "8.0"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "V100-SXM-32GB", "vllm", "0.16.0", "7.5"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "V100-SXM-32GB", "vllm", "0.12.0", "7.5"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "B200", "vllm", "0.20.2", "7.5 to 9.9"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "RTX-PRO-6000", "vllm", "0.33.0", "7.5 to 9.9"),
    ("openai/gpt-oss-20b", "T4", "vllm", "0.33.0", "8.0"),
    ("openai/gpt-oss-20b", "V100-SXM-32GB", "vllm", "0.12.0", "8.0"),
    ("openai/gpt-oss-20b", "Quadro-RTX-8000", "vllm", "0.20.2", "8.0"),
    ("openai/gpt-oss-20b", "A100-SXM-80GB", "trtllm", "1.2.0", "9.0"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "V100-SXM-32GB", "vllm", "0.12.0", "8.0"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "T4", "vllm", "0.12.0", "8.0"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "A100-SXM-80GB", "vllm", "0.8.5", "10.0"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "H100-SXM", "sglang", "0.5.9", "10.0"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "H100-SXM", "trtllm", "1.2.0", "10.0"),
    ("deepseek-ai/DeepSeek-V3.2", "A100-SXM-80GB", "vllm", "0.20.2", "9.x and 10.x"),
    ("deepseek-ai/DeepSeek-V3.2", "RTX-PRO-6000", "vllm", "0.20.2", "9.x and 10.x"),
    ("zai-org/GLM-5", "A100-SXM-80GB", "vllm", "0.33.0", "9.x and 10.x"),
    ("zai-org/GLM-5", "L40S", "sglang", "0.5.23", "9.x and 10.x and 12.x"),
    ("deepseek-ai/DeepSeek-V4-Flash", "A100-SXM-80GB", "vllm", "0.26.0", "9.x and 10.x and 12.x"),
]  # fmt: skip


def list_catalog_pairs() -> list[tuple[str, str, str, str]]:
    """List a catalog model of each class and the last release read without it: (model, engine, release, first)."""
    models: dict[tuple[str, ...], str] = {}
    for name in list_models():
        models.setdefault(list_model_classes(load_model(name)), name)
    return [
        (models[classes], engine, str(before), str(first))
        for engine, registry in REGISTRIES.items()
        for classes in models
        if classes and classes[0] in registry.spans
        for before, first, _ in [registry.spans[classes[0]]]
        if before and all(name not in registry.spans for name in classes[1:])
    ]


CATALOG_PAIRS = list_catalog_pairs()


def ask(model: str, gpu: str, engine: str, release: str, **changes: Any) -> dict[str, Any]:
    """Build a small question about a model on one kind of GPU."""
    return {
        "model": model, "quantization": ["checkpoint"], "engine": engine, "engine_version": release,
        "gpus": [{"gpu": gpu, "at_most": 16}],
        "workload": {"rate": 0.1, "prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100}},
        "service_level": {"ttft": {"p95": 20000}}, **changes,
    }  # fmt: skip


def search(question: dict[str, Any]) -> Plan:
    return search_deployments(parse_scenario(question, "gate"))


def check_all_surfaces(model: str, gpu: str, engine: str, release: str, reason: str) -> None:
    """Check that nothing recommends it and that all state the reason."""
    plan = search(ask(model, gpu, engine, release))
    assert plan.best is None and not plan.candidates
    assert reason in plan.binding_constraint.sentence
    command = COMMANDS[engine].format(model)
    linted = lint(command, release, engine=engine, gpu=gpu)
    assert linted.verdict == "mend" and reason in str(linted)
    row = {"model": model, "gpu": gpu, "engine": engine, "engine_version": release}
    answer = predict_row({**row, "isl": "500", "osl": "100", "concurrency": "1"})
    assert answer["status"] == "error" and reason in answer["error"]


@pytest.mark.parametrize(("model", "engine", "release", "first"), BEFORE_SUPPORT)
def test_models_before_their_support_are_refused_everywhere(
    model: str, engine: str, release: str, first: str
) -> None:
    check_all_surfaces(model, "H200", engine, release, f"supported since {first}")


@pytest.mark.parametrize(("model", "gpu", "engine", "release", "needed"), IMPOSSIBLE_FORMATS)
def test_impossible_formats_are_refused_everywhere(
    model: str, gpu: str, engine: str, release: str, needed: str
) -> None:
    check_all_surfaces(model, gpu, engine, release, f"needs {needed}")


@pytest.mark.parametrize(("model", "engine", "release", "first"), CATALOG_PAIRS)
def test_catalog_models_before_their_support_are_refused(
    model: str, engine: str, release: str, first: str
) -> None:
    """Commands are refused without a GPU too; the release that is named does start it."""
    check_all_surfaces(model, "H200", engine, release, f"supported since {first}")
    assert first in str(lint(COMMANDS[engine].format(model), release, engine=engine))
    assert judge_model_support(load_model(model), get_engine(engine, first)).state == "known"


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen2.5-14B-Instruct-AWQ", "TheBloke/Llama-2-13B-chat-AWQ"]
)
def test_groups_of_awq_have_to_divide(model: str) -> None:
    """13,824 inputs: eight ranks get 13.5 groups of 128 each, four get 27 (awq.py, create_weights)."""
    deployment = deploy_on(model, "H100", tp=8, engine_version="0.12.0")
    assert "1728" in str(explain_refused_start(deployment))
    assert "1728" in str(lint(f"vllm serve {model} -tp 8", "0.12.0"))
    assert not explain_refused_start(deploy_on(model, "H100", tp=4, engine_version="0.12.0"))
    plan = search(ask(model, "H100-SXM", "vllm", "0.12.0"))
    assert plan.candidates
    assert all(each.deployment.layout.tp < 8 for each in plan.candidates)
    fixed = search(ask(model, "H100-SXM", "vllm", "0.12.0", layout={"tp": 8}))
    assert fixed.best is None and "1728" in fixed.binding_constraint.sentence


@pytest.mark.parametrize(
    ("model", "tp", "legal"),
    [
        # intermediate size padded to 29,696 for this: 3,712 a rank are 29 groups of 128
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", 8, True),
        # 14 heads of 64: seven on a rank are 448 inputs
        ("Qwen/Qwen2.5-0.5B-Instruct-AWQ", 2, False),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", 8, True),
    ],
)
def test_published_awq_checkpoints(model: str, tp: int, legal: bool) -> None:
    assert (explain_illegal_layout(load_model(model), ParallelLayout(tp=tp), 8) is None) == legal


def test_bitsandbytes_has_no_groups_to_cut() -> None:
    model = load_model("meta-llama/Llama-2-13b-hf", quantization="bitsandbytes")
    assert explain_illegal_layout(model, ParallelLayout(tp=8), 8) is None


def test_models_that_left_are_refused() -> None:
    """vLLM 0.24 ends with: MiniMaxM1ForCausalLM was supported in vLLM until v0.23.0."""
    model = load_model("MiniMaxAI/MiniMax-M1-80k")
    assert judge_model_support(model, get_engine("vllm", "0.23.0")).state == "known"
    gone = judge_model_support(model, get_engine("vllm", "0.24.0"))
    assert (gone.state, "0.23.0" in gone.sentence) == ("refused", True)


def test_what_is_not_known_is_said_and_not_refused() -> None:
    """0.19.0 lies between a release without Gemma 4 and one with it; no registry has Solar Open."""
    between = ask("google/gemma-4-31B", "H100-SXM", "vllm", "0.19.0")
    plan = search(between)
    assert plan.chosen and any("not recorded: 0.18.1 does not, 0.19.1" in n for n in plan.notes)
    support = judge_model_support(load_model("upstage/Solar-Open-100B"), get_engine())
    assert support.state == "unknown" and "not known" in support.sentence
    assert lint("vllm serve google/gemma-4-31B", "0.19.0").verdict == "ok"


def test_another_class_is_taken_at_its_word() -> None:
    command = "vllm serve HuggingFaceTB/SmolLM3-3B"
    assert lint(command, "0.10.0").verdict == "mend"
    assert lint(f"{command} --model-impl transformers", "0.10.0").verdict == "ok"


def test_a_config_states_its_own_class(tmp_path: Path) -> None:
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100, "max_position_embeddings": 128,
    }  # fmt: skip
    assert judge_model_support(load_model(config), get_engine("vllm", "0.9.0")).state == "refused"


def test_classes_of_model_types_are_in_a_registry() -> None:
    known = {name for registry in REGISTRIES.values() for name in registry.spans}
    unknown = {
        name for names in load_model_classes().values() for name in names if name not in known
    }
    assert unknown == {"SolarOpenForCausalLM"}


def list_measured() -> list[tuple[Deployment, str]]:
    """List the measured runs as deployments of one rank: they all started."""
    with (CATALOG_DIR / "validation" / "measured_runs.csv").open() as file:
        rows = {
            tuple(row[k] for k in ("model", "gpu", "engine", "engine_version", "quantization"))
            for row in csv.DictReader(file)
        }
    return [
        (deploy_on(load_model(model, quantization=form or None), get_gpu(gpu), engine=engine,
                   engine_version=release), release)
        for model, gpu, engine, release, form in sorted(rows)
    ]  # fmt: skip


def test_no_format_or_attention_that_was_measured_is_refused() -> None:
    """Models may be served before their release, by images of their makers; nothing else may be refused."""
    refused = {
        reason
        for deployment, _ in list_measured()
        if (reason := explain_refused_model(deployment.model, deployment.gpu, deployment.engine))
    }
    assert {r for r in refused if "does not know" not in r} == {
        "vllm supports B300 from 0.14.0 on, not yet in 0.10.2"
    }
    early = {r.split(" does not know ")[0] for r in refused if "does not know" in r}
    assert early <= {"sglang 0.5.8", "sglang 0.5.10", "vllm 0.23.0"}


def test_remedies_propose_no_format_that_the_gpu_refuses() -> None:
    """FP8 and AWQ weights need compute capability 7.5 at least; a V100 has 7.0."""
    for gpu, expected in (("V100-SXM-32GB", []), ("A100-SXM-80GB", ["fp8", "awq"])):
        deployment = deploy_on("meta-llama/Llama-3.1-70B", gpu, engine_version="0.12.0")
        assert [c.value for c in list_changes(deployment)["quantization"]] == expected


def test_the_search_proposes_nothing_that_the_gate_refuses() -> None:
    """Of four generations and three formats: no FP8 on Volta and Turing, no AWQ on Volta (vLLM 0.12.0)."""
    gpus = [
        {"gpu": name, "at_most": 8} for name in ("V100-SXM-32GB", "T4", "A100-SXM-80GB", "B200")
    ]
    formats = ["checkpoint", "fp8", "awq", "int8"]
    question = ask("meta-llama/Llama-2-13b-hf", "T4", "vllm", "0.12.0", gpus=gpus)
    plan = search({**question, "quantization": formats})
    deployments = [each.deployment for each in plan.candidates]
    assert deployments and not any(map(explain_refused_start, deployments))
    seen = {(d.gpu.name, d.model.quantization.method) for d in deployments}
    refused = {("V100-SXM-32GB", "fp8"), ("T4", "fp8"), ("V100-SXM-32GB", "awq"), ("B200", "int8")}
    assert not seen & refused
    assert {
        ("V100-SXM-32GB", "none"),
        ("T4", "awq"),
        ("A100-SXM-80GB", "fp8"),
        ("B200", "fp8"),
    } <= seen
    said = {each.reason for each in plan.rejected}
    assert any("does not run fp8 weights on V100-SXM-32GB" in reason for reason in said)


def test_a_format_that_the_command_asks_for_is_judged_by_the_same_rule() -> None:
    linted = lint(
        "vllm serve meta-llama/Llama-3.1-8B --quantization fp8", "0.12.0", gpu="V100-SXM-32GB"
    )
    assert linted.verdict == "mend" and "needs 8.0" in str(linted)
    assert lint(
        "vllm serve meta-llama/Llama-3.1-8B --quantization fp8", "0.12.0", gpu="A100-SXM-80GB"
    ).verdict != "mend"  # fmt: skip


@pytest.mark.parametrize(
    ("model", "draft", "more", "version", "starts"),
    [
        # vocabularies of the models' config.json: 32,768 and 151,936; 152,064 and 151,936; 151,936 both
        ("mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen3-0.6B", {}, "0.20.2", False),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", {}, "0.33.0", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", {}, "0.20.2", True),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", {"use_heterogeneous_vocab": True}, "0.26.0", True),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", {"use_heterogeneous_vocab": True}, "0.25.0", False),
    ],
)  # fmt: skip
def test_a_draft_has_the_vocabulary_of_its_target(
    model: str, draft: str, more: dict[str, bool], version: str, starts: bool
) -> None:
    config = json.dumps({"model": draft, "num_speculative_tokens": 3, **more})
    report = lint(f"vllm serve {model} --speculative-config '{config}'", version, gpu="H100")
    assert (report.verdict != "mend") is starts


@pytest.mark.parametrize("length", ["auto", "-1"])
def test_a_length_that_is_left_open_is_the_one_that_fits(length: str) -> None:
    line = f"vllm serve Qwen/Qwen2.5-14B-Instruct-1M --max-model-len {length}"
    (one,) = lint(line, "0.20.2", gpu="L40S").commands
    assert one.plan and one.plan.memory.can_start
    assert 40_000 < (one.plan.capped_length or 0) < 70_000


def test_a_layout_that_the_shell_computes_is_not_judged() -> None:
    line = "TP=$(nvidia-smi -L | wc -l); vllm serve meta-llama/Llama-3.3-70B-Instruct -tp $TP"
    report = lint(line, gpu="8xA100-80GB")
    assert report.verdict == "at_risk" and report.commands[0].plan is None


def test_below_compute_capability_8_vllm_0_8_is_judged_as_its_old_engine() -> None:
    line = "vllm serve Qwen/Qwen2.5-7B-Instruct --dtype half --swap-space 4"
    useless = {
        one.name
        for one in lint(line, "0.8.5", gpu="A100-80GB").findings
        if one.verdict == "useless"
    }
    old = lint(line, "0.8.5", gpu="RTX-2080-Ti-22GB")
    assert useless == {"--swap-space"}
    assert not useless & {one.name for one in old.findings if one.verdict == "useless"}
    assert "engine V0" in str(old)
