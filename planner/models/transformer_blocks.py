"""Building blocks of decoders: weights of attention, feed-forward blocks and experts.

Shapes follow the Hugging Face modelling code of each family (transformers 5.23), sharding follows
vLLM 0.33's layers.
"""

from collections.abc import Iterable

from planner.models.architecture import FeedForward, ShardingKind, WeightTensor
from planner.models.config_reader import ConfigReader
from planner.models.layer_kinds import LayerKind
from planner.models.mixers import GroupedQueryAttention, LatentAttention

WeightTensors = tuple[WeightTensor, ...]


def join_weights(parts: Iterable[WeightTensors]) -> WeightTensors:
    """Join groups of weights to one."""
    return tuple(weight for part in parts for weight in part)


def build_linear(
    name: str,
    rows: int,
    cols: int,
    shard: ShardingKind,
    part: str,
    bias: bool = False,
    copies: int = 1,
    units: int = 1,
) -> WeightTensors:
    """Build a linear layer of `rows` outputs and `cols` inputs; its bias is split by outputs."""
    weight = WeightTensor(name, rows, cols, shard, part, copies, units)
    if not bias:
        return (weight,)
    split: ShardingKind = "replicated" if shard == "row" else shard
    return (weight, WeightTensor(f"{name}.bias", rows, 1, split, part, copies, units, linear=False))


def build_vector(
    name: str,
    width: int,
    part: str = "norm",
    shard: ShardingKind = "replicated",
    bias: bool = False,
    bits: int | None = None,
    units: int = 1,
) -> WeightTensors:
    """Build the scale of a norm over `units` heads, or another vector, with an optional bias."""
    return tuple(
        WeightTensor(
            full_name, width, 1, shard, part, num_shard_units=units, linear=False, stored_bits=bits
        )
        for full_name in ((name, f"{name}.bias") if bias else (name,))
    )


def build_norms(c: ConfigReader, width: int, count: int) -> WeightTensors:
    """Build `count` norms over `width` elements."""
    return join_weights(
        build_vector("norm", width, bias=c.read_bool("norm_bias")) for _ in range(count)
    )


def _read_attention_heads(c: ConfigReader, hidden: int) -> tuple[int, int]:
    """Read the heads of queries and of keys and values."""
    heads = c.read_int("num_attention_heads", maximum=2**14)
    # Falcon-7B states 71 KV heads and has 1
    is_multi_query = c.read_bool("multi_query") and not c.read_bool("new_decoder_architecture")
    if (
        not is_multi_query
        and c.get_or_default("num_key_value_heads") is None
        and not c.read_bool("multi_head")
    ):
        c.warnings.append(
            f"{c.location} does not state num_key_value_heads; as many as attention heads are"
            " assumed"
        )
    kv_heads = 1 if is_multi_query else c.read_int("num_key_value_heads", heads, maximum=2**14)
    if heads % kv_heads:
        raise c.make_field_error(
            "num_key_value_heads", f"a divisor of the {heads} attention heads", kv_heads
        )
    if c.get_or_default("head_dim") is None and hidden % heads:
        raise c.make_field_error(
            "head_dim", f"a value, as hidden_size {hidden} is no multiple of {heads} heads", None
        )
    return heads, kv_heads


