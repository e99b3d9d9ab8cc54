"""From a `config.json` to a `ModelArchitecture`: the kind of each layer, then its weights.

Families differ by the facts in `catalogs/families.yaml`, layers by a few overridden fields; neither
needs code of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import create_model

from planner.core.catalog import StrictEntry, load_catalog
from planner.core.errors import PlannerError
from planner.models import transformer_blocks as blocks
from planner.models.architecture import (
    DecoderLayer,
    FeedForward,
    ModelArchitecture,
    WeightTensor,
)
from planner.models.config_reader import CONFIG_FIELD_CATALOG, ConfigReader
from planner.models.layer_kinds import LayerKind, classify_layers, look_up_layer_types
from planner.models.mixers import Attention, SequenceMixer
from planner.models.sequence_mixers import MIXER_BUILDERS, build_compressed_attention
from planner.models.vision_encoders import VISION_TOWER_BUILDERS, build_generic_encoder

_FAMILY_FIELD_TYPES: dict[str, Any] = {
    name: (kind | None, None)
    for kind, group in ((int, "sizes"), (int, "others"), (bool, "flags"), (str, "texts"))
    for name in CONFIG_FIELD_CATALOG[group]
}
_FamilyFields = create_model("_FamilyFields", __base__=StrictEntry, **_FAMILY_FIELD_TYPES)
ModelFamily = create_model(
    "ModelFamily",
    __base__=_FamilyFields,
    needs=(tuple[str, ...], ()),
    nested=(tuple[str, ...], ()),
    defaults=(_FamilyFields, _FamilyFields()),
)
"""An entry of `catalogs/families.yaml`, whose head explains every field."""


@cache
def load_model_families() -> dict[str, dict[str, Any]]:
    """Load class facts by `model_type`; `PlannerError` for a field that nothing reads."""
    return {
        name: family.model_dump(exclude_unset=True)
        for name, family in load_catalog("families.yaml", ModelFamily).items()
    }


def parse_hf_config(config: Mapping[str, Any], location: str = "config.json") -> ModelArchitecture:
    """Parse a `config.json` to an architecture, with assumptions in its `warnings`.

    Raises `PlannerError` with the name of a missing or invalid field.
    """
    if not isinstance(config, Mapping):
        raise PlannerError(f"{location}: expected a mapping of fields, got {type(config).__name__}")
    top = _open_config(config, location)
    if top.get_or_default("unplanned") or top.read_bool("is_encoder_decoder"):
        reason = top.read_text_field(
            "unplanned", "encoder-decoder models are not planned for; a decoder-only model would be"
        )
        raise PlannerError(f"{location}, field model_type: {reason}")
    c = top
    for key in ("text_config", "llm_config", "language_config"):
        if text := top.get_nested(key):
            family = f"{top.get_or_default('model_type')}_text"
            if family in load_model_families():
                text = {"model_type": family, **text}
            c = _open_config(text, f"{location}, {key}")
            break
    hidden, vocab = c.read_int("hidden_size"), c.read_int("vocab_size", maximum=2**24)
    tied = (top if "tie_word_embeddings" in top.config else c).read_bool("tie_word_embeddings")
    kinds = classify_layers(c)
    built = {kind: _build_layer(c, hidden, kind) for kind in dict.fromkeys(kinds)}
    attentions = (mixer for layer in built.values() for mixer in layer.attentions)
    towers, mtp_layers = _build_vision_towers(top, hidden), _build_mtp_layers(c, hidden, kinds)
    tables = _build_rotary_tables(c, attentions)
    if unread := () if c.is_known_family else tuple(c.list_unread()):
        c.warnings.append(
            f"{c.location}: {', '.join(unread[:8])} may decide sizes, and nothing here reads them"
        )
    return ModelArchitecture(
        model_type=top.read_text_field("model_type", "unknown"),
        hidden=hidden,
        vocab=vocab,
        max_position=c.read_int("max_position_embeddings", maximum=2**31),
        layers=tuple(built[kind] for kind in kinds),
        embedding_and_head=_build_embedding_and_head(c, hidden, vocab, len(kinds), tied) + tables,
        vision_towers=towers,
        mtp_layers=mtp_layers,
        unread=unread,
        tied=tied,
        classes=tuple(top.read_list("architectures", str) or ()),
        warnings=tuple(dict.fromkeys(top.warnings + c.warnings)),  # last: building adds to them
    )


def _open_config(config: Mapping[str, Any], location: str) -> ConfigReader:
    """Open a configuration with the facts of its family."""
    model_type = config.get("model_type")
    family = load_model_families().get(model_type) if isinstance(model_type, str) else None
    fields = ConfigReader(config, family or {}, location)
    fields.is_known_family = family is not None
    for name in fields.traits.get("nested", ()):
        fields.config = {**fields.config, **(fields.get_nested(name) or {})}
    if family is None:
        note = (
            f"{location}: model_type {model_type!r} is not a known family; planned from its generic"
            " fields"
        )
        fields.warnings.append(note)
    for alternatives in fields.traits.get("needs", ()):
        if all(fields.get_explicit(name) is None for name in alternatives.split("|")):
            missing = alternatives.replace("|", " or ")
            raise PlannerError(
                f"{location}: field {missing} is missing, and a {model_type} model has it"
            )
    if (
        fields.traits.get("vision")
        and fields.get_explicit("vision_config") is None
        and not fields.has_field(_ENCODER_PARAMETERS_FIELD)
    ):
        fields.warnings.append(f"{location} has no vision_config: planned without its vision tower")
    return fields


_ENCODER_PARAMETERS_FIELD = "encoder_parameters"
"""A field of the catalog's own: parameters of encoders that have no builder."""


