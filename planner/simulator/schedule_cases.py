"""Schedule cases: CASE.json with requests and engine arguments in, vLLM's step log out."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TextIO

import numpy as np
from pydantic import Field

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.files import replace_atomically
from planner.core.readers import parse_json, read_text
from planner.core.units import MAX_COUNT
from planner.simulator.kernel_types import (
    NOTE_ENTRY,
    NOTE_FINISHED,
    NOTE_PREEMPTED,
    NOTE_STEP,
    EngineRules,
    RequestBatch,
    StepCostTable,
)
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_requests, uses_v033_scheduler
from planner.workload.request_generator import build_segment_blocks

STEP_LOG_COLUMNS = (
    "step",
    "scheduled_tokens",
    "running",
    "waiting",
    "free_blocks",
    "preempted",
    "finished",
    "scheduled",
)
"""Columns of the step log."""

MAX_LOGGED_TOKENS = 3_000_000
"""Most tokens of all requests of a case, since its step log lists them."""
CasePositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]
CaseStep = Annotated[int, Field(ge=0, le=2**53, strict=True)]


class FullAttentionGroup(StrictEntry):
    """A KV-cache group of full-attention layers."""

    type: Literal["full"]


class SlidingWindowGroup(StrictEntry):
    """A KV-cache group of sliding-window layers."""

    type: Literal["sliding_window"]
    window: CasePositiveInt


class ScheduleCaseConfig(StrictEntry):
    """Engine arguments of a case; `num_blocks` includes the engine's null block."""

    max_num_seqs: CasePositiveInt
    max_num_batched_tokens: CasePositiveInt
    num_blocks: Annotated[int, Field(ge=2, le=2**24, strict=True)]
    block_size: Annotated[int, Field(ge=1, le=2**20, strict=True)]
    max_model_len: CasePositiveInt
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)] = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False
    groups: tuple[
        Annotated[FullAttentionGroup | SlidingWindowGroup, Field(discriminator="type")], ...
    ] = (FullAttentionGroup(type="full"),)
    engine_version: str | None = None

    def build_rules(self) -> EngineRules:
        """Build the rules that the simulator reads."""
        groups = [
            (group.window if isinstance(group, SlidingWindowGroup) else 0, self.block_size)
            for group in self.groups
        ]
        same = {
            name: value for name, value in self if name in EngineRules._fields and name != "groups"
        }
        recent, priority = uses_v033_scheduler(self.engine_version), self.policy == "priority"
        return EngineRules(
            **same, groups=np.array(groups), uses_v033_scheduler=recent, priority=priority
        )


class ScheduleCaseRequest(StrictEntry):
    """One request; `prompt` is a list of (name, tokens).

    Equal names are equal tokens; out:ID is what request ID generated.
    """

    id: str
    arrival_step: CaseStep
    output_len: CasePositiveInt
    priority: Annotated[int, Field(ge=-(2**53), le=2**53, strict=True)] = 0
    prompt_len: CasePositiveInt | None = None
    prompt: list[tuple[str, CasePositiveInt]] | None = Field(default=None, min_length=1)

    @property
    def segments(self) -> list[tuple[str, int]]:
        """The prompt as segments; one without names is unlike all others."""
        return self.prompt or [(f"only:{self.id}", self.prompt_len or 0)]


def read_schedule_case(path: Path) -> tuple[ScheduleCaseConfig, list[ScheduleCaseRequest]]:
    """Read and check a CASE.json.

    Raises `PlannerError` that names the request and the field.
    """
    data = parse_json(read_text(path), path.name)
    if (
        not isinstance(data, dict)
        or set(data) != {"config", "requests"}
        or not isinstance(data["requests"], list)
        or not data["requests"]
    ):
        raise PlannerError(
            f'{path.name}: expected an object with "config" and a list of "requests" that is not'
            " empty"
        )
    config = validate_entry(ScheduleCaseConfig, data["config"], f"{path.name}, config")
    if not config.groups:
        raise PlannerError(
            f"{path.name}, config, field groups: the list is empty; leave it out for full attention"
        )
    requests: list[ScheduleCaseRequest] = []
    for position, fields in enumerate(data["requests"]):
        name = (
            fields.get("id", f"number {position}")
            if isinstance(fields, dict)
            else f"number {position}"
        )
        requests.append(validate_entry(ScheduleCaseRequest, fields, f"{path.name}, request {name}"))
    _validate_requests(path.name, config, requests)
    return config, requests


