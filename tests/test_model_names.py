"""The model asked for is the model planned: its name, its own facts, its format, its configuration as it is found."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError, find_near_names
from planner.core.readers import read_yaml
from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.engines.layout import ParallelLayout
from planner.latency.step_work import count_step_work
from planner.memory.weights import compute_weight_bytes
from planner.models.mixers import GroupedQueryAttention, LatentAttention
from planner.models.quantization import WEIGHT_FORMATS, matches_stored_format
from planner.models.registry import Model, list_model_names, load_model
from planner.planning.scenario import load_scenario

PUBLISHED = read_yaml(Path(__file__).parent / "data" / "published_models.yaml")


def stored_gib(served: Model) -> float:
    """What the checkpoint holds: without what only an engine makes room for."""
    alone = ParallelLayout()
    layers = zip(served.layer_prefixes, served.architecture.layers, strict=True)
    held = [(weight, prefix) for prefix, layer in layers for weight in layer.weights]
    held += [
        (weight, "")
        for weight in (*served.architecture.embedding_and_head, *served.architecture.vision_towers)
    ]
    return (
        sum(
            compute_weight_bytes(served, weight, alone, at)
            for weight, at in held
            if weight.part != "engine"
        )
        / GIB
    )


def facts(served: Model) -> tuple[Any, ...]:
    """Everything of a model that a plan rests on."""
    a = served.architecture
    kinds = tuple(
        (layer.mixer, layer.mlp, sum(weight.num_elements for weight in layer.weights), times)
        for layer, times in a.distinct_layers.items()
    )
    return (a.max_position, a.vocab, a.params_total, kinds, served.quantization, served.dtype)


@pytest.mark.parametrize("name", list_model_names())
def test_every_known_name_is_kept_and_means_one_model(name: str) -> None:
    served = load_model(name)
    assert served.name == name
    assert served.warnings == ()
    assert served.architecture.max_position >= 2048
    for spelling in (name.lower(), name.split("/")[-1], name.replace("-", "_").upper()):
        again = load_model(spelling)
        assert again.name == spelling
        assert facts(again) == facts(served), spelling


def test_no_two_entries_claim_one_name() -> None:
    folded = [re.sub(r"[-_\s]", "", name.casefold()) for name in list_model_names()]
    assert len(set(folded)) == len(folded) >= 400


def test_the_size_in_a_name_is_the_models() -> None:
    # what a token passes through, of one expert, or of the target
    active = ("Llama-4", "Mixtral", "OLMoE", "-assistant")
    for name in list_model_names():
        size = re.search(r"-(\d+(?:\.\d+)?)([BM])(?=-|$)", name.split("/")[-1], re.IGNORECASE)
        if size and not any(word in name for word in active):
            told = float(size[1]) * (1e9 if size[2] in "bB" else 1e6)
            assert load_model(name).architecture.params_total == pytest.approx(
                told, rel=0.25, abs=1e9
            ), name


@pytest.mark.parametrize(("name", "total"), PUBLISHED["totals"].items())
def test_parameters_are_the_published_total(name: str, total: int) -> None:
    a = load_model(name).architecture
    counted = a.params_stored + sum(
        weight.num_elements for layer in a.mtp_layers for weight in layer.weights
    )
    assert min(abs(a.params_total - total), abs(counted - total)) <= 1e-6 * total


@pytest.mark.parametrize(("name", "context"), PUBLISHED["contexts"].items())
def test_a_derived_model_has_its_own_context_length(name: str, context: int) -> None:
    assert load_model(name).architecture.max_position == context


@pytest.mark.parametrize(("name", "gib"), PUBLISHED["checkpoints"].items())
def test_a_checkpoint_weighs_what_is_published(name: str, gib: float) -> None:
    assert stored_gib(load_model(name)) == pytest.approx(gib, rel=0.01)


def test_an_alias_is_not_the_entry_that_it_shares_shapes_with() -> None:
    for name in (
        "meta-llama/Llama-3.1-70B-Instruct",
        "deepseek-ai/DeepSeek-R1",
        "unsloth/Qwen3-8B-bnb-4bit",
    ):
        assert str(deploy_on(name, "H200", tp=8)).startswith(f"{name} on")


def test_what_a_name_alone_says_is_said_to_be_inferred() -> None:
    inferred = load_model("someone/Qwen2.5-14B-Instruct-FP8-dynamic")
    assert (
        "not in the catalog; planned as Qwen/Qwen2.5-14B-Instruct with fp8" in inferred.warnings[-1]
    )
    assert inferred.architecture.max_position == 32_768
    assert "read as Qwen/Qwen3-32B" in load_model("qwen3 32b").warnings[-1]


@pytest.mark.parametrize(
    "name",
    ["deepseek-ai/DeepSeek-V9", "mistralai/Mistral-7B-v0.9", "x/Llama-3.1-8B-EAGLE3", "x/Qwen3-8B-Embedding",
     "x/Qwen3-8B-VL"],
)  # fmt: skip
def test_another_model_with_a_similar_name_is_not_given_a_shape(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)
    with pytest.raises(PlannerError, match="unknown model"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("moonshotai/Kimi-K2-Thinking", "nvfp4"), ("deepseek-ai/DeepSeek-R1", "awq"), ("openai/gpt-oss-120b", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int8"), ("nvidia/Qwen3-32B-NVFP4", "mxfp4"),
        ("deepseek-ai/DeepSeek-V3", "bf16"),
    ],
)  # fmt: skip
def test_a_format_that_contradicts_the_checkpoint_is_refused(name: str, wanted: str) -> None:
    with pytest.raises(
        PlannerError, match=rf"^{name} is stored in .*{wanted} would be another checkpoint"
    ):
        load_model(name, quantization=wanted)


def test_beside_the_checkpoints_own_format_what_it_cannot_take_is_left_out() -> None:
    """The same list of formats, the template's, serves every model of a comparison."""
    asked = {"model": "openai/gpt-oss-20b", "quantization": ["checkpoint", "fp8"]}
    found = load_scenario("chat-70b", asked)
    assert found.quantizations == (None,)
    (told,) = [text for text in found.assumptions if "left out" in text]
    assert "fp8" in told and "stored in mxfp4" in told
    assert load_scenario("chat-70b", {"quantization": ["checkpoint", "fp8"]}).quantizations == (
        None, "fp8",
    )  # fmt: skip
    for formats, why in ((["fp8"], "would be another checkpoint"), (["checkpoint", "f8p"], "f8p")):
        with pytest.raises(PlannerError, match=why):
            load_scenario("chat-70b", {**asked, "quantization": formats})


