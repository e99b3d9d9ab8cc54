"""The last word on a plan: the closed form ranks thousands of candidates, the replay confirms the few at the top.

A closed form averages; a replay has the queues, bursts and shared steps of one run (`planner.replay`). A candidate that
misses a target there is passed over, and tried again with one replica more.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate import Candidate, judge, milliseconds
from planner.replay import DEFAULT_SECONDS, replay_workload
from planner.scenario import Scenario
from planner.speculation import step_of

RUN = 1_500
"""Requests of one engine that a confirmation replays, where the traffic is not a trace of its own."""
TRIES = 200
"""Candidates that are replayed at most."""
LUCK = 1.05
"""A target counts as missed when a run is this much above it: ten minutes of random arrivals have luck of their own."""


@dataclass(frozen=True)
class Confirmed:
    """What the replay says of the candidates that the closed form puts first."""

    holding: tuple[Candidate, ...]  # from best to worst, as far as they were looked at
    failing: tuple[Candidate, ...]  # with what they miss

    def other(self, chosen: Candidate) -> Candidate | None:
        """The best that holds with another GPU or layout than `chosen`."""
        kind = (chosen.deployment.gpu, chosen.shape)
        return next((c for c in self.holding if (c.deployment.gpu, c.shape) != kind), None)

    @property
    def safe(self) -> Candidate | None:
        """The best that holds at the pessimistic end too."""
        return next((c for c in self.holding if not c.at_risk), None)

    @property
    def enough(self) -> bool:
        """A choice, a runner-up, and a safer one where the choice is at risk."""
        return bool(self.holding and self.other(self.holding[0]) and self.safe)


def replayed(scenario: Scenario, candidate: Candidate) -> Candidate:
    """`candidate` with the targets that it misses when one engine's share of the traffic is replayed."""
    deployment, workload = candidate.deployment, candidate.prediction.workload
    assert workload is not None
    if not scenario.service_level:
        return candidate
    if workload.trace is None:
        asked = workload.num_prompts or 10 * (workload.concurrency or 0) or (workload.rate or 0) * DEFAULT_SECONDS
        engines = deployment.layout.replicas * deployment.layout.dp
        workload = replace(workload, num_prompts=max(round(min(asked, RUN * engines)), 1))
    run = replay_workload(deployment, candidate.prediction.memory.pool, step_of(deployment), workload)
    missed, margin = [], candidate.margin
    for target in scenario.service_level:
        seconds = run.stats(target.metric)[target.percentile]
        margin = max(margin, seconds / target.seconds)
        if seconds > LUCK * target.seconds:
            is_, limit = milliseconds(seconds), milliseconds(target.seconds)
            missed.append((target.name, f"{target.name} is {is_} when replayed, above {limit}"))
    if not missed:
        return candidate
    names, sentences = zip(*missed, strict=True)
    return replace(candidate, misses=sentences, constraints=names, margin=margin)


def confirm(scenario: Scenario, meeting: Sequence[Candidate]) -> Confirmed:
    """Replay candidates that meet the service level in closed form, best first, until there is enough to decide."""
    pending, found = list(meeting), Confirmed((), ())
    most = {wanted.gpu: wanted.at_most for wanted in scenario.gpus}
    for _ in range(TRIES):
        if not pending or found.enough:
            break
        tried = replayed(scenario, pending.pop(0))
        if tried.meets:
            found = replace(found, holding=(*found.holding, tried))
            continue
        found = replace(found, failing=(*found.failing, tried))
        layout = tried.deployment.layout
        if (layout.replicas + 1) * layout.gpus_per_replica <= most.get(tried.deployment.gpu, math.inf):
            more = judge(scenario, tried.deployment, layout.replicas + 1, tried.preference)
            if more.meets:
                insort(pending, more, key=lambda candidate: candidate.rank)
    return found
