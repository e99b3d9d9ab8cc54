"""Building blocks of decoders: the weights of attention, mixers, feed-forward blocks and experts.

Shapes follow the Hugging Face modelling code of each family (transformers 5.23), sharding follows vLLM's layers.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.architecture import Attention, Experts, LatentAttention, Mlp, Recurrent, Shard, Weight
from planner.architecture_fields import Fields

Weights = tuple[Weight, ...]


def matrix(
    name: str, rows: int, cols: int, shard: Shard, part: str, bias: bool = False, copies: int = 1, units: int = 1
) -> Weights:
    """A linear layer of `rows` outputs and `cols` inputs; its bias is split with the outputs."""
    weight = Weight(name, rows, cols, shard, part, copies, units)
    if not bias:
        return (weight,)
    split: Shard = "replicated" if shard == "row" else shard
    return (weight, Weight(f"{name}.bias", rows, 1, split, part, copies, units, linear=False))


def vector(name: str, width: int, part: str = "norm", shard: Shard = "replicated", bias: bool = False,
           bits: int | None = None) -> Weights:  # fmt: skip
    """A norm's scale or another vector, and its bias."""
    scale = Weight(name, width, 1, shard, part, linear=False, bits=bits)
    return (scale, Weight(f"{name}.bias", width, 1, shard, part, linear=False, bits=bits)) if bias else (scale,)


def norms(c: Fields, hidden: int, count: int) -> Weights:
    """`count` norms over the hidden size."""
    return tuple(
        weight
        for index in range(count)
        for weight in vector(f"norm{index}", hidden, bias=c.flag("norm_bias"))
    )