def test_a_published_checkpoint_in_that_format_is_planned_under_its_own_name() -> None:
    found = load_model("moonshotai/Kimi-K2.5", quantization="nvfp4")
    assert found.name == "nvidia/Kimi-K2.5-NVFP4"
    assert facts(found) == facts(load_model("nvidia/Kimi-K2.5-NVFP4"))
    assert "moonshotai/Kimi-K2.5 is stored in compressed-tensors" in found.warnings[-1]
    assert load_model("Qwen/Qwen3-32B-FP8", quantization="bf16").name == "Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("deepseek-ai/DeepSeek-V3", "fp8"), ("deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4_fp8"),
        ("moonshotai/Kimi-K2.5", "int4"), ("moonshotai/Kimi-K2.5", "compressed-tensors"), ("openai/gpt-oss-20b", "fp4"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "w4a16"), ("nvidia/Qwen3-32B-NVFP4", "modelopt_fp4"),
        ("openai/gpt-oss-20b", "auto"), ("meta-llama/Llama-3.1-8B", "auto"),
    ],
)  # fmt: skip
def test_the_format_that_a_checkpoint_has_may_be_named(name: str, wanted: str) -> None:
    assert load_model(name, quantization=wanted).quantization == load_model(name).quantization


@pytest.mark.parametrize("wanted", WEIGHT_FORMATS)
def test_a_format_is_never_ignored(wanted: str) -> None:
    for name in list_model_names():
        try:
            found = load_model(name, quantization=wanted)
        except PlannerError as error:
            assert f"quantization {wanted} would be another checkpoint" in str(error)
        else:
            assert matches_stored_format(wanted, found.quantization), name
            weights = [weight for layer in found.architecture.layers for weight in layer.weights]
            assert any(found.quantization.get_weight_format(weight) for weight in weights), name


LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "vocab_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip
MOE = LLAMA | {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 1024}  # fmt: skip


def test_a_name_that_says_a_format_and_a_configuration_that_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": None}))
    silent = load_model(folder)
    assert silent.quantization.method == "nvfp4"  # the other file was not copied with it
    assert "says nvfp4, and its configuration states no quantization" in silent.warnings[-1]
    assert load_model(folder, quantization="nvfp4").warnings == ()
    stated = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))
    assert (load_model(folder).quantization.method, load_model(folder).warnings) == ("nvfp4", ())


def test_a_group_without_targets_means_every_linear_layer() -> None:
    """Qwen3-32B-FP8-Static-PerTensor: ModelOpt wrote neither targets nor a mapping for the cache."""
    group = {
        "weights": {"num_bits": 8, "type": "float"},
        "input_activations": {"num_bits": 8, "type": "float"},
    }
    for targets in ({}, {"targets": None}):
        stated = {
            "config_groups": {"group_0": group | targets},
            "ignore": ["lm_head"],
            "kv_cache_scheme": "FP8",
        }
        found = load_model(LLAMA | {"quantization_config": stated}).quantization
        assert (found.method, found.kv_cache_dtype) == ("fp8", "fp8")


def test_a_format_for_every_layer() -> None:
    """MiniMax-M3-NVFP4: MXFP8 attention and NVFP4 experts, named w1, w2, w3 and one by one."""
    layers = {f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w{part}": {"quant_algo": "NVFP4"}
              for layer in range(2) for expert in range(8) for part in (1, 2, 3)}  # fmt: skip
    layers |= {f"model.layers.{layer}.self_attn.{part}_proj": {"quant_algo": "MXFP8"} for layer in range(2)
               for part in "qkvo"}  # fmt: skip
    stated = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    served = load_model(MOE | {"quantization_config": stated})
    methods = {weight.name: served.quantization.get_weight_format(weight, "layers.1.")
               for weight in served.architecture.layers[1].weights}  # fmt: skip
    assert (
        methods["mlp.experts.up_proj"] is WEIGHT_FORMATS["nvfp4"]
        and methods["mlp.experts.down_proj"] is WEIGHT_FORMATS["nvfp4"]
    )
    assert methods["self_attn.o_proj"] is WEIGHT_FORMATS["mxfp8"] and methods["mlp.gate"] is None
    assert (
        load_model(MOE | {"quantization_config": stated}, quantization="nvfp4").quantization
        == served.quantization
    )


def test_minimax_m3_attends_to_selected_blocks() -> None:
    """16 blocks of 128 tokens a query (its technical report, arXiv 2606.13392), in 57 of 60 layers."""
    mixers = [layer.mixer for layer in load_model("MiniMaxAI/MiniMax-M3").architecture.layers]
    selected = [
        mixer.selected_tokens for mixer in mixers if isinstance(mixer, GroupedQueryAttention)
    ]
    assert selected == [None] * 3 + [2048] * 57


SPARSE_MODELS = ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash", "zai-org/GLM-5.2")


