"""Architectures read from config.json against published counts, and names resolved to models."""

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.core.catalog import validate_entry
from planner.core.errors import PlannerError
from planner.core.readers import read_yaml
from planner.memory.kv_cache import count_caches, sum_cache_bytes
from planner.models.hf_config import ModelFamily
from planner.models.mixers import GroupedQueryAttention, LatentAttention, RecurrentMixer
from planner.models.registry import _load_model_catalog, list_models, load_model

PUBLISHED = read_yaml(Path(__file__).parent / "data" / "published_models.yaml")


@pytest.mark.parametrize(("name", "total"), PUBLISHED["parameters"].items())
def test_parameters_are_the_published_ones(name: str, total: int) -> None:
    assert load_model(name).architecture.params_total == total


@pytest.mark.parametrize(("name", "held"), PUBLISHED["caches"].items())
def test_caches_are_the_engines(name: str, held: list[float]) -> None:
    assert (
        list(sum_cache_bytes(count_caches(load_model(name).architecture.layers, 1, "auto"))) == held
    )


@pytest.mark.parametrize("name", PUBLISHED["configs"])
def test_a_family_is_read_from_its_config_alone(name: str) -> None:
    told = PUBLISHED["configs"][name]
    served = load_model(told["config"])
    held = sum_cache_bytes(count_caches(served.architecture.layers, 1, "auto"))
    assert (served.architecture.params_total, list(held)) == (told["total"], told["caches"])
    assert served.warnings == ()


@pytest.mark.parametrize("name", PUBLISHED["unread"])
def test_what_an_unknown_family_says_beyond_its_generic_fields_is_named(name: str) -> None:
    told = PUBLISHED["unread"][name]
    served = load_model(told["config"])
    assert set(served.architecture.unread) >= set(told["fields"])
    assert bool(served.architecture.unread) == bool(told["fields"])
    assert all(field in " ".join(served.warnings) for field in told["fields"])


@pytest.mark.parametrize(("name", "billions"), PUBLISHED["active"].items())
def test_active_parameters(name: str, billions: float) -> None:
    assert load_model(name).architecture.params_active / 1e9 == pytest.approx(billions, abs=0.06)


def test_deepseek_v3_with_routing_biases_and_its_mtp_layer() -> None:
    """671,026,419,200 stored elements, and 11.6 B more in the MTP layer (deepseek-ai/DeepSeek-V3 README)."""
    a = load_model("deepseek-ai/DeepSeek-V3").architecture
    assert a.params_stored == 671_026_419_200
    assert sum(
        weight.num_elements for layer in a.mtp_layers for weight in layer.weights
    ) / 1e9 == pytest.approx(11.6, abs=0.05)


def test_mtp_layers_of_other_families() -> None:
    """What checkpoints store beyond the decoder: zai-org/GLM-5.2, Qwen3.5-27B, DeepSeek-V4-Flash, Nemotron-3-Super."""
    sizes = {"zai-org/GLM-5.2": 9.953, "Qwen/Qwen3.5-27B": 0.4247, "deepseek-ai/DeepSeek-V4-Flash": 6.610,
             "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B": 2.942}  # fmt: skip
    for name, billions in sizes.items():
        assert sum(
            weight.num_elements
            for layer in load_model(name).architecture.mtp_layers
            for weight in layer.weights
        ) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_layers_are_of_their_kind() -> None:
    kinds = {
        "Qwen/Qwen3.5-27B": {"gdn": 48, "attention": 16},
        "deepseek-ai/DeepSeek-V2-Lite": {"latent": 27},
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2": {"mamba2": 27, "attention": 4, "none": 25},
        "nvidia/Llama-3_3-Nemotron-Super-49B-v1": {"attention": 49, "none": 31},
        "meta-llama/Llama-4-Scout-17B-16E-Instruct": {"chunked": 36, "attention": 12},
        "google/gemma-2-27b-it": {"window": 23, "attention": 23},
    }
    for name, expected in kinds.items():
        found: dict[str, int] = {}
        for layer in load_model(name).architecture.layers:
            kind = "none"
            if isinstance(layer.mixer, GroupedQueryAttention):
                kind = (
                    "chunked"
                    if layer.mixer.chunked
                    else "window"
                    if layer.mixer.window
                    else "attention"
                )
            elif isinstance(layer.mixer, LatentAttention):
                kind = "latent"
            elif isinstance(layer.mixer, RecurrentMixer):
                kind = layer.mixer.kind
            found[kind] = found.get(kind, 0) + 1
        assert found == expected, name


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", "none"),
        ("qwen3 32b", "Qwen/Qwen3-32B", "none"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "meta-llama/Meta-Llama-3.1-8B-Instruct", "fp8"),
        ("Qwen/Qwen3-14B-AWQ", "Qwen/Qwen3-14B", "awq"),
        ("Qwen/Qwen2.5-14B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-14B-Instruct", "gptq"),
        ("RedHatAI/Mistral-7B-Instruct-v0.3-quantized.w4a16", "mistralai/Mistral-7B-Instruct-v0.3",
         "compressed-tensors"),
        ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B", "fp8_block"),
        ("nvidia/DeepSeek-R1-0528-NVFP4", "deepseek-ai/DeepSeek-R1-0528", "nvfp4"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Meta-Llama-3.1-8B-Instruct", "bitsandbytes"),
    ],
)  # fmt: skip
def test_variants_resolve_to_base_and_format(name: str, base: str, method: str) -> None:
    found = load_model(name)
    assert found.architecture is load_model(base).architecture
    assert found.quantization.method == method
    if method != "none":
        assert base in found.warnings[-1]


