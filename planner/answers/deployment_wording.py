"""What a deployment, its memory and its adapters are called."""

from planner.answers.answer import (
    Answer,
    Offer,
)
from planner.core.number_format import (
    format_number,
    format_seconds,
)
from planner.core.text import format_count
from planner.core.units import GIB, MIB
from planner.planning.framework_choice import load_frameworks
from planner.planning.scenario import Scenario

_NAMES = {
    "bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "fp8_block": "FP8", "fp8_channel": "FP8",
    "fp8_e4m3": "FP8 E4M3", "fp8_e5m2": "FP8 E5M2", "eagle3": "EAGLE-3", "ngram": "n-gram", "medusa": "Medusa",
    "dflash": "DFlash", "suffix": "suffix", "mlp_speculator": "MLP speculator", "draft_model": "draft-model",
}  # fmt: skip
"""Formats and methods of speculation as people write them; of the others in capitals."""


# --- deployments


def describe_offer(offer: Offer) -> str:
    """Describe a deployment: GPUs, layout and formats, as their makers write them."""
    args = offer.deployment.args
    parts = [offer.placement, describe_weights(offer)]
    if args.kv_cache_dtype not in (None, "auto"):
        parts += [f"{_write_name(args.kv_cache_dtype)} KV cache"]
    if offer.deployment.speculation:
        parts += [f"{_write_name(offer.deployment.speculation.method)} drafts"]
    return ", ".join(parts)


def describe_weights(offer: Offer) -> str:
    """Describe the format of the weights: "FP8 weights"."""
    model = offer.deployment.model
    method = model.quantization.method
    return f"{_write_name(model.dtype if method == 'none' else method)} weights"


def _write_name(name: str) -> str:
    return _NAMES.get(name, name.upper() if name.isalnum() else name)


def gloss_deployment(offer: Offer) -> str:
    """Explain the short names of a deployment's layout and format to who does not run engines."""
    terms = dict[str, str]()
    for layout in (pool.layout for pool in offer.pools):
        sizes = {
            f"TP{layout.tp}": f"each layer is split over {layout.tp} GPUs" * (layout.tp > 1),
            f"PP{layout.pp}": f"{layout.pp} groups of layers on GPUs of their own"
            * (layout.pp > 1),
            f"DP{layout.dp}": f"requests are shared among {layout.dp} parts" * (layout.dp > 1),
            f"EP{layout.ep}": f"experts are spread over {layout.ep} GPUs" * (layout.ep > 1),
        }
        terms |= {name: text for name, text in sizes.items() if text}
    name = describe_weights(offer).partition(" ")[0]
    terms[name] = f"{offer.deployment.model.quantization.weight_bits:.3g} bits per weight"
    return "; ".join(f"{term}: {text}" for term, text in terms.items())


def describe_engine(offer: Offer) -> str:
    """Name the engine and its version: "vLLM 0.20.2"."""
    engine = offer.deployment.engine
    return f"{load_frameworks()[engine.name].title} {engine.version}"


def describe_gpus(offer: Offer) -> str:
    """Name how many GPUs of a kind are rented."""
    return f"{offer.num_gpus_billed} \N{MULTIPLICATION SIGN} {offer.gpu}"


def describe_replica_gpus(offer: Offer) -> str:
    """Name the GPUs of one replica; of pools all."""
    return f"{offer.gpus_per_replica} \N{MULTIPLICATION SIGN} {offer.gpu}"


def describe_adapter_traffic(scenario: Scenario) -> str:
    """Describe which LoRA adapters requests ask for, after their lengths; empty without any."""
    named = _name_adapters(scenario)
    return f"; each for one of {named}" if named else ""


def _name_adapters(scenario: Scenario) -> str:
    """Name the adapters and how evenly they are asked for: "40 LoRA adapters (evenly used)"; empty without any."""
    load = scenario.workload
    skew = f"Zipf {load.adapter_zipf:g}" if load.adapter_zipf else "evenly used"
    return f"{format_count(load.adapters, 'LoRA adapter')} ({skew})" if load.adapters else ""


