"""Recurrent mixers with a constant state, and DeepSeek-V4's compressed attention."""

from collections.abc import Callable

from planner.models.architecture import WeightTensor
from planner.models.config_reader import ConfigReader
from planner.models.mixers import CompressedAttention, Compressor, RecurrentMixer, SequenceMixer
from planner.models.transformer_blocks import (
    WeightTensors,
    build_linear,
    build_vector,
    join_weights,
    read_indexer,
)

RECURRENT_PART = "linear_ssm"
DELTA_RULE_PASSES = 3
"""Values that the delta rule's chunked kernels pass on per result, with gates and triangles.

Triton's kernels take as long as 9 passes over queries, keys, values and results, on L40S and RTX
PRO 6000 (AIConfigurator 0.12's tables of Gated DeltaNet under vLLM 0.24, 2026-09).
"""


def _get_state_element_bytes(c: ConfigReader, default: str = "auto") -> int:
    """Return bytes per element of a recurrent state: vLLM uses 16 bit unless configured as FP32."""
    cache_dtype = c.read_text_field("mamba_ssm_cache_dtype", default)
    return 4 if c.read_text_field("mamba_ssm_dtype", cache_dtype) == "float32" else 2


def build_gated_delta(c: ConfigReader, hidden: int) -> tuple[RecurrentMixer, WeightTensors]:
    """Build the gated delta rule of Qwen3-Next and Qwen3.5 (arXiv 2412.06464)."""
    key_heads = c.read_int("linear_num_key_heads")
    value_heads = c.read_int("linear_num_value_heads")
    key_dim, value_dim = c.read_int("linear_key_head_dim"), c.read_int("linear_value_head_dim")
    kernel, values = c.read_int("linear_conv_kernel_dim", 4), value_heads * value_dim
    channels, state = 2 * key_heads * key_dim + values, values * key_dim
    width = _get_state_element_bytes(c)
    mixer = RecurrentMixer(
        "gdn", "gated delta rule", channels, conv_kernel=kernel, state_elements=state,
        state_width=width, has_chosen_width=True, delta_passes=DELTA_RULE_PASSES,
        checkpoint_tokens=64,
    )  # fmt: skip
    return mixer, join_weights([
        build_linear("linear_attn.in_proj_qkv", channels, hidden, "column", RECURRENT_PART),
        build_linear("linear_attn.in_proj_z", values, hidden, "column", RECURRENT_PART),
        build_linear("linear_attn.in_proj_b", value_heads, hidden, "column", RECURRENT_PART),
        build_linear("linear_attn.in_proj_a", value_heads, hidden, "column", RECURRENT_PART),
        build_vector("linear_attn.conv1d", channels * kernel, RECURRENT_PART, "column"),
        build_vector("linear_attn.A_log", value_heads, RECURRENT_PART, "column", bits=32),
        build_vector("linear_attn.dt_bias", value_heads, RECURRENT_PART, "column"),
        build_vector("linear_attn.norm", value_dim, RECURRENT_PART, bits=32),
        build_linear("linear_attn.out_proj", hidden, values, "row", RECURRENT_PART),
    ])  # fmt: skip