def test_unknown_names_say_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.models.hub.check_hub_reachable", lambda: False)
    with pytest.raises(PlannerError, match=r"did you mean .*Llama-3\.1-8B"):
        load_model("meta-lama/Llama-3.1-9B")


def test_a_format_no_engine_here_loads_is_refused() -> None:
    with pytest.raises(PlannerError, match="gguf"):
        load_model("google/gemma-3-27b-it-qat-q4_0-gguf")


def test_a_configuration_of_ones_own_is_served_under_its_folders_name(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "bad.json").write_text(json.dumps(TINY | {"hidden_size": "?"}))
    assert load_model(tmp_path / "config.json").name == load_model(tmp_path).name == str(tmp_path)
    with pytest.raises(PlannerError, match=r"^bad\.json.*hidden_size"):
        load_model(tmp_path / "bad.json")
    with pytest.raises(PlannerError, match=r"none\.json': there is no such file"):
        load_model(tmp_path / "none.json")


def test_a_hub_cache_is_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert load_model("someone/tiny").architecture.hidden == TINY["hidden_size"]


TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(PlannerError, match=field):
        load_model({key: value for key, value in TINY.items() if key != field})


def test_an_unknown_family_is_planned_with_a_warning() -> None:
    assert "not a known family" in load_model(TINY | {"model_type": "llama9"}).warnings[0]


def test_a_null_rank_is_not_the_class_default() -> None:
    """DeepSeek-V2-Lite states q_lora_rank: null; the class default of 1536 would add 42.5 M parameters."""
    config = _config("deepseek-ai/DeepSeek-V2-Lite")
    assert config["q_lora_rank"] is None
    assumed = {key: value for key, value in config.items() if key != "q_lora_rank"}
    assert any("q_lora_rank" in warning for warning in load_model(assumed).warnings)


def _config(name: str) -> dict[str, Any]:
    return copy.deepcopy(_load_model_catalog()[0][name].config)


def _places(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from _places(value)


def test_mutated_configurations_are_refused_or_planned_never_a_traceback() -> None:
    """500 mutations of real configurations: a sentence, or finite figures."""
    rng = random.Random(20261121)
    names = [name for name in list_models() if _load_model_catalog()[0][name].base is None]
    refused = 0
    for _ in range(500):
        config = _config(rng.choice(names))
        place, key = rng.choice(list(_places(config)))
        wrong: list[Any] = [None, -7, 0, 10**18, 1.5, math.nan, "banana", True, [1, "x"], {"a": 1}]
        if (value := rng.choice([*wrong, KeyError])) is KeyError:
            del place[key]
        else:
            place[key] = value
        try:
            a = load_model(config).architecture
        except PlannerError as error:
            refused += 1
            assert "config.json" in str(error) or "rope" in str(error), str(error)
        else:
            figures = (
                a.params_total,
                a.params_active,
                *sum_cache_bytes(count_caches(a.layers, 1, "auto")),
            )
            assert all(math.isfinite(figure) and figure >= 0 for figure in figures)
    assert refused > 250


@pytest.mark.parametrize(
    "fact", [{"qk_nrom": "head"}, {"defaults": {"head_dimm": 128}}, {"norms": "two"}]
)
def test_a_misspelt_fact_of_a_family_is_refused(fact: dict[str, object]) -> None:
    with pytest.raises(PlannerError, match=r"families\.yaml, entry new, field"):
        validate_entry(ModelFamily, fact, "families.yaml, entry new")


def test_modules_that_gptq_leaves_in_16_bit_keep_their_size() -> None:
    """GPTQModel's `dynamic` and AutoRound's `extra_config` say which (vLLM pulls 7086 and 25455).

    Qwen's Qwen3.5-27B-GPTQ-Int4 packs the MLPs alone (onnxruntime/mobius pull 18).
    """
    dense = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
             "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "max_position_embeddings": 8192}  # fmt: skip
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    rules: list[dict[str, Any]] = [{"dynamic": {"-:.*attn.*": {}}}, {"modules_to_not_convert": ["self_attn"]},
                                   {"extra_config": {".*attn.*": {"bits": 16}}}]  # fmt: skip
    for rule in rules:
        model = load_model({**dense, "quantization_config": packed | rule})
        formats = {
            weight.name: model.quantization.get_weight_format(weight, "layers.0.")
            for weight in model.architecture.layers[0].weights
        }
        assert formats["self_attn.q_proj"] is None
        assert formats["mlp.down_proj"] is not None
    hybrid = load_model("Qwen/Qwen3.5-27B-GPTQ-Int4")
    assert hybrid.quantization.schemes[0][0] != ""
