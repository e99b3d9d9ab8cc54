"""What prompts do to an engine: the steps that they ride on, bursts of them, and what does not fit into a step.

Arrays have three axes, [cases, what is varied, slices of a distribution of lengths]; see
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
"""Slices of a distribution over which it is integrated: finer in the tail, around the 95th and 99th percentiles."""
SLICE_FRACTIONS = np.diff(SLICE_EDGES)
SLICE_MIDPOINTS = (SLICE_EDGES[1:] + SLICE_EDGES[:-1]) / 2
ZERO_SLICES = np.zeros_like(SLICE_FRACTIONS)


@dataclass(frozen=True)
class TrafficMix:
    """Workloads as the mean lengths of `SHARES` of their requests."""

    prompts: np.ndarray  # tokens to compute, [cases, 1, slices]
    outputs: (
        np.ndarray
    )  # the same, streamed: a step of speculative decoding streams several tokens as one
    tokens: np.ndarray  # mean output tokens, [cases, 1, 1] as the rest
    cached: np.ndarray  # prompt tokens found in the prefix cache, [cases, 1, slices]
    context: np.ndarray  # mean tokens that a decoding sequence attends to
    jitter: np.ndarray  # variance of the tokens that a step streams, by their mean squared

    @property
    def output_steps_variance(self) -> np.ndarray:
        """Variance of the steps that an output takes."""
        return compute_slice_variance(self.outputs) + average_slices(self.outputs) * self.jitter


@lru_cache(maxsize=256)
def _compute_slice_means(lengths: LengthDistribution) -> np.ndarray:
    """Mean length of each slice."""
    return lengths.compute_slice_means(SLICE_EDGES)


def build_traffic_mix(workloads: Sequence[Workload], step: StepModel) -> TrafficMix:
    """The traffic of every case, whose step costs are stacked."""
    prompts = np.stack([_compute_slice_means(workload.prompt) for workload in workloads])[:, None]
    tokens = np.stack([_compute_slice_means(workload.output) for workload in workloads])[:, None]
    tokens = np.where(tokens[..., -1:] < 1.5, 1.0, tokens)  # whole tokens: all have one
    prefix = stack_scalars([workload.prefix_tokens or np.inf for workload in workloads])
    share = stack_scalars([workload.prefix_hit_rate for workload in workloads])
    cached, later, per_step = share * np.minimum(prompts, prefix), tokens - 1, step.tokens_per_step
    # the last step yields more than is left (renewal theory)
    past = ((step.tokens_variance + per_step**2) / per_step - 1) / 2
    outputs = 1 + np.clip((later + past) / per_step, np.minimum(later, 1.0), later)
    context = average_slices(prompts) + average_slices(tokens**2) / (2 * average_slices(tokens))
    jitter = np.asarray(step.tokens_variance) / per_step**2
    return TrafficMix(
        np.maximum(prompts - cached, 1), outputs, average_slices(tokens), cached, context, jitter
    )


def average_slices(values: np.ndarray) -> np.ndarray:
    """Mean over the slices."""
    return (values @ SLICE_FRACTIONS)[..., None]


def compute_slice_variance(values: np.ndarray) -> np.ndarray:
    """Variance over the slices."""
    return np.maximum(average_slices(values**2) - average_slices(values) ** 2, 0.0)


def estimate_decode_step_s(step: StepModel, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    """A step of `batch` decoding sequences and nothing else."""
    return step.estimate_decode_step_s(np.maximum(batch, 1.0), context)


def estimate_min_engine_s(step: StepModel, t: TrafficMix, running: np.ndarray) -> np.ndarray:
    """What a request takes of an engine at least, s: its tokens and rows in the fullest steps, and its attention.

    A token is cheapest in a full step, for it shares reading the weights with most others; all
    stages of a pipeline work at once.
    """
    width, later = 1 + step.num_draft_tokens, np.maximum(average_slices(t.outputs) - 1, 0.0)
    most = np.minimum(step.max_tokens, running * np.maximum(t.prompts[..., -1:], width))
    rows, seats = np.maximum(running * width, 1.0), np.maximum(running, 1.0)
    each = (
        (step.interpolate_tokens_s(most) + step.fixed_s)
        / most
        * (average_slices(t.prompts) + later * width)
    )
    each = (
        each
        + (1 + later * width) * step.interpolate_rows_s(rows) / rows
        + later * step.interpolate_sequences_s(seats) / seats
    )
    attention = average_slices(
        step.estimate_prefill_attention_s(t.prompts, t.cached)
    ) + later * step.estimate_decode_attention_s(t.context)
    return (each + attention) / step.stages


def estimate_prefill_s(
    step: StepModel, t: TrafficMix, beside: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(chunks, s that they add to the steps they ride on, its share of them by tokens) of every prompt, [..., slices].

    `beside` sequences decode in those steps, and in the last one there are `others` more prompts if
    they fit.
    """
    beside = beside * (1 + step.num_draft_tokens)
    budget = np.maximum(step.max_tokens - beside, 1.0)
    chunks = np.ceil(t.prompts / budget)
    full, size = chunks - 1, average_slices(t.prompts)  # chunks that take all of a step's budget
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
    """Share of every prompt that the first of its chunks holds, where `beside` sequences decode."""
    if np.all(step.stages == 1):  # nobody asks
        return np.ones_like(t.prompts)
    return np.minimum(
        np.maximum(step.max_tokens - beside * (1 + step.num_draft_tokens), 1.0) / t.prompts, 1.0
    )


