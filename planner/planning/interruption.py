"""What a plan at spot prices still does when an interruption takes one of its replicas."""

from dataclasses import dataclass, replace

from planner.core.number_format import format_probability, format_seconds_range
from planner.latency.startup_time import StartupTime, estimate_startup
from planner.planning.candidate import Candidate
from planner.planning.scenario import Scenario
from planner.planning.tolerance import simulate_candidate


@dataclass(frozen=True)
class Interruption:
    """The replicas that an interruption leaves, and how likely they meet every target."""

    replicas: int  # before it, with spares
    probability: float
    confidence: float  # that the scenario asks for
    startup: StartupTime | None  # until another replica answers, once there is a GPU
    replicas_per_machine: int  # that go together

    @property
    def spares_to_add(self) -> int:
        """Spare replicas with which the targets are met through an interruption: as many as before are left."""
        return int(self.probability < self.confidence)

    @property
    def summary(self) -> str:
        """What an interruption takes and what the rest does, in a line."""
        left = self.replicas - 1
        if not left:
            return "an interruption takes the only replica away"
        odds = format_probability(self.probability, self.confidence)
        rest = f"the other {left} are" if left > 1 else "the other is"
        return f"with one replica interrupted, {rest} {odds} likely to meet every target"

    @property
    def sentence(self) -> str:
        """The summary, and what would help."""
        text = self.summary
        if self.replicas == 1:
            start = f" in {format_seconds_range(self.startup.total)}" if self.startup else ""
            text += f": no requests are served until a GPU is free and another starts{start}"
        if self.spares_to_add:
            text += "; with `spare_replicas: 1` the targets are still met"
        if self.replicas_per_machine > 1:
            text += (
                f"; one machine holds {self.replicas_per_machine} replicas, which are lost together:"
                " set smaller machine sizes in `sold_in`"
            )
        return text


def estimate_interruption(scenario: Scenario, candidate: Candidate) -> Interruption | None:
    """Estimate what an interruption leaves; None at other prices than spot, or for work that can wait.

    A spare takes the place of the replica; without one the same load is simulated on one fewer.
    """
    if scenario.prices.tier != "spot" or scenario.offline or candidate.is_disaggregated:
        return None
    deployment = candidate.deployment
    probability = candidate.probability if deployment.spare_replicas else 0.0
    if not deployment.spare_replicas and (left := deployment.layout.replicas - 1):
        fewer = replace(candidate, deployment=deployment.with_replicas(left))
        probability = simulate_candidate(scenario, fewer).probability
    together = max(deployment.machines, default=0) // deployment.layout.gpus_per_replica
    return Interruption(
        deployment.num_replicas, probability, scenario.confidence,
        estimate_startup(deployment, scenario.storage),
        min(max(together, 1), deployment.num_replicas),
    )  # fmt: skip