def attention(c: Fields, hidden: int, kind: str) -> tuple[Attention, Weights]:
    """Grouped-query attention; `kind` is full, sliding or chunked, with `_shared` when it reads an earlier cache."""
    swa = "swa_" if kind.startswith("sliding") and c.has("swa_num_attention_heads") else ""
    heads = c.whole(f"{swa}num_attention_heads", most=2**14)
    kv_heads = c.whole(f"{swa}num_key_value_heads", heads, most=2**14)
    if c.flag("multi_query") and not c.flag("new_decoder_architecture"):
        kv_heads = 1
    if c.get("head_dim") is None and hidden % heads:
        raise c.refuse("head_dim", f"a value, as hidden_size {hidden} is no multiple of {heads} heads", None)
    head_dim = c.whole(f"{swa}head_dim", c.whole("head_dim", hidden // heads, most=2**14), most=2**14)
    v_dim = c.whole(f"{swa}v_head_dim", c.whole("v_head_dim", head_dim, most=2**14), most=2**14)
    key_is_value = False
    if kind.startswith("full") and c.get("global_head_dim") is not None:
        head_dim = v_dim = c.whole("global_head_dim", most=2**14)
        key_is_value = c.flag("attention_k_eq_v")
        if key_is_value:
            kv_heads = c.whole("num_global_key_value_heads", kv_heads, most=2**14)
    if heads % kv_heads:
        raise c.refuse("num_key_value_heads", f"a divisor of the {heads} attention heads", kv_heads)
    window = None
    if kind.startswith("sliding"):
        window = c.whole("sliding_window", most=2**31)
    elif kind.startswith("chunked"):
        window = c.whole("attention_chunk_size", most=2**31)
    if window and window >= c.whole("max_position_embeddings", 2**31, most=2**31):
        window = None
    shared = kind.endswith("_shared")
    mixer = Attention(heads, kv_heads, head_dim, v_dim, window, kind.startswith("chunked"), not shared)

    both = c.flag("attention_bias", c.flag("use_bias", c.flag("bias")))
    qkv_bias, o_bias = c.flag("qkv_bias", both), c.flag("o_bias", both)
    gate = 2 if c.flag("attn_output_gate") else 1
    weights = matrix("self_attn.q_proj", gate * heads * head_dim, hidden, "column", "attention", qkv_bias)
    if not shared:
        weights += matrix("self_attn.k_proj", kv_heads * head_dim, hidden, "kv", "attention", qkv_bias, 1, kv_heads)
        if not key_is_value:
            weights += matrix("self_attn.v_proj", kv_heads * v_dim, hidden, "kv", "attention", qkv_bias, 1, kv_heads)
    weights += matrix("self_attn.o_proj", hidden, heads * v_dim, "row", "attention", o_bias)
    if c.text("qk_norm") == "head":
        weights += vector("self_attn.q_norm", head_dim) + (() if shared else vector("self_attn.k_norm", head_dim))
    elif c.text("qk_norm") == "full":
        weights += vector("self_attn.q_norm", heads * head_dim) + vector("self_attn.k_norm", kv_heads * head_dim)
    if c.flag(f"{swa}sinks", c.flag("sinks")):
        weights += vector("self_attn.sinks", heads, "attention", "column")
    if c.flag("use_head_wise_attn_gate"):
        weights += matrix("self_attn.g_proj", heads, hidden, "column", "attention")
    return mixer, weights


def latent_attention(c: Fields, hidden: int, indexer: str) -> tuple[LatentAttention, Weights]:
    """Multi-head latent attention; `indexer` is full (owns a sparse-attention indexer), shared, or empty."""
    heads = c.whole("num_attention_heads", most=2**14)
    kv_rank, nope, rope = (c.whole(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    v_dim, q_rank = c.whole("v_head_dim"), None if c.get("q_lora_rank") is None else c.whole("q_lora_rank")
    if c.has("q_lora_rank") and c.config.get("q_lora_rank") is None:
        q_rank = None
    bias, query = c.flag("attention_bias"), heads * (nope + rope)
    name = "self_attn"
    if q_rank is None:
        weights = matrix(f"{name}.q_proj", query, hidden, "column", "attention")
    else:
        weights = matrix(f"{name}.q_a_proj", q_rank, hidden, "replicated", "attention", bias)
        weights += vector(f"{name}.q_a_layernorm", q_rank)
        weights += matrix(f"{name}.q_b_proj", query, q_rank, "column", "attention")
    weights += matrix(f"{name}.kv_a_proj_with_mqa", kv_rank + rope, hidden, "replicated", "attention", bias)
    weights += vector(f"{name}.kv_a_layernorm", kv_rank)
    weights += matrix(f"{name}.kv_b_proj", heads * (nope + v_dim), kv_rank, "column", "attention")
    weights += matrix(f"{name}.o_proj", hidden, heads * v_dim, "row", "attention", bias)
    index_heads = index_dim = 0
    if indexer:
        index_heads, index_dim = c.whole("index_n_heads"), c.whole("index_head_dim")
    if indexer == "full":
        weights += matrix(f"{name}.indexer.wq_b", index_heads * index_dim, q_rank or hidden, "replicated", "indexer")
        weights += matrix(f"{name}.indexer.wk", index_dim, hidden, "replicated", "indexer")
        weights += vector(f"{name}.indexer.k_norm", index_dim, "indexer", bias=True)
        weights += (Weight(f"{name}.indexer.weights_proj", index_heads, hidden, part="indexer", linear=False),)
    mixer = LatentAttention(
        heads, q_rank, kv_rank, nope, rope, v_dim, index_heads, index_dim, has_indexer_cache=indexer == "full"
    )
    return mixer, weights


def mlp(c: Fields, hidden: int, intermediate: int, name: str = "mlp") -> tuple[Mlp, Weights]:
    """A dense feed-forward block, gated unless its family's is not."""
    gated, bias = c.flag("gated", True), c.flag("mlp_bias", c.flag("use_bias"))
    weights = matrix(f"{name}.gate_proj", intermediate, hidden, "column", "dense_mlp", bias) if gated else ()
    weights += matrix(f"{name}.up_proj", intermediate, hidden, "column", "dense_mlp", bias)
    weights += matrix(f"{name}.down_proj", hidden, intermediate, "row", "dense_mlp", bias)
    return Mlp(intermediate, 3 if gated else 2), weights


def experts(c: Fields, hidden: int) -> tuple[Experts, Weights]:
    """Routed experts, shared experts and the router."""
    total = c.whole("num_experts", most=2**16)
    active = c.whole("num_experts_per_tok", most=2**16)
    if active > total:
        raise c.refuse("num_experts_per_tok", f"at most the {total} experts", active)
    inner = c.whole("moe_intermediate_size", None) or c.whole("intermediate_size")
    latent = c.whole("moe_latent_size", hidden)  # Nemotron-3: experts work on a projection of the hidden state
    gated, bias, part = c.flag("gated", True), c.flag("expert_bias"), "routed_experts"
    weights: Weights = ()
    for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
        weights += matrix(f"mlp.experts.{name}", inner, latent, "column", part, bias, total)
    weights += matrix("mlp.experts.down_proj", latent, inner, "row", part, bias, total)
    weights += (Weight("mlp.gate", total, hidden, part="router", linear=False),)
    if c.flag("router_has_bias"):
        weights += vector("mlp.gate.bias", total, "router")
    if c.flag("router_correction"):
        weights += vector("mlp.gate.e_score_correction_bias", total, "router_bias", bits=32)
    shared = c.whole("shared_expert_intermediate_size", None, least=0)
    if shared is None:
        shared = c.whole("n_shared_experts", 0, least=0) * inner
    if shared:
        name = "mlp.shared_experts"
        for proj in ("gate_proj", "up_proj") if gated else ("up_proj",):
            weights += matrix(f"{name}.{proj}", shared, hidden, "column", "shared_experts")
        weights += matrix(f"{name}.down_proj", hidden, shared, "row", "shared_experts")
        if c.flag("shared_expert_gate"):
            weights += (Weight("mlp.shared_expert_gate", 1, hidden, part="shared_experts", linear=False),)
    if latent != hidden:
        weights += matrix("mlp.fc1_latent_proj", latent, hidden, "replicated", "shared_experts")
        weights += matrix("mlp.fc2_latent_proj", hidden, latent, "replicated", "shared_experts")
    return Experts(total, active, inner, shared, 3 if gated else 2), weights


def concat(parts: Iterable[Weights]) -> Weights:
    """All weights of `parts`, in order."""
    return tuple(weight for part in parts for weight in part)


def gated_delta(c: Fields, hidden: int) -> tuple[Recurrent, Weights]:
    """Gated delta rule of Qwen3-Next and Qwen3.5 (arXiv 2412.06464)."""
    key_heads, value_heads = c.whole("linear_num_key_heads"), c.whole("linear_num_value_heads")
    key_dim, value_dim = c.whole("linear_key_head_dim"), c.whole("linear_value_head_dim")
    kernel, values = c.whole("linear_conv_kernel_dim", 4), value_heads * value_dim
    channels, part = 2 * key_heads * key_dim + values, "linear_ssm"
    width = 4 if c.text("mamba_ssm_dtype", "auto") == "float32" else 2
    state = value_heads * key_dim * value_dim
    mixer = Recurrent("gdn", value_heads, channels, conv_kernel=kernel, state_elements=state, state_width=width)
    weights = concat([
        matrix("linear_attn.in_proj_qkv", channels, hidden, "column", part),
        matrix("linear_attn.in_proj_z", values, hidden, "column", part),
        matrix("linear_attn.in_proj_b", value_heads, hidden, "column", part),
        matrix("linear_attn.in_proj_a", value_heads, hidden, "column", part),
        vector("linear_attn.conv1d", channels * kernel, part, "column"),
        vector("linear_attn.A_log", value_heads, part, "column", bits=32),
        vector("linear_attn.dt_bias", value_heads, part, "column"),
        vector("linear_attn.norm", value_dim, part),
        matrix("linear_attn.out_proj", hidden, values, "row", part),
    ])  # fmt: skip
    return mixer, weights