def estimate_burst_ttft_s(step: StepModel, t: TrafficMix, requests: np.ndarray) -> np.ndarray:
    """When `requests` prompts that arrive together have their first tokens, [cases, 1, slices] from short to long ones.

    Each step takes max_num_batched_tokens, of which one goes to each sequence that decodes already:
    with d of them a step finishes (max_num_batched_tokens - d) / L prompts of L tokens, at its end.
    """
    sizes, size, width = t.prompts, average_slices(t.prompts), 1 + step.num_draft_tokens
    # those of the first step decode from the next one on
    decoding = np.maximum(requests * SLICE_MIDPOINTS - step.max_tokens / size, 0.0) / step.stages
    # where they leave nothing, prompts take the places of those that end
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
    each = each + step.prompt_s * (
        requests * size > step.max_tokens
    )  # of the prompt that is cut at its end
    steps = requests * SLICE_FRACTIONS * sizes / budget
    before = steps.cumsum(axis=-1)
    reached = before - steps / 2 + sizes / (2 * budget)
    ends = np.minimum(np.ceil(reached - 1e-9), np.maximum(before[..., -1:], 1.0))
    done = (steps * each).cumsum(axis=-1) + (ends - before) * each
    return (
        done / step.stages + (1 - 1 / step.stages) * each
    )  # stages of a pipeline work on as many steps