def build_attention(
    c: ConfigReader, hidden: int, kind: LayerKind
) -> tuple[GroupedQueryAttention, WeightTensors]:
    """Build multi-head, grouped- or multi-query attention: full, sliding or chunked."""
    heads, kv_heads = _read_attention_heads(c, hidden)
    head_dim = c.read_int("head_dim", hidden // heads, maximum=2**14)
    v_dim = c.read_int("v_head_dim", head_dim, maximum=2**14)
    window = None
    if kind.mixer in ("sliding", "chunked"):
        name = "attention_chunk_size" if kind.mixer == "chunked" else "sliding_window"
        window = c.read_int(name, maximum=2**31)
        if window >= c.read_int("max_position_embeddings", 2**31, maximum=2**31):
            window = None
    index_heads, index_dim, selected = 0, 0, None
    if kind.selects_blocks:
        sparse = c.read_nested("sparse_attention_config")
        index_heads, index_dim, blocks, size = (
            sparse.read_int(f"sparse_{name}")
            for name in ("num_index_heads", "index_dim", "topk_blocks", "block_size")
        )
        selected = blocks * size
    mixer = GroupedQueryAttention(
        heads, kv_heads, head_dim, v_dim, window, kind.mixer == "chunked", kind.stores_kv,
        index_heads, index_dim, selected,
    )  # fmt: skip
    biased = c.read_bool("attention_bias", c.read_bool("use_bias", c.read_bool("bias")))
    qkv_bias, o_bias = c.read_bool("qkv_bias", biased), c.read_bool("o_bias", biased)
    query = heads * head_dim * (2 if c.read_bool("attn_output_gate") else 1)
    normed = c.read_text_field("qk_norm") if c.read_bool("use_qk_norm", True) else ""
    norm_heads = {"q": heads, "k": kv_heads} if kind.stores_kv else {"q": heads}
    # Gemma 4 uses the keys of full layers as values, yet vLLM allocates a projection for them
    value_part = "engine" if kind.key_is_value else "attention"
    return mixer, join_weights([
        build_linear("self_attn.q_proj", query, hidden, "column", "attention", qkv_bias),
        *((
            build_linear("self_attn.k_proj", kv_heads * head_dim, hidden, "kv", "attention",
                         qkv_bias, 1, kv_heads),
            build_linear("self_attn.v_proj", kv_heads * v_dim, hidden, "kv", value_part, qkv_bias,
                         1, kv_heads),
        ) if kind.stores_kv else ()),
        build_linear("self_attn.o_proj", hidden, heads * v_dim, "row", "attention", o_bias),
        *(build_vector(f"self_attn.{side}_norm", head_dim * units, bias=c.read_bool("norm_bias"),
                       units=units)
          for side, count in norm_heads.items() if normed
          for units in [count if normed == "full" else 1]),
        build_vector("self_attn.sinks", heads, "attention", "column")
        if kind.has_sinks or c.read_bool("sinks") else (),
        *((
            build_linear("self_attn.index_q_proj", index_heads * index_dim, hidden, "kv", "indexer",
                         False, 1, index_heads),
            build_linear("self_attn.index_k_proj", index_dim, hidden, "replicated", "indexer"),
            build_vector("self_attn.index_norms", 2 * index_dim, "indexer"),
        ) if index_heads else ()),
        build_linear("self_attn.g_proj", heads, hidden, "column", "attention")
        if c.read_bool("use_head_wise_attn_gate") else (),
    ])  # fmt: skip


def read_indexer(c: ConfigReader) -> tuple[int, int, int]:
    """Read heads and dimension of an indexer, and how many latents it selects."""
    return c.read_int("index_n_heads"), c.read_int("index_head_dim"), c.read_int("index_topk")


def build_latent_attention(
    c: ConfigReader, hidden: int, indexer: str
) -> tuple[LatentAttention, WeightTensors]:
    """Build multi-head latent attention; its `indexer` is full, shared with another layer, or none."""
    heads = c.read_int("num_attention_heads", maximum=2**14)
    kv_rank, nope, rope = (
        c.read_int(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    v_dim, bias = c.read_int("v_head_dim"), c.read_bool("attention_bias")
    query = heads * (nope + rope)
    # null: no rank; absent: the class default
    is_null = c.has_field("q_lora_rank") and c.config.get("q_lora_rank") is None
    q_rank = None if is_null else c.read_int("q_lora_rank", None)
    index_heads, index_dim, selected = read_indexer(c) if indexer else (0, 0, None)
    mixer = LatentAttention(
        heads, kv_rank, nope, rope, v_dim, index_heads, index_dim, selected, indexer == "full"
    )
    return mixer, join_weights([
        *((
            build_linear("self_attn.q_a_proj", q_rank, hidden, "replicated", "attention", bias),
            build_vector("self_attn.q_a_layernorm", q_rank),
            build_linear("self_attn.q_b_proj", query, q_rank, "column", "attention"),
        ) if q_rank else (build_linear("self_attn.q_proj", query, hidden, "column", "attention"),)),
        build_linear("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, "replicated",
                     "attention", bias),
        build_vector("self_attn.kv_a_layernorm", kv_rank),
        build_linear("self_attn.kv_b_proj", heads * (nope + v_dim), kv_rank, "column", "attention"),
        build_linear("self_attn.o_proj", hidden, heads * v_dim, "row", "attention", bias),
        *((
            build_linear("self_attn.indexer.wq_b", index_heads * index_dim, q_rank or hidden,
                         "replicated", "indexer"),
            build_linear("self_attn.indexer.wk", index_dim, hidden, "replicated", "indexer"),
            build_vector("self_attn.indexer.k_norm", index_dim, "indexer", bias=True),
            (WeightTensor("self_attn.indexer.weights_proj", index_heads, hidden, part="indexer",
                          linear=False),),
        ) if indexer == "full" else ()),
    ])  # fmt: skip


def build_feed_forward(
    c: ConfigReader,
    inputs: int,
    inner: int,
    name: str,
    part: str,
    bias: bool = False,
    copies: int = 1,
) -> WeightTensors:
    """Build up and down projections, and the gate unless the family has none."""
    gates = ("gate_proj", "up_proj") if c.read_bool("gated", True) else ("up_proj",)
    return join_weights([
        *(build_linear(f"{name}.{gate}", inner, inputs, "column", part, bias, copies)
          for gate in gates),
        build_linear(f"{name}.down_proj", inputs, inner, "row", part, bias, copies),
    ])  # fmt: skip


def build_dense_mlp(c: ConfigReader, hidden: int) -> tuple[FeedForward, WeightTensors]:
    """Build a dense feed-forward block."""
    field = c.read_text_field("dense_width", "intermediate_size")
    inner = c.read_int(field, 4 * hidden) if c.read_bool("four_times") else c.read_int(field)
    inner //= 1 + c.read_bool("halved")
    if c.read_bool("block_auto_adjust_ff_dim"):  # LFM2: two thirds, rounded up
        multiple = c.read_int("block_multiple_of", 256)
        inner = -(-(2 * inner // 3) // multiple) * multiple
    weights = build_feed_forward(
        c, hidden, inner, "mlp", "dense_mlp", c.read_bool("mlp_bias", c.read_bool("use_bias"))
    )
    if extra := c.read_int("activation_parameters", 0, minimum=0):
        weights += build_vector("mlp.act_fn", extra, "dense_mlp")
    return FeedForward(inner, 3 if c.read_bool("gated", True) else 2), weights


def build_moe_block(c: ConfigReader, hidden: int) -> tuple[FeedForward, WeightTensors]:
    """Build routed experts, the router, and the shared weights that every token uses."""
    total = c.read_int("num_experts", maximum=2**16)
    active = c.read_int("num_experts_per_tok", maximum=2**16)
    if active > total:
        raise c.make_field_error("num_experts_per_tok", f"at most the {total} experts", active)
    inner = c.read_int(c.read_text_field("expert_width", "moe_intermediate_size"))
    if field := c.read_text_field("shared_width"):
        shared = c.read_int(field)
    elif (width := c.read_int("shared_expert_intermediate_size", None, minimum=0)) is not None:
        shared = width
    else:
        shared = c.read_int("n_shared_experts", 0, minimum=0) * inner
    # Nemotron-3: experts work on a projection of the hidden state
    latent = c.read_int("moe_latent_size", hidden)
    routed_name = c.read_text_field("routed_name", "mlp.experts")
    shared_name = c.read_text_field("shared_name", "mlp.shared_experts")
    mlp = FeedForward(inner, 3 if c.read_bool("gated", True) else 2, total, active, shared)
    return mlp, join_weights([
        build_feed_forward(c, latent, inner, routed_name, "routed_experts",
                           c.read_bool("expert_bias"), total),
        (WeightTensor("mlp.gate", total, hidden, part="router", linear=False,
                      stored_bits=c.read_int("router_bits", None)),),
        build_vector("mlp.gate.bias", total, "router") if c.read_bool("router_has_bias") else (),
        build_vector("mlp.gate.e_score_correction_bias", total, "router_bias", bits=32)
        if c.read_bool("router_correction") else (),
        *((
            build_vector("mlp.gate.scale", hidden, "router"),
            build_vector("mlp.gate.per_expert_scale", total, "router"),
        ) if c.read_bool("router_scales") else ()),
        build_feed_forward(c, hidden, shared, shared_name, "shared_experts") if shared else (),
        (WeightTensor("mlp.shared_expert_gate", 1, hidden, part="shared_experts", linear=False),)
        if c.read_bool("shared_expert_gate") else (),
        *((
            build_linear("mlp.fc1_latent_proj", latent, hidden, "replicated", "shared_experts"),
            build_linear("mlp.fc2_latent_proj", hidden, latent, "replicated", "shared_experts"),
        ) if latent != hidden else ()),
    ])  # fmt: skip
