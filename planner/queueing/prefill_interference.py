"""Estimate what prompts do to an engine: steps with prompts, bursts, and prompts that must wait.

Arrays have three axes, [cases, what varies, slices of a length distribution]; see
`queueing.steady_state`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.latency.step_model import StepModel
from planner.queueing.batched_step_models import stack_scalars
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

SLICE_EDGES = np.append(np.linspace(0, 0.9, 13), [0.94, 0.96, 0.985, 0.995, 1.0])
"""Slices for integrating over a distribution, finer in the tail, around p95 and p99."""
MAX_COUNTED_CHUNKS = 32
"""Chunks of prompts in a step up to which their number is distinguished."""
SLICE_FRACTIONS = np.diff(SLICE_EDGES)
SLICE_MIDPOINTS = (SLICE_EDGES[1:] + SLICE_EDGES[:-1]) / 2
ZERO_SLICES = np.zeros_like(SLICE_FRACTIONS)


@dataclass(frozen=True)
class TrafficMix:
    """Workloads as mean lengths of the slices of their requests."""

    prompts: np.ndarray  # tokens to compute, [cases, 1, slices]
    # streamed outputs, likewise: a step of speculative decoding streams several tokens as one
    outputs: np.ndarray
    tokens: np.ndarray  # mean output tokens, [cases, 1, 1] like all below but `cached`
    cached: np.ndarray  # prompt tokens in the prefix cache, [cases, 1, slices]
    context: np.ndarray  # mean tokens that a decoding sequence attends to
    jitter: np.ndarray  # variance of the tokens per step, relative to their squared mean

    @property
    def output_steps_variance(self) -> np.ndarray:
        """Variance of the number of steps of an output."""
        return compute_slice_variance(self.outputs) + average_slices(self.outputs) * self.jitter


@lru_cache(maxsize=256)
def _compute_slice_means(lengths: LengthDistribution) -> np.ndarray:
    """Return the mean length of each slice."""
    return lengths.compute_slice_means(SLICE_EDGES)


def build_traffic_mix(workloads: Sequence[Workload], step: StepModel) -> TrafficMix:
    """Build the traffic mix of every case; `step` has their step models."""
    prompts = np.stack([_compute_slice_means(workload.prompt) for workload in workloads])[:, None]
    tokens = np.stack([_compute_slice_means(workload.output) for workload in workloads])[:, None]
    tokens = np.where(tokens[..., -1:] < 1.5, 1.0, tokens)  # tokens are whole: all outputs have one
    prefix = stack_scalars([workload.prefix_tokens or np.inf for workload in workloads])
    share = stack_scalars([workload.prefix_hit_rate for workload in workloads])
    cached, later, per_step = share * np.minimum(prompts, prefix), tokens - 1, step.tokens_per_step
    # the last step yields more tokens than are left (renewal theory)
    past = ((step.tokens_variance + per_step**2) / per_step - 1) / 2
    outputs = 1 + np.clip((later + past) / per_step, np.minimum(later, 1.0), later)
    context = average_slices(prompts) + average_slices(tokens**2) / (2 * average_slices(tokens))
    jitter = np.asarray(step.tokens_variance) / per_step**2
    return TrafficMix(
        np.maximum(prompts - cached, 1), outputs, average_slices(tokens), cached, context, jitter
    )


def average_slices(values: np.ndarray) -> np.ndarray:
    """Return the mean over the slices."""
    return (values @ SLICE_FRACTIONS)[..., None]


def compute_slice_variance(values: np.ndarray) -> np.ndarray:
    """Return the variance over the slices."""
    return np.maximum(average_slices(values**2) - average_slices(values) ** 2, 0.0)


def estimate_decode_step_s(step: StepModel, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Estimate a step of `batch` decoding sequences without prompts."""
    return step.estimate_decode_step_s(np.maximum(batch, 1.0), context)