def estimate_microbatches(
    step: StepModel, t: TrafficMix, running: np.ndarray, decode: np.ndarray,
    first: np.ndarray | float = 0.0,
    stays: np.ndarray | float = np.inf, front: np.ndarray = ZERO_SLICES,
) -> np.ndarray:  # fmt: skip
    """Microbatches among which a pipeline's sequences are spread, 1 to its number of stages.

    A sequence is scheduled with those whose step ends together with its own, and a new prompt joins
    whichever is scheduled next. So a new microbatch only forms where prompts do not fit into a
    step, and one ends when it is empty: with m sequences on average, after (e^m - 1) / m stays
    (busy period of M/M/inf). In a closed loop prompts come `front` s after the ends of others.
    While a long step runs, the rest follow it closely, a stage's time apart, and one that ends less
    than `front` after the one before it gets none. `first` are there beside one at the start of a
    run of so many `stays`; outputs of one length keep them as they are. There are never fewer than
    hold the tokens of a round.
    """
    if np.all(step.stages == 1):
        return np.ones_like(running)
    outputs, size = average_slices(t.outputs), average_slices(t.prompts)
    budget = np.maximum(step.max_tokens - decode * (1 + step.num_draft_tokens), 1.0)
    beside = np.maximum(running / outputs, 1e-9)  # prompts of a round
    least = np.floor(budget / size) + 1.0
    # at least so many of a Poisson number: Chernoff's bound, and what it is too much by (Bahadur
    # and Rao 1960)
    crowd = np.exp(np.minimum(least - beside - least * np.log(least / beside), 0.0))
    crowd = crowd * np.minimum(np.sqrt(least / (2 * np.pi)) / np.maximum(least - beside, 1e-9), 1.0)
    crowd = np.where(beside < least, crowd, 1.0)
    formed = running * average_slices(1.0 * (t.prompts > budget)) + outputs * np.where(
        least > 1, crowd, 0.0
    )
    each = np.minimum(running / step.stages, 30.0) + 1e-9
    fed = step.stages - 1.0  # others that prompts reach
    if np.any(front):
        one, many = (
            estimate_decode_step_s(step, decode, t.context),
            estimate_decode_step_s(step, decode / step.stages, t.context),
        )
        grows = np.maximum(one - many, 0.0) * step.stages / np.maximum(step.stages - 1, 1.0)
        late = average_slices(front) * step.stages - (
            one - grows
        )  # a step of 1 / g of all takes one - grows + grows / g
        enough = (
            np.clip(
                np.where(late > 0, grows / np.maximum(late, 1e-12), step.stages), 1.0, step.stages
            )
            - 1
        )
        even = np.exp(
            -beside
        )  # rounds without a prompt leave all microbatches as far apart as they are
        fed = even * fed + (1 - even) * enough
    lasts = np.expm1(each) / each
    kept = fed * formed * lasts / (fed + formed * lasts + 1e-30)
    past = np.minimum(stays / (lasts + 1 / np.maximum(t.output_steps_variance, 1e-9)), 1e9)
    others = kept + (np.minimum(first, fed) - kept) * -np.expm1(-past) / past
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
    """Prompts that delay a round of a pipeline's microbatches, of the `prompts` that it holds.

    All wait behind the slowest microbatch. Its prompts are the maximum of g Poisson counts of mean
    p / g: p when it is small and p / g + 0.74 (1 - 1 / g) p^0.5 when it is large, as far as a step
    has `room`. Chunks of one prompt follow each other through the stages: only the first keeps the
    others waiting from end to end.
    """
    if np.all(step.stages == 1):
        return prompts
    even = prompts / microbatches
    most = np.maximum(np.minimum(prompts, room), even)
    alone = (1 - 1 / microbatches) / chunks * prompts
    return np.minimum(even + alone / np.sqrt(1 + prompts / 0.55), most)


def estimate_spilled_steps(arriving: np.ndarray, room: np.ndarray, t: TrafficMix) -> np.ndarray:
    """Steps that a prompt waits because those before it fill the steps: `arriving` prompts in each, room for `room`.

    What is left over after each step is a random walk that cannot fall below 0. Its mean for normal
    increments is sd / (2 b) - 0.5826 sd + sd b / 4 with b = (room - arriving) / sd (Chang and Peres
    1997); the exponential has the same first terms and holds for large b too.
    """
    sd = np.sqrt(arriving * average_slices(t.prompts**2)) / average_slices(t.prompts) + 1e-9
    b = np.maximum((room - arriving) / sd, 0.25)
    return sd / (2 * b) * np.exp(-1.1652 * b - 0.18 * b**2) / room


def estimate_receiving_microbatches(
    step: StepModel, prompts: np.ndarray, microbatches: np.ndarray, plain: np.ndarray,
    front: np.ndarray,
    room: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Microbatches that take a round's `prompts` in a closed loop.

    Those behind a long step end a stage's time apart, and prompts come `front` s after the ends of
    others, so one of those that end within that time takes what all before it released; the next
    long step takes the rest.
    """
    if np.all(step.stages == 1):
        return microbatches
    behind = (microbatches - 1) * plain / step.stages
    taking = np.minimum(1 + behind / np.maximum(average_slices(front), 1e-9), microbatches)
    even = np.exp(
        -prompts
    )  # rounds without a prompt leave the microbatches as far apart as they are
    return np.where(room >= 1, even * microbatches + (1 - even) * taking, microbatches)