def build_kimi_delta(c: ConfigReader, hidden: int) -> tuple[RecurrentMixer, WeightTensors]:
    """Build Kimi Delta Attention (arXiv 2510.26692)."""
    if c.get_nested("linear_attn_config"):  # the first release's form
        linear = c.read_nested("linear_attn_config")
        heads, dim, kernel = (
            linear.read_int(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
    else:
        heads, dim = c.read_int("linear_num_heads"), c.read_int("linear_head_dim")
        kernel = c.read_int("linear_conv_kernel_dim", 4)
    width = heads * dim
    mixer = RecurrentMixer(
        "kda", "Kimi delta attention", 3 * width, conv_kernel=kernel, state_elements=width * dim,
        delta_passes=DELTA_RULE_PASSES,
    )  # fmt: skip
    return mixer, join_weights([
        *(build_linear(f"self_attn.{name}_proj", width, hidden, "column", RECURRENT_PART)
          for name in "qkv"),
        build_vector("self_attn.conv1d", 3 * width * kernel, RECURRENT_PART, "column", bits=32),
        build_linear("self_attn.f_a_proj", dim, hidden, "replicated", RECURRENT_PART),
        build_linear("self_attn.f_b_proj", width, dim, "column", RECURRENT_PART),
        build_vector("self_attn.dt_bias", width, RECURRENT_PART, "column", bits=32),
        build_vector("self_attn.A_log", heads, RECURRENT_PART, "column", bits=32),
        build_linear("self_attn.b_proj", heads, hidden, "column", RECURRENT_PART),
        build_linear("self_attn.g_a_proj", dim, hidden, "replicated", RECURRENT_PART),
        build_linear("self_attn.g_b_proj", width, dim, "column", RECURRENT_PART),
        build_vector("self_attn.o_norm", dim, RECURRENT_PART),
        build_linear("self_attn.o_proj", hidden, width, "row", RECURRENT_PART),
    ])  # fmt: skip


def build_mamba2(c: ConfigReader, hidden: int) -> tuple[RecurrentMixer, WeightTensors]:
    """Build Mamba-2 (arXiv 2405.21060)."""
    heads, state = c.read_int("mamba_num_heads"), c.read_int("ssm_state_size")
    inner = c.read_int("mamba_d_ssm", None) or heads * c.read_int("mamba_head_dim")
    groups, kernel = c.read_int("n_groups", 1), c.read_int("conv_kernel", 4)
    if inner % heads:
        raise c.make_field_error("mamba_d_ssm", f"a multiple of the {heads} heads", inner)
    width = _get_state_element_bytes(c, c.read_text_field("state", "auto"))
    mixer = RecurrentMixer(
        "mamba2", "state space (Mamba-2)", inner, 2 * state, groups, kernel, inner * state, width,
        has_chosen_width=True,
    )  # fmt: skip
    grouped = groups * state
    bias = c.read_bool("mamba_proj_bias", c.read_bool("use_bias"))
    return mixer, join_weights([
        build_linear("mixer.in_proj", 2 * inner + heads, hidden, "column", RECURRENT_PART, bias),
        build_linear("mixer.in_proj_groups", 2 * grouped, hidden, "kv", RECURRENT_PART, bias, 1,
                     groups),
        build_vector("mixer.conv1d", inner * kernel, RECURRENT_PART, "column"),
        (WeightTensor("mixer.conv1d_groups", 2 * grouped * kernel, 1, "kv", RECURRENT_PART,
                      num_shard_units=groups, linear=False),),
        build_vector("mixer.conv1d.bias", inner + 2 * grouped, RECURRENT_PART, "column")
        if c.read_bool("use_conv_bias", True) else (),
        *(build_vector(f"mixer.{name}", heads, RECURRENT_PART, "column", bits=32)
          for name in ("A_log", "D", "dt_bias")),
        build_vector("mixer.norm", inner, RECURRENT_PART, "column")
        if c.read_bool("mamba_rms_norm", True) else (),
        build_linear("mixer.out_proj", hidden, inner, "row", RECURRENT_PART, bias),
    ])  # fmt: skip


def build_mamba1(c: ConfigReader, hidden: int) -> tuple[RecurrentMixer, WeightTensors]:
    """Build Mamba (arXiv 2312.00752), with Jamba's norms if the family has them."""
    inner = c.read_int("mamba_expand", 2) * hidden
    state, kernel = c.read_int("ssm_state_size", 16), c.read_int("conv_kernel", 4)
    rank = (
        -(-hidden // 16)
        if c.get_or_default("time_step_rank", "auto") == "auto"
        else c.read_int("time_step_rank")
    )
    width = _get_state_element_bytes(c)
    mixer = RecurrentMixer(
        "mamba1", "state space (Mamba)", inner, conv_kernel=kernel, state_elements=inner * state,
        state_width=width, has_chosen_width=True,
    )  # fmt: skip
    normed = (("dt", rank), ("b", state), ("c", state)) if c.read_bool("mamba_inner_norms") else ()
    bias = c.read_bool("use_bias")
    return mixer, join_weights([
        build_linear("mamba.in_proj", 2 * inner, hidden, "column", RECURRENT_PART, bias),
        build_vector("mamba.conv1d", inner * kernel, RECURRENT_PART, "column"),
        build_vector("mamba.conv1d.bias", inner, RECURRENT_PART, "column"),
        build_linear("mamba.x_proj", rank + 2 * state, inner, "row", RECURRENT_PART),
        build_linear("mamba.dt_proj", inner, rank, "column", RECURRENT_PART, bias=True),
        (WeightTensor("mamba.A", inner, state, "column", RECURRENT_PART, linear=False,
                      stored_bits=32),),
        build_vector("mamba.D", inner, RECURRENT_PART, "column"),
        *(build_vector(f"mamba.{name}_layernorm", count, RECURRENT_PART) for name, count in normed),
        build_linear("mamba.out_proj", hidden, inner, "row", RECURRENT_PART, bias),
    ])  # fmt: skip


def build_lightning_attention(c: ConfigReader, hidden: int) -> tuple[RecurrentMixer, WeightTensors]:
    """Build the lightning attention of MiniMax-01 and M1 (arXiv 2501.08313)."""
    heads = c.read_int("num_attention_heads", maximum=2**14)
    dim = c.read_int("head_dim", hidden // heads)
    # the state is in the model's dtype
    mixer = RecurrentMixer(
        "lightning", "linear attention", state_elements=heads * dim * dim, state_width=2
    )
    return mixer, join_weights([
        build_linear("self_attn.qkv_proj", 3 * heads * dim, hidden, "column", RECURRENT_PART),
        build_linear("self_attn.output_gate", heads * dim, hidden, "column", RECURRENT_PART),
        build_vector("self_attn.norm", heads * dim, RECURRENT_PART, "column"),
        build_linear("self_attn.out_proj", hidden, heads * dim, "row", RECURRENT_PART),
    ])  # fmt: skip


def build_short_conv(c: ConfigReader, hidden: int) -> tuple[RecurrentMixer, WeightTensors]:
    """Build the gated short convolution of LFM2."""
    kernel, bias = c.read_int("conv_L_cache", 3), c.read_bool("conv_bias")
    mixer = RecurrentMixer("short_conv", "short convolution", hidden, conv_kernel=kernel)
    return mixer, join_weights([
        build_linear("conv.in_proj", 3 * hidden, hidden, "column", RECURRENT_PART, bias),
        build_vector("conv.conv", hidden * kernel, RECURRENT_PART, "column"),
        build_linear("conv.out_proj", hidden, hidden, "row", RECURRENT_PART, bias),
    ])  # fmt: skip


MixerBuilder = Callable[[ConfigReader, int], tuple[SequenceMixer, WeightTensors]]
MIXER_BUILDERS: dict[str, MixerBuilder] = {
    "gdn": build_gated_delta,
    "kda": build_kimi_delta,
    "mamba1": build_mamba1,
    "mamba2": build_mamba2,
    "lightning": build_lightning_attention,
    "short_conv": build_short_conv,
}
"""Builders of families' own mixers, by the name in the field `recurrent` of `catalogs/families.yaml`."""


def build_compressed_attention(
    c: ConfigReader, hidden: int, ratio: int
) -> tuple[tuple[SequenceMixer, ...], WeightTensors]:
    """Build DeepSeek-V4's attention: a sliding window of latents, and one per 4 or 128 tokens.

    The compressor's running sums are a recurrent state in FP32: `ratio` rows of keys and of scores,
    with twice the rows and the width for the overlapping windows of 4.
    """
    heads, dim, rope = (
        c.read_int(name) for name in ("num_attention_heads", "head_dim", "qk_rope_head_dim")
    )
    q_rank = c.read_int("q_lora_rank")
    groups, o_rank = c.read_int("o_groups"), c.read_int("o_lora_rank")
    if ratio not in (0, 4, 128):
        raise c.make_field_error("compress_ratios", "entries among 0, 4 and 128", ratio)
    index_heads, index_dim, selected = read_indexer(c) if ratio == 4 else (0, 0, None)
    window = c.read_int("sliding_window", maximum=2**31)
    mixer = CompressedAttention(
        heads,
        dim - rope,
        dim - rope,
        rope,
        dim,
        index_heads,
        index_dim,
        selected,
        ratio == 4,
        window,
        compress=ratio,
    )
    overlap = 2 if ratio == 4 else 1
    widths = {"compressor": dim, "compressor.indexer": index_dim} if ratio else {}
    state = sum(2 * overlap * ratio * overlap * width for width in widths.values())
    weights = join_weights([
        build_linear("self_attn.q_a_proj", q_rank, hidden, "replicated", "attention"),
        build_vector("self_attn.q_a_norm", q_rank),
        build_linear("self_attn.q_b_proj", heads * dim, q_rank, "column", "attention"),
        build_linear("self_attn.kv_proj", dim, hidden, "replicated", "attention"),
        build_vector("self_attn.kv_norm", dim),
        build_linear("self_attn.o_a_proj", groups * o_rank, heads * dim // groups, "column",
                     "attention"),
        build_linear("self_attn.o_b_proj", hidden, groups * o_rank, "row", "attention"),
        build_vector("self_attn.sinks", heads, "attention", "column", bits=32),
        *((
            WeightTensor(f"self_attn.{name}.kv_proj", overlap * width, hidden, part="indexer",
                         linear=False),
            WeightTensor(f"self_attn.{name}.gate_proj", overlap * width, hidden, part="indexer",
                         linear=False),
            WeightTensor(f"self_attn.{name}.position_bias", ratio, overlap * width, part="indexer",
                         linear=False, stored_bits=32),
            *build_vector(f"self_attn.{name}.kv_norm", width, "indexer"),
        ) for name, width in widths.items() if width),
        *((
            build_linear("self_attn.indexer.wq_b", index_heads * index_dim, q_rank, "replicated",
                         "indexer"),
            (WeightTensor("self_attn.indexer.weights_proj", index_heads, hidden, part="indexer",
                          linear=False),),
        ) if ratio == 4 else ()),
    ])  # fmt: skip
    compressor = (Compressor("compressor", state_elements=state),) if state else ()
    return (mixer, *compressor), weights