def describe_machines(answer: Answer) -> str:
    """Describe the machines to rent, spares included; empty where GPUs are let in any number."""
    best, day, spares = answer.best, answer.day, answer.scenario.spare_replicas
    machines = [size for pool in best.pools for size in pool.machines] if best else []
    if best is None or not machines:
        return ""
    text = f"{best.num_gpus_billed} x {best.gpu}, in machines of {' + '.join(map(str, machines))}"
    smaller = day.deployment.returnable_machines if day and day.num_starts else ()
    if smaller:
        text += (
            f"; by the hour of {' + '.join(map(str, smaller))}, as no part of a machine can be given"
            " back"
        )
    return text + f", {format_count(spares, 'spare replica')} included" * bool(spares)


def describe_adapters(answer: Answer) -> str:
    """Describe the LoRA adapters and their slots on a GPU; empty without any."""
    adapters, offer = answer.scenario.workload.adapters, answer.best
    slots = answer.adapter_slots
    if not adapters or offer is None or slots is None:
        return ""
    args = offer.deployment.args
    text = (
        f"{_name_adapters(answer.scenario)}, {format_count(slots.count, 'slot')} per GPU"
        f" (max_loras), rank up to {args.max_lora_rank}"
    )
    if slots.count < adapters and slots.sequences < args.max_num_seqs:
        text += f"; {slots.sequences:,} requests fill them on average, others wait for a slot"
    return text


def explain_cold_adapter(answer: Answer) -> str:
    """Explain what an adapter waits for that has no slot yet; empty without adapters."""
    slots, load = answer.adapter_slots, answer.scenario.workload
    if slots is None or answer.best is None:
        return ""
    args = answer.best.deployment.args
    in_host, cold = format_seconds(slots.load_s), format_seconds(slots.cold_s)
    where = f"{cold} from a file ({answer.scenario.storage})"
    if (args.max_cpu_loras or slots.count) >= load.adapters:
        kept = "all are kept in host memory and read before the first request"
        return f"{in_host} into a slot from host memory; {kept}. One that is added later: {where}"
    return f"{in_host} into a slot from host memory, {where}, while no step runs"


def describe_model_memory(answer: Answer) -> str:
    """Describe what the whole model takes, as its checkpoint says and as it is loaded."""
    found, offer = answer.model_memory, answer.best
    if found is None or offer is None:
        return ""
    stored, loaded = (_format_gib(size) for size in (found.stored_bytes, found.loaded_bytes))
    text = f"{format_number(found.num_params / 1e9)}B parameters, {stored} as stored"
    if stored != loaded:
        text += f", {loaded} as loaded ({describe_weights(offer)})"
    if of_token := found.kv_bytes_per_token:
        text += f"; KV cache {format_number(of_token / 1024)} KiB per token"
    return text


def _format_gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def describe_gpu_memory(answer: Answer) -> str:
    """Describe what the fullest GPU holds of weights, adapters and KV cache."""
    offer, slots = answer.best, answer.adapter_slots
    if offer is None:
        return ""
    memory = offer.memory
    parts = [f"{_format_gib(memory.weights.mid - memory.adapters_bytes)} of weights"]
    if slots:
        each = f"{format_count(slots.count, 'slot')} x {format_number(slots.bytes_each / MIB)} MiB"
        parts += [f"{_format_gib(memory.adapters_bytes)} of LoRA adapters ({each})"]
    of_token = memory.layout.kv_bytes_per_token
    share = f" ({format_number(of_token / 1024)} KiB per token)" if of_token else ""
    *first, last = *parts, f"{_format_gib(memory.kv_available.mid)} of KV cache{share}"
    total = _format_gib(memory.total_bytes)
    return f"{', '.join(first)} and {last} on the fullest GPU, which has {total}"


def explain_outside(scenario: Scenario, offer: Offer) -> str:
    """Explain why the scenario does not allow a deployment's GPUs; empty if it does."""
    if offer.outside != "count":
        return "not on your list" if offer.outside else ""
    most = next(each.max_gpus for each in scenario.gpus if each.gpu.name == offer.gpu)
    return f"more than the {most:,} allowed"