def estimate_min_engine_s(step: StepModel, t: TrafficMix, running: np.ndarray) -> np.ndarray:
    """Estimate the least engine time of a request: tokens and rows in the fullest steps, attention.

    A token is cheapest in a full step, as it shares the read of the weights with most others. All
    stages of a pipeline work at once.
    """
    width, later = 1 + step.num_draft_tokens, np.maximum(average_slices(t.outputs) - 1, 0.0)
    max_tokens = np.minimum(step.max_tokens, running * np.maximum(t.prompts[..., -1:], width))
    rows, sequences = np.maximum(running * width, 1.0), np.maximum(running, 1.0)
    each = (
        (step.interpolate_tokens_s(max_tokens) + step.fixed_s)
        / max_tokens
        * (average_slices(t.prompts) + later * width)
    )
    each = (
        each
        + (1 + later * width) * step.interpolate_rows_s(rows) / rows
        + later * step.interpolate_sequences_s(sequences) / sequences
    )
    attention = average_slices(
        step.estimate_prefill_attention_s(t.prompts, t.cached)
    ) + later * step.estimate_decode_attention_s(t.context)
    return (each + attention) / step.stages


def estimate_prefill_s(
    step: StepModel, t: TrafficMix, beside: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return chunks, seconds that they add to their steps, and its share of them, of every prompt.

    All are [..., slices]; the share is by tokens. `beside` sequences decode in those steps, and the
    last one has `others` more prompts if they fit.
    """
    beside = beside * (1 + step.num_draft_tokens)
    budget = np.maximum(step.max_tokens - beside, 1.0)
    chunks = np.ceil(t.prompts / budget)
    full, size = chunks - 1, average_slices(t.prompts)  # chunks that use a step's whole budget
    base, last = step.interpolate_tokens_s(np.maximum(beside, 1.0)), t.prompts - full * budget
    others = np.minimum(others, np.maximum(budget - last, 0.0) / size)
    attention = step.estimate_prefill_attention_s(t.prompts, t.cached)
    shared = step.interpolate_tokens_s(last + others * size + beside) + (step.prefill_step_s - base)
    alone = (
        full
        * (step.interpolate_tokens_s(step.max_tokens) - base + step.prefill_step_s + step.prompt_s)
        + attention
    )
    share = alone + shared * average_slices(last) / (average_slices(last) + others * size)
    return chunks, alone + shared + others * average_slices(attention), share


def compute_first_chunk_fraction(step: StepModel, t: TrafficMix, beside: np.ndarray) -> np.ndarray:
    """Return the fraction of every prompt in its first chunk, if `beside` sequences decode."""
    if np.all(step.stages == 1):  # unused
        return np.ones_like(t.prompts)
    return np.minimum(
        np.maximum(step.max_tokens - beside * (1 + step.num_draft_tokens), 1.0) / t.prompts, 1.0
    )


def estimate_burst_ttft_s(step: StepModel, t: TrafficMix, requests: np.ndarray) -> np.ndarray:
    """Estimate the first tokens of `requests` prompts that arrive together.

    Returns [cases, 1, slices] seconds, from short to long prompts. Each step takes
    max_num_batched_tokens, one of which goes to each decoding sequence: with d of them a step
    finishes (max_num_batched_tokens - d) / L prompts of L tokens, at its end.
    """
    sizes, size, width = t.prompts, average_slices(t.prompts), 1 + step.num_draft_tokens
    # prompts of the first step decode from the next one on
    decoding = np.maximum(requests * SLICE_MIDPOINTS - step.max_tokens / size, 0.0) / step.stages
    # if they leave no budget, prompts replace the sequences that end
    left = step.max_tokens * size / (size + np.maximum(average_slices(t.outputs) - 1, 0.0) * width)
    budget = np.maximum(step.max_tokens - decoding * width, np.maximum(left, 1.0))
    fresh = np.minimum(budget / sizes, requests)  # prompts of a step
    each = (
        step.interpolate_tokens_s(np.minimum(requests * size, step.max_tokens))
        + step.fixed_s
        + step.prefill_step_s
    )
    each = (
        each
        + step.interpolate_rows_s(decoding * width + fresh)
        + step.interpolate_sequences_s(decoding)
    )
    each = each + decoding * step.estimate_decode_attention_s(size + t.cached)
    each = each + fresh * step.estimate_prefill_attention_s(sizes, t.cached)
    # the prompt that the step's end cuts
    each = each + step.prompt_s * (requests * size > step.max_tokens)
    steps = requests * SLICE_FRACTIONS * sizes / budget
    before = steps.cumsum(axis=-1)
    reached = before - steps / 2 + sizes / (2 * budget)
    ends = np.minimum(np.ceil(reached - 1e-9), np.maximum(before[..., -1:], 1.0))
    done = (steps * each).cumsum(axis=-1) + (ends - before) * each
    # the stages of a pipeline work on as many steps at once
    return done / step.stages + (1 - 1 / step.stages) * each


def estimate_microbatches(
    step: StepModel,
    t: TrafficMix,
    running: np.ndarray,
    decode: np.ndarray,
    first: np.ndarray | float = 0.0,
    stays: np.ndarray | float = np.inf,
    front: np.ndarray = ZERO_SLICES,
) -> np.ndarray:
    """Estimate the microbatches of a pipeline's sequences, 1 to its number of stages.

    A sequence is scheduled together with those whose step ends with its own, and a new prompt joins
    the microbatch that is scheduled next. So a new microbatch forms only if prompts do not fit into
    a step. It ends when it is empty: with m sequences on average, after (e^m - 1) / m stays (busy
    period of M/M/inf). In a closed loop, prompts arrive `front` s after others end. While a long
    step runs, the other microbatches follow it closely, a stage's time apart. One that ends less
    than `front` after the one before gets no prompt. A run of `stays` starts with `first`
    microbatches beside one; outputs of one length keep them as they are. There are always enough to
    hold the tokens of a round.
    """
    if np.all(step.stages == 1):
        return np.ones_like(running)
    outputs, size = average_slices(t.outputs), average_slices(t.prompts)
    budget = np.maximum(step.max_tokens - decode * (1 + step.num_draft_tokens), 1.0)
    beside = np.maximum(running / outputs, 1e-9)  # prompts of a round
    least = np.floor(budget / size) + 1.0
    # Poisson tail: Chernoff's bound with the correction of Bahadur and Rao (1960)
    crowd = np.exp(np.minimum(least - beside - least * np.log(least / beside), 0.0))
    crowd = crowd * np.minimum(np.sqrt(least / (2 * np.pi)) / np.maximum(least - beside, 1e-9), 1.0)
    crowd = np.where(beside < least, crowd, 1.0)
    formed = running * average_slices(1.0 * (t.prompts > budget)) + outputs * np.where(
        least > 1, crowd, 0.0
    )
    each = np.minimum(running / step.stages, 30.0) + 1e-9
    fed = step.stages - 1.0  # other microbatches that prompts reach
    if np.any(front):
        whole = estimate_decode_step_s(step, decode, t.context)
        split = estimate_decode_step_s(step, decode / step.stages, t.context)
        # a step with 1 / g of the sequences takes whole - grows + grows / g
        grows = np.maximum(whole - split, 0.0) * step.stages / np.maximum(step.stages - 1, 1.0)
        late = average_slices(front) * step.stages - (whole - grows)
        enough = (
            np.clip(
                np.where(late > 0, grows / np.maximum(late, 1e-12), step.stages), 1.0, step.stages
            )
            - 1
        )
        even = np.exp(-beside)  # rounds without a prompt, which keep the microbatches' distances
        fed = even * fed + (1 - even) * enough
    lasts = np.expm1(each) / each
    lasting = fed * formed * lasts / (fed + formed * lasts + 1e-30)
    past = np.minimum(stays / (lasts + 1 / np.maximum(t.output_steps_variance, 1e-9)), 1e9)
    others = lasting + (np.minimum(first, fed) - lasting) * -np.expm1(-past) / past
    full = np.minimum(
        (decode * (1 + step.num_draft_tokens) + beside * size) / step.max_tokens, step.stages
    )
    return np.minimum(np.maximum(1 + others, full), np.maximum(running, 1.0))


def estimate_slowest_microbatch(
    step: StepModel,
    prompts: np.ndarray,
    microbatches: np.ndarray,
    chunks: np.ndarray,
    room: np.ndarray,
) -> np.ndarray:
    """Estimate how many of a round's `prompts` delay a pipeline's microbatches.

    All microbatches wait behind the slowest one. Its prompts are the maximum of g Poisson counts
    with mean p / g: p if it is small and p / g + 0.74 (1 - 1 / g) p^0.5 if it is large, as far as a
    step has `room`. The chunks of a prompt follow each other through the stages: only the first
    delays the others from end to end.
    """
    if np.all(step.stages == 1):
        return prompts
    even = prompts / microbatches
    limit = np.maximum(np.minimum(prompts, room), even)
    alone = (1 - 1 / microbatches) / chunks * prompts
    return np.minimum(even + alone / np.sqrt(1 + prompts / 0.55), limit)


def estimate_prompts_of_slowest_rank(
    step: StepModel,
    prompts: np.ndarray,
    chunks: np.ndarray,
    attention: np.ndarray,
    room: np.ndarray,
) -> np.ndarray:
    """Estimate the prompts whose time a step takes if each rank on its clock has `prompts` of them.

    Chunks of prompts are Poisson counts of each rank. What a rank does alone takes as long as for
    the largest of them, and what all do together, `shared_fraction` of a prompt's time but for its
    `attention` (the fraction of the time that it takes), as long as for their mean,
    unless all are padded to the largest. No step has more than its `room`.
    """
    if np.all(step.ranks == 1):
        return prompts
    mean, limit = prompts * chunks, np.maximum(room * chunks, 1.0)
    chance = np.exp(-np.minimum(mean, MAX_COUNTED_CHUNKS / 2))
    below, largest = chance, np.zeros_like(mean)
    for k in range(1, MAX_COUNTED_CHUNKS):
        largest = largest + (1 - below**step.ranks)
        chance = chance * np.minimum(mean, MAX_COUNTED_CHUNKS / 2) / k
        below = np.minimum(below + chance, 1.0)
    slowest = np.maximum(np.minimum(largest, limit) / chunks, prompts)
    is_padded = step.max_tokens <= step.padded_tokens
    together = np.where(is_padded, 0.0, step.shared_fraction * (1 - attention))
    return np.where(step.ranks > 1, together * prompts + (1 - together) * slowest, prompts)


def estimate_spilled_steps(arriving: np.ndarray, room: np.ndarray, t: TrafficMix) -> np.ndarray:
    """Estimate the steps that a prompt waits, with `arriving` prompts per step and room for `room`.

    The backlog after each step is a random walk that cannot fall below 0. Its mean for normal
    increments is sd / (2 b) - 0.5826 sd + sd b / 4 with b = (room - arriving) / sd (Chang and Peres
    1997). The exponential has the same first terms and holds for large b too.
    """
    sd = np.sqrt(arriving * average_slices(t.prompts**2)) / average_slices(t.prompts) + 1e-9
    b = np.maximum((room - arriving) / sd, 0.25)
    return sd / (2 * b) * np.exp(-1.1652 * b - 0.18 * b**2) / room


def estimate_receiving_microbatches(
    step: StepModel,
    prompts: np.ndarray,
    microbatches: np.ndarray,
    plain: np.ndarray,
    front: np.ndarray,
    room: np.ndarray,
) -> np.ndarray:
    """Estimate the microbatches that receive a round's `prompts` in a closed loop.

    Microbatches behind a long step end a stage's time apart, and prompts arrive `front` s after
    others end. So one microbatch of those that end within that time takes all prompts released
    before, and the next long step takes the rest.
    """
    if np.all(step.stages == 1):
        return microbatches
    behind = (microbatches - 1) * plain / step.stages
    taking = np.minimum(1 + behind / np.maximum(average_slices(front), 1e-9), microbatches)
    even = np.exp(-prompts)  # rounds without a prompt, which keep the microbatches' distances
    return np.where(room >= 1, even * microbatches + (1 - even) * taking, microbatches)