def _build_layer(c: ConfigReader, hidden: int, kind: LayerKind) -> DecoderLayer:
    """Build a layer of this kind with all its weights."""
    c = c.override(dict(kind.fields)) if kind.fields else c
    mixers: tuple[SequenceMixer, ...] = ()
    ffn: FeedForward | None = None
    weights: tuple[WeightTensor, ...] = ()
    if kind.mixer == "compressed":
        mixers, weights = build_compressed_attention(c, hidden, kind.compress_ratio)
    elif kind.mixer in ("recurrent", "both"):
        name = c.read_text_field("recurrent")
        if name not in MIXER_BUILDERS:
            raise c.make_field_error(
                "model_type",
                "a family whose recurrent layers are known",
                c.get_or_default("model_type"),
            )
        state, weights = MIXER_BUILDERS[name](c, hidden)
        mixers = (state,)
    if kind.mixer in ("full", "sliding", "chunked", "both"):
        is_latent = kind.mixer == "full" and c.get_or_default("kv_lora_rank") is not None
        attention, more = (
            blocks.build_latent_attention(c, hidden, kind.indexer)
            if is_latent
            else blocks.build_attention(c, hidden, kind)
        )
        mixers, weights = (attention, *mixers), weights + more
    if kind.ffn != "none":
        build = blocks.build_moe_block if kind.ffn == "moe" else blocks.build_dense_mlp
        ffn, more = build(c, hidden)
        weights += more
    has_both = kind.mixer != "none" and kind.ffn != "none"
    is_parallel = c.read_bool("parallel_attn") and not c.read_bool("new_decoder_architecture")
    count = c.read_int("norms", 1 + has_both * (not is_parallel) if ffn or mixers else 0, minimum=0)
    moe_norms = c.read_int("moe_norms", 0) if kind.ffn == "moe" else 0
    input_size = c.read_int("hidden_size_per_layer_input", 0, minimum=0)
    # hyper-connections before attention and feed-forward
    streams = c.read_int("hc_mult", 0, minimum=0)
    mixing = (2 + streams) * streams
    connection = WeightTensor("hc", mixing, streams * hidden, part="norm", linear=False,
                              stored_bits=32)  # fmt: skip
    weights = blocks.join_weights([
        weights,
        blocks.build_norms(c, hidden, count + moe_norms),
        *((
            blocks.build_linear("per_layer_input_gate", input_size, hidden, "replicated", "norm"),
            blocks.build_linear("per_layer_projection", hidden, input_size, "replicated", "norm"),
            blocks.build_vector("post_per_layer_input_norm", hidden),
        ) if input_size else ()),
        *(((connection,) * 2, blocks.build_vector("hc.base", 2 * (mixing + 3), bits=32))
          if streams else ()),
    ])  # fmt: skip
    return DecoderLayer(mixers, ffn, weights)


def _build_embedding_and_head(
    c: ConfigReader, hidden: int, vocab: int, layers: int, tied: bool
) -> tuple[WeightTensor, ...]:
    """Build embeddings, final norm and head."""
    positions = None
    if "position_offset" in c.traits:
        positions = c.read_int("max_position_embeddings") + c.read_int(
            "position_offset", 0, minimum=0
        )
    input_size = c.read_int("hidden_size_per_layer_input", 0, minimum=0)
    inputs, streams = layers * input_size, c.read_int("hc_mult", 0, minimum=0)
    return blocks.join_weights([
        (WeightTensor("embed_tokens", vocab, hidden, "vocab", "embedding", linear=False),),
        blocks.build_norms(c, hidden, c.read_int("final_norms", 1, minimum=0)),
        blocks.build_linear("lm_head", vocab, hidden, "vocab", "lm_head",
                            c.read_bool("lm_head_bias", c.read_bool("head_bias")))
        if not tied else (),
        (WeightTensor("embed_positions", positions, hidden, part="embedding", linear=False),)
        if positions else (),
        *((
            (WeightTensor("embed_tokens_per_layer",
                          c.read_int("vocab_size_per_layer_input", vocab, maximum=2**24), inputs,
                          "vocab", "embedding", linear=False),),
            blocks.build_linear("per_layer_model_projection", inputs, hidden, "column",
                                "embedding"),
            blocks.build_vector("per_layer_projection_norm", input_size),
        ) if input_size else ()),
        *((
            (WeightTensor("hc_head", streams, streams * hidden, part="norm", linear=False,
                          stored_bits=32),),
            blocks.build_vector("hc_head.base", streams + 1, bits=32),
        ) if streams else ()),
    ])  # fmt: skip