def _validate_requests(
    file: str, config: ScheduleCaseConfig, requests: Sequence[ScheduleCaseRequest]
) -> None:
    ids = Counter(request.id for request in requests)
    before = 0
    for request in requests:
        unknown = [
            name
            for name, _ in request.prompt or []
            if name.startswith("out:") and name[4:] not in ids
        ]
        for is_wrong, problem in (
            (ids[request.id] > 1, f"id: {ids[request.id]} requests have this id; ids must differ"),
            (
                any(letter in request.id for letter in ";:") or not request.id.isprintable(),
                "id: expected printable text without ';' and ':', which the step log needs",
            ),
            (
                request.arrival_step < before,
                f"arrival_step: {request.arrival_step} comes after {before}; sort by arrival",
            ),
            (
                (request.prompt is None) == (request.prompt_len is None),
                "prompt_len: give either prompt_len or prompt",
            ),
            (bool(unknown), f"prompt: {', '.join(unknown[:1])} names no request of this case"),
        ):
            if is_wrong:
                raise PlannerError(f"{file}, request {request.id}, field {problem}")
        before = request.arrival_step

    chunk = min(
        config.max_num_batched_tokens,
        config.long_prefill_token_threshold or math.inf,
        config.block_size if config.enable_prefix_caching else math.inf,
    )
    steps = sum(sum(tokens for _, tokens in r.segments) / chunk + r.output_len for r in requests)
    if steps > MAX_LOGGED_TOKENS:
        raise PlannerError(
            f"{file}: requests of {steps:.3g} steps or blocks together are more than the"
            f" {MAX_LOGGED_TOKENS:,} replayed"
        )


def _build_request_batch(
    config: ScheduleCaseConfig, requests: Sequence[ScheduleCaseRequest]
) -> RequestBatch:
    prompt = np.array([sum(tokens for _, tokens in request.segments) for request in requests])
    output = np.array([request.output_len for request in requests])
    traffic = RequestBatch(
        np.array([request.arrival_step for request in requests], float), prompt, output
    )
    if config.enable_prefix_caching and prompt.max() < config.max_model_len:
        room = np.clip(config.max_model_len - prompt, 0, output).tolist()
        whole = [
            [*r.segments, (f"out:{r.id}", tokens)] for r, tokens in zip(requests, room, strict=True)
        ]
        content, start = build_segment_blocks(whole, config.block_size)
        traffic = traffic._replace(content=content, content_start=start)
    urgency = np.argsort(np.array([request.priority for request in requests]), kind="stable")
    return traffic._replace(rank=np.argsort(urgency)) if config.policy == "priority" else traffic


def run_schedule_case(
    path: str | Path, step_log: str | Path | None = None, fixed_step_time: float = 1.0
) -> SimulationResult:
    """Simulate the CASE.json at `path` with steps of `fixed_step_time` seconds.

    The step log (STEPS.csv) goes to `step_log`.
    """
    if not (0 < fixed_step_time < float("inf")):
        raise PlannerError(
            f"fixed_step_time must be a positive number of seconds, got {fixed_step_time!r}"
        )
    path = Path(path)
    config, requests = read_schedule_case(path)
    names = [request.id for request in requests]
    table, traffic = StepCostTable(np.zeros(1), np.zeros(1)), _build_request_batch(config, requests)
    result = simulate_requests(
        config.build_rules(),
        table,
        traffic,
        names=names,
        location=path.name,
        collect_timing=False,
        log_steps=True,
    )
    if step_log is not None:
        with (
            replace_atomically(Path(step_log)) as (part,),
            part.open("w", newline="", encoding="utf-8") as file,
        ):
            write_step_log(file, result, names)
    return replace(result, clock_scale=fixed_step_time)


def write_step_log(file: TextIO, result: SimulationResult, names: Sequence[str]) -> None:
    """Write the step log as CSV, one line per step that schedules at least one token."""
    steps = result.outcome.get_notes(NOTE_STEP, 5).astype(np.int64).tolist()
    cells: Mapping[int, list[list[str]]] = {
        kind: [[] for _ in steps] for kind in (NOTE_PREEMPTED, NOTE_FINISHED, NOTE_ENTRY)
    }
    for kind, rows in cells.items():
        for row, request, tokens in result.outcome.get_notes(kind, 3).astype(np.int64).tolist():
            rows[row].append(f"{names[request]}:{tokens}" if kind == NOTE_ENTRY else names[request])
    writer = csv.writer(file)
    writer.writerow(STEP_LOG_COLUMNS)
    for row, counts in enumerate(steps):
        writer.writerow(counts + [";".join(rows[row]) for rows in cells.values()])