@pytest.mark.parametrize("name", SPARSE_MODELS)
def test_every_field_of_sparse_attention_changes_what_a_step_does(name) -> None:
    """Twice the indexer's heads, its width, what it selects or the window is other work."""

    def count(config: Mapping[str, Any]) -> Any:
        return count_step_work(deploy_on(load_model(config), "B200", tp=8))

    config = read_yaml(CATALOG_DIR / "models.yaml")[name]["config"]
    before = count(config)
    for field in {"index_n_heads", "index_head_dim", "index_topk", "sliding_window"} & set(config):
        assert count({**config, field: 2 * config[field]}) != before, field


def test_deepseek_v4_attends_to_its_window_what_it_selects_and_all_of_the_coarse_latents() -> None:
    """V4-Pro: 128 tokens, 1,024 latents of 4 tokens each, or every latent of 128 tokens (its config.json)."""
    mixers = {
        mixer.compress: mixer
        for layer in load_model("deepseek-ai/DeepSeek-V4-Pro").architecture.layers
        for mixer in layer.mixers
        if isinstance(mixer, LatentAttention)
    }
    assert mixers[4].spans == ((128, 1), (4096, 1 / 4))
    assert mixers[128].spans == ((128, 1), (None, 1 / 128))
    assert mixers[4].index_bytes == 33  # vLLM's indexer cache: 128 bytes and a scale per latent


def test_cross_attention_is_refused_rather_than_planned_as_self_attention() -> None:
    with pytest.raises(
        PlannerError, match=r"cross-attention layers \(Llama 3\.2 Vision\) are not planned for"
    ):
        load_model(
            {"model_type": "mllama", "text_config": LLAMA | {"model_type": "mllama_text_model"}}
        )


def test_fields_with_one_value_a_layer() -> None:
    """Hunyuan-A13B states experts per token, widths and shared experts as lists of 32."""
    catalog = load_model("tencent/Hunyuan-A13B-Instruct").architecture
    config = {"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128167,
              "tie_word_embeddings": True,
              "max_position_embeddings": 32768, "num_experts": 64, "num_experts_per_tok": [8] * 32,
              "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32}  # fmt: skip
    assert load_model(config).architecture.params_by_part == catalog.params_by_part
    with pytest.raises(PlannerError, match="num_experts_per_tok"):
        load_model(config | {"num_experts_per_tok": [8] * 31})


def test_exclusions_name_modules_as_the_checkpoint_does() -> None:
    """In Gemma 4 `layers.N.mlp` is beside the experts, in Qwen3 it holds them; Nemotron-H calls every block mixer."""
    ignored = {"quant_method": "modelopt", "quant_algo": "NVFP4",
               "ignore": ["lm_head", *(f"model.language_model.layers.{n}.mlp*" for n in range(2))]}  # fmt: skip
    text = LLAMA | {"model_type": "gemma4_text", "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 1024,
                    "head_dim": 128, "sliding_window": 512}  # fmt: skip
    for config, kept in (({"model_type": "gemma4", "text_config": text}, False), (MOE, True)):
        served = load_model(config | {"quantization_config": ignored})
        weights = served.architecture.layers[1].weights
        routed = next(weight for weight in weights if weight.part == "routed_experts")
        assert (served.quantization.get_weight_format(routed, "layers.1.") is None) is kept
        beside = [weight for weight in weights if weight.part == "shared_experts"]
        assert all(
            served.quantization.get_weight_format(weight, "layers.1.") is None for weight in beside
        )
    nemotron = load_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4")
    attention = nemotron.architecture.layers[5].weights[0]
    assert (
        attention.name == "self_attn.q_proj"
        and nemotron.quantization.get_weight_format(attention, "layers.5.") is None
    )


def test_a_family_is_suggested_by_its_words():
    """No model is called "llama 4", and four are of that family."""
    near = find_near_names("llama 4", list_model_names())
    assert len(near) == 4 and all("Llama-4" in name for name in near)
    with pytest.raises(PlannerError, match=r"did you mean meta-llama/Llama-4-"):
        load_model("llama 4")
    assert find_near_names("zzz", list_model_names()) == ()