def _build_rotary_tables(
    c: ConfigReader, attentions: Iterable[Attention]
) -> tuple[WeightTensor, ...]:
    """Build the rotary tables on every GPU: positions by rotary dimension, per kind of layer."""
    if c.read_bool("no_rope"):
        return ()
    parameters = c.get_nested("rope_parameters") or c.get_nested("rope_scaling") or {}
    tables = set()
    for mixer in attentions:
        local = c.read_bool("local_rope") and bool(
            mixer.window and not (mixer.is_latent and mixer.compress)
        )
        rope = parameters.get("sliding_attention" if local else "full_attention", parameters)
        r = ConfigReader(
            rope if isinstance(rope, Mapping) else {}, {}, f"{c.location}, rope_parameters"
        )
        kind, dim = r.read_text_field("rope_type", r.read_text_field("type")), mixer.rotary_dim
        if not mixer.is_latent and kind != "proportional":
            partial = c.read_fraction(
                "partial_rotary_factor", r.read_fraction("partial_rotary_factor", 1)
            )
            dim = c.read_int("rotary_dim", int(dim * partial))
        positions = c.read_int("max_position_embeddings", 0, minimum=0, maximum=2**31)
        if kind == "yarn" and r.get_or_default("original_max_position_embeddings"):
            original = r.read_int("original_max_position_embeddings", maximum=2**31)
            positions = round(original * r.read_fraction("factor", 0, 2**16))
        copies = 4 if r.get_or_default("mrope_section") else 1
        tables.add((positions, dim, copies, local))
    bits = c.read_int("rope_bits", None)
    name = "mrope_once" if c.read_bool("mrope_once") else "mrope"
    return tuple(
        WeightTensor(
            name if copies > 1 else "rope",
            positions,
            dim,
            part="engine",
            copies=copies,
            linear=False,
            stored_bits=bits,
        )
        for positions, dim, copies, _ in sorted(tables)
        if dim
    )


def _build_vision_towers(top: ConfigReader, hidden: int) -> tuple[WeightTensor, ...]:
    """Build the vision tower; warn of an unknown kind and of an audio tower."""
    towers: tuple[WeightTensor, ...] = ()
    if count := top.read_int(_ENCODER_PARAMETERS_FIELD, 0, minimum=0, maximum=2**40):
        return build_generic_encoder(count)
    if top.get_nested("vision_config"):
        kind = top.read_text_field("vision")
        if kind in VISION_TOWER_BUILDERS:
            towers = VISION_TOWER_BUILDERS[kind](top.read_nested("vision_config"), top, hidden)
        else:
            top.warnings.append(
                f"{top.location}: the vision tower is of an unknown kind; its weights are not"
                " counted"
            )
    if top.get_nested("audio_config"):
        top.warnings.append(f"{top.location}: the audio tower's weights are not counted")
    return towers


def _build_mtp_layers(
    c: ConfigReader, hidden: int, kinds: list[LayerKind]
) -> tuple[DecoderLayer, ...]:
    """Build multi-token-prediction layers: decoder layers with a projection and three norms."""
    depth = c.read_int("num_nextn_predict_layers", 0, minimum=0, maximum=64)
    if not depth:
        return ()
    pattern = c.read_list("mtp_hybrid_override_pattern", str) or c.read_list(
        "mtp_layers_block_type", str
    )
    if pattern:
        mtp_kinds = look_up_layer_types(c, "mtp_hybrid_override_pattern", pattern, True)
    else:
        usual = (kind for kind in reversed(kinds) if kind.mixer in ("full", "compressed"))
        last = next(usual, kinds[-1])
        # an MTP layer neither compresses its cache nor shares another layer's indexer
        mtp_kinds = [replace(last, compress_ratio=0, indexer="full" if last.indexer else "")]
    first, *rest = (_build_layer(c, hidden, kind) for kind in mtp_kinds)
    join = blocks.build_linear(
        "mtp.eh_proj", hidden, 2 * hidden, "replicated", "mtp"
    ) + blocks.build_norms(c, hidden, 3)
    return (replace(first, weights=first.weights + join), *rest) * depth
