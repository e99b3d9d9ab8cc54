"""Mixers other than plain attention: recurrent ones with a constant state, and DeepSeek-V4's compressed attention."""

from collections.abc import Callable

from planner.models.architecture import LatentAttention, Recurrent, Weight
from planner.models.attention_and_mlp import Weights, concat, matrix, vector
from planner.models.config_fields import Fields

PART = "linear_ssm"


def _state_width(c: Fields, default: str = "auto") -> int:
    """Bytes of a recurrent state element: vLLM keeps it in the model's dtype unless the configuration says FP32."""
    return 4 if c.text("mamba_ssm_dtype", c.text("mamba_ssm_cache_dtype", default)) == "float32" else 2


def gated_delta(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Gated delta rule of Qwen3-Next and Qwen3.5 (arXiv 2412.06464)."""
    key_heads, value_heads = c.whole("linear_num_key_heads"), c.whole("linear_num_value_heads")
    key_dim, value_dim = c.whole("linear_key_head_dim"), c.whole("linear_value_head_dim")
    kernel, values = c.whole("linear_conv_kernel_dim", 4), value_heads * value_dim
    channels, state = 2 * key_heads * key_dim + values, values * key_dim
    width = _state_width(c)
    mixer = Recurrent("gdn", value_heads, channels, conv_kernel=kernel, state_elements=state, state_width=width)
    return mixer, concat([
        matrix("linear_attn.in_proj_qkv", channels, hidden, "column", PART),
        matrix("linear_attn.in_proj_z", values, hidden, "column", PART),
        matrix("linear_attn.in_proj_b", value_heads, hidden, "column", PART),
        matrix("linear_attn.in_proj_a", value_heads, hidden, "column", PART),
        vector("linear_attn.conv1d", channels * kernel, PART, "column"),
        vector("linear_attn.A_log", value_heads, PART, "column", bits=32),
        vector("linear_attn.dt_bias", value_heads, PART, "column"),
        vector("linear_attn.norm", value_dim, PART, bits=32),
        matrix("linear_attn.out_proj", hidden, values, "row", PART),
    ])  # fmt: skip


def kimi_delta(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Kimi Delta Attention (arXiv 2510.26692)."""
    if c.sub("linear_attn_config"):  # the first release's form
        linear = c.part("linear_attn_config")
        heads, dim, kernel = (linear.whole(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    else:
        heads, dim = c.whole("linear_num_heads"), c.whole("linear_head_dim")
        kernel = c.whole("linear_conv_kernel_dim", 4)
    width = heads * dim
    mixer = Recurrent("kda", heads, 3 * width, conv_kernel=kernel, state_elements=width * dim)
    return mixer, concat([
        *(matrix(f"self_attn.{name}_proj", width, hidden, "column", PART) for name in "qkv"),
        vector("self_attn.conv1d", 3 * width * kernel, PART, "column", bits=32),
        matrix("self_attn.f_a_proj", dim, hidden, "replicated", PART),
        matrix("self_attn.f_b_proj", width, dim, "column", PART),
        vector("self_attn.dt_bias", width, PART, "column", bits=32),
        vector("self_attn.A_log", heads, PART, "column", bits=32),
        matrix("self_attn.b_proj", heads, hidden, "column", PART),
        matrix("self_attn.g_a_proj", dim, hidden, "replicated", PART),
        matrix("self_attn.g_b_proj", width, dim, "column", PART),
        vector("self_attn.o_norm", dim, PART),
        matrix("self_attn.o_proj", hidden, width, "row", PART),
    ])  # fmt: skip


def mamba2(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Mamba-2 (arXiv 2405.21060)."""
    heads, state = c.whole("mamba_num_heads"), c.whole("ssm_state_size")
    inner = c.whole("mamba_d_ssm", None) or heads * c.whole("mamba_head_dim")
    groups, kernel = c.whole("n_groups", 1), c.whole("conv_kernel", 4)
    if inner % heads:
        raise c.refuse("mamba_d_ssm", f"a multiple of the {heads} heads", inner)
    width = _state_width(c, c.text("state", "auto"))
    mixer = Recurrent("mamba2", heads, inner, 2 * state, groups, kernel, inner * state, width)
    grouped = groups * state
    bias = c.flag("mamba_proj_bias", c.flag("use_bias"))
    return mixer, concat([
        matrix("mixer.in_proj", 2 * inner + heads, hidden, "column", PART, bias),
        matrix("mixer.in_proj_groups", 2 * grouped, hidden, "kv", PART, bias, 1, groups),
        vector("mixer.conv1d", inner * kernel, PART, "column"),
        (Weight("mixer.conv1d_groups", 2 * grouped * kernel, 1, "kv", PART, units=groups, linear=False),),
        *([vector("mixer.conv1d.bias", inner + 2 * grouped, PART, "column")] if c.flag("use_conv_bias", True) else []),
        *(vector(f"mixer.{name}", heads, PART, "column", bits=32) for name in ("A_log", "D", "dt_bias")),
        *([vector("mixer.norm", inner, PART, "column")] if c.flag("mamba_rms_norm", True) else []),
        matrix("mixer.out_proj", hidden, inner, "row", PART, bias),
    ])  # fmt: skip


def mamba1(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Mamba (arXiv 2312.00752), with Jamba's norms where the family has them."""
    inner = c.whole("mamba_expand", 2) * hidden
    state, kernel = c.whole("ssm_state_size", 16), c.whole("conv_kernel", 4)
    rank = -(-hidden // 16) if c.get("time_step_rank", "auto") == "auto" else c.whole("time_step_rank")
    width = _state_width(c)
    mixer = Recurrent("mamba1", 1, inner, conv_kernel=kernel, state_elements=inner * state, state_width=width)
    normed = (("dt", rank), ("b", state), ("c", state)) if c.flag("mamba_inner_norms") else ()
    return mixer, concat([
        matrix("mamba.in_proj", 2 * inner, hidden, "column", PART, c.flag("use_bias")),
        vector("mamba.conv1d", inner * kernel, PART, "column"),
        vector("mamba.conv1d.bias", inner, PART, "column"),
        matrix("mamba.x_proj", rank + 2 * state, inner, "row", PART),
        matrix("mamba.dt_proj", inner, rank, "column", PART, bias=True),
        (Weight("mamba.A", inner, state, "column", PART, linear=False, bits=32),),
        vector("mamba.D", inner, PART, "column"),
        *(vector(f"mamba.{name}_layernorm", count, PART) for name, count in normed),
        matrix("mamba.out_proj", hidden, inner, "row", PART, c.flag("use_bias")),
    ])  # fmt: skip


def lightning(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Lightning attention of MiniMax-01 and M1 (arXiv 2501.08313)."""
    heads = c.whole("num_attention_heads", most=2**14)
    dim = c.whole("head_dim", hidden // heads)
    mixer = Recurrent("lightning", heads, state_elements=heads * dim * dim, state_width=2)  # in the model's dtype
    return mixer, concat([
        matrix("self_attn.qkv_proj", 3 * heads * dim, hidden, "column", PART),
        matrix("self_attn.output_gate", heads * dim, hidden, "column", PART),
        vector("self_attn.norm", heads * dim, PART, "column"),
        matrix("self_attn.out_proj", hidden, heads * dim, "row", PART),
    ])  # fmt: skip


def short_conv(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Gated short convolution of LFM2."""
    kernel, bias = c.whole("conv_L_cache", 3), c.flag("conv_bias")
    return Recurrent("short_conv", 1, hidden, conv_kernel=kernel), concat([
        matrix("conv.in_proj", 3 * hidden, hidden, "column", PART, bias),
        vector("conv.conv", hidden * kernel, PART, "column"),
        matrix("conv.out_proj", hidden, hidden, "row", PART, bias),
    ])  # fmt: skip


RECURRENT: dict[str, Callable[[Fields, int], tuple[Recurrent, Weights]]] = {
    "gdn": gated_delta, "kda": kimi_delta, "mamba1": mamba1, "mamba2": mamba2, "lightning": lightning,
    "short_conv": short_conv,
}  # fmt: skip
"""Builders by the name that families give their recurrent mixer."""


def compressed_attention(c: Fields, hidden: int) -> tuple[LatentAttention, Recurrent | None, Weights]:
    """DeepSeek-V4: a sliding window of latents, and beside it one latent per 4 or 128 tokens.

    The compressor's running sums are a recurrent state in FP32: `ratio` rows of keys and of scores, twice the rows
    and the width where windows of 4 overlap.
    """
    heads, dim, rope = c.whole("num_attention_heads"), c.whole("head_dim"), c.whole("qk_rope_head_dim")
    q_rank, ratio = c.whole("q_lora_rank"), c.whole("compress_ratio", least=0)
    groups, o_rank = c.whole("o_groups"), c.whole("o_lora_rank")
    if ratio not in (0, 4, 128):
        raise c.refuse("compress_ratios", "entries among 0, 4 and 128", ratio)
    index_heads, index_dim = (c.whole("index_n_heads"), c.whole("index_head_dim")) if ratio == 4 else (0, 0)
    window = c.whole("sliding_window", most=2**31)
    mixer = LatentAttention(
        heads, dim - rope, dim - rope, rope, dim, index_heads, index_dim, ratio == 4, window, compress=ratio
    )
    weights = concat([
        matrix("self_attn.q_a_proj", q_rank, hidden, "replicated", "attention"),
        vector("self_attn.q_a_norm", q_rank),
        matrix("self_attn.q_b_proj", heads * dim, q_rank, "column", "attention"),
        matrix("self_attn.kv_proj", dim, hidden, "replicated", "attention"),
        vector("self_attn.kv_norm", dim),
        matrix("self_attn.o_a_proj", groups * o_rank, heads * dim // groups, "column", "attention"),
        matrix("self_attn.o_b_proj", hidden, groups * o_rank, "row", "attention"),
        vector("self_attn.sinks", heads, "attention", "column", bits=32),
    ])  # fmt: skip
    overlap, state = (2 if ratio == 4 else 1), 0
    for name, width in (("compressor", dim), ("compressor.indexer", index_dim)):
        if not (ratio and width):
            continue
        state += 2 * overlap * ratio * overlap * width
        rows = overlap * width
        weights += (
            Weight(f"self_attn.{name}.kv_proj", rows, hidden, part="indexer", linear=False),
            Weight(f"self_attn.{name}.gate_proj", rows, hidden, part="indexer", linear=False),
            Weight(f"self_attn.{name}.position_bias", ratio, rows, part="indexer", linear=False, bits=32),
            *vector(f"self_attn.{name}.kv_norm", width, "indexer"),
        )
    if ratio == 4:
        weights += matrix("self_attn.indexer.wq_b", index_heads * index_dim, q_rank, "replicated", "indexer")
        weights += (Weight("self_attn.indexer.weights_proj", index_heads, hidden, part="indexer", linear=False),)
    return mixer, Recurrent("compressor", state_elements=state) if state else None, weights
