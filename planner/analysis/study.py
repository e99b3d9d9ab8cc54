"""What a chapter studies: the plan's own deployment under its own traffic, and what may be changed.

Whatever a chapter tries, it changes on this deployment, so that each view starts at the plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import pandas as pd

from planner.analysis.layout_tables import (
    describe_studied_deployment,
    find_plan_to_study,
    relayout_candidate,
    resize_layout,
)
from planner.analysis.load_ramp import build_surge_workload, choose_timeline_s, simulate_timeline
from planner.analysis.load_sweeps import (
    isolate_replica,
    simulate_prefill_gaps,
    sweep_concurrency,
    sweep_long_prompt,
)
from planner.analysis.speculation_tables import EXAMPLE_DRAFT
from planner.analysis.sweep import read_tail, sweep_args
from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import SpeculationSpeedup, evaluate_speculation
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.evaluation import get_candidate_workload
from planner.planning.scenario import Scenario
from planner.planning.search import Plan, get_reference_deployment
from planner.workload.workload import Workload

Timelines = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Study:
    """The plan of a scenario without pools; with one `change` where nothing fits otherwise."""

    answered: Plan
    plan: Plan
    change: str = ""
    is_current: bool = False  # of the scenario that the cockpit saved, which chapters may change

    @classmethod
    def begin(cls, answered: Plan, is_current: bool = False, *, fits: bool = False) -> "Study":
        """Study a plan; with `fits`, the plan after the first change with which something fits."""
        plan, change = answered.without_disaggregation, ""
        if fits:
            plan, change = find_plan_to_study(plan)
        return cls(answered, plan, change, is_current)

    @property
    def note(self) -> str:
        """What is studied, if that is not simply the plan or may be missed."""
        return describe_studied_deployment(self.answered, self.plan, self.change)

    @property
    def scenario(self) -> Scenario:
        """The scenario of the studied plan."""
        return self.plan.scenario

    @property
    def best(self) -> Candidate:
        """The chosen candidate, else the closest; `PlannerError` if nothing fits."""
        if self.plan.best is None:
            raise PlannerError(str(self.plan.binding_constraint))
        return self.plan.best

    @cached_property
    def deployment(self) -> Deployment:
        """The plan's deployment; the widest layout if nothing fits."""
        return get_reference_deployment(self.plan)

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan of the deployment."""
        return get_memory_plan(self.deployment)

    @property
    def performance(self) -> Performance:
        """What the plan is predicted to do; `PlannerError` if nothing fits."""
        if (performance := self.best.prediction.performance) is None:
            raise PlannerError(self.memory.reason)
        return performance

    @cached_property
    def workload(self) -> Workload:
        """The traffic of all replicas."""
        return get_candidate_workload(self.scenario, self.deployment)

    @cached_property
    def replica(self) -> Deployment:
        """One replica of the deployment."""
        return self.deployment.with_replicas(1)

    @cached_property
    def replica_workload(self) -> Workload:
        """The part of the traffic that one replica gets."""
        return isolate_replica(self.scenario, self.best)[1]

    @property
    def decode_batch(self) -> int:
        """The sequences that decode at once on average; 1 if nothing fits."""
        performance = self.plan.best and self.plan.best.prediction.performance
        return max(round(performance.decode_batch), 1) if performance else 1

    @property
    def context(self) -> int:
        """The mean context of a decoding sequence (tokens)."""
        return round(self.scenario.workload.mean_decode_context)

    @property
    def requests_in_flight(self) -> int:
        """Requests at once on one replica, by Little's law."""
        inside = self.performance.request_tps.mid * self.performance.e2e["mean"].mid
        return max(1, round(inside / self.deployment.layout.replicas))

    def try_layout(self, gpu: str, tp: int, pp: int, replicas: int) -> Candidate:
        """Simulate the plan on another GPU or in another layout; itself at its own."""
        layout = resize_layout(self.deployment.layout, tp, pp, replicas)
        names = [candidate_gpu.gpu.name for candidate_gpu in self.scenario.gpus]
        if gpu == self.deployment.gpu.name and layout == self.deployment.layout:
            return self.best
        return relayout_candidate(self.plan, self.scenario.gpus[names.index(gpu)], layout)

    def sweep_args(self, name: str, values: Iterable[int]) -> pd.DataFrame:
        """Sweep one engine argument under the plan's traffic, simulated."""
        axes = {name: sorted(set(values))}
        return sweep_args(self.deployment, axes, partial(read_tail, workload=self.workload))

    def sweep_concurrency(self, requests: Iterable[int]) -> pd.DataFrame:
        """Sweep the requests always in flight on one replica, analytically."""
        return sweep_concurrency(self.replica, self.replica_workload, requests)

    @cached_property
    def timeline_s(self) -> float:
        """The seconds of a timeline of one engine."""
        return choose_timeline_s(self.deployment, self.workload)

    def simulate_timelines(self, cases: Mapping[str, Deployment | Workload]) -> Timelines:
        """Simulate one engine, with each other deployment or traffic: its tail and its gauges."""
        timelines = {}
        for name, case in cases.items():
            deployment = self.deployment if isinstance(case, Workload) else case
            workload = case if isinstance(case, Workload) else self.workload
            text, gauges = simulate_timeline(deployment, workload, self.timeline_s)
            timelines[f"{name}: {text}"] = gauges
        return timelines

    def build_bursts(self, burstiness: float, surge: float) -> dict[str, Workload]:
        """Build the traffic as planned, in bursts, and with a surge in the middle."""
        return {
            "as planned": self.workload,
            f"burstiness {burstiness:g}": replace(self.workload, trace=None, burstiness=burstiness),
            f"{surge:g} times the rate in the second third": build_surge_workload(
                self.workload, surge, self.timeline_s
            ),
        }

    def simulate_long_prompt(
        self, deployment: Deployment, prompt: int, sequences: int
    ) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
        """Simulate a long prompt beside decoding `sequences`: gaps by case, and other budgets."""
        budgets = {2048, deployment.args.max_num_batched_tokens}
        ladder = {size for size in (512, 1024, 2048, 4096, 8192) if size >= 2 * sequences}
        load, gaps = self.replica_workload, {}
        for budget in sorted(budgets):
            changed = deployment.with_args(max_num_batched_tokens=budget)
            gaps[f"with chunked prefill, {budget:,} tokens a step"] = simulate_prefill_gaps(
                changed, load, sequences, prompt
            )
        gaps["without: the whole prompt in one step"] = simulate_prefill_gaps(
            deployment, load, sequences, prompt, chunked=False
        )
        sizes = sorted(ladder | {deployment.args.max_num_batched_tokens})
        return gaps, sweep_long_prompt(deployment, load, sequences, prompt, sizes)

    @cached_property
    def drafted(self) -> Deployment:
        """The deployment with its own drafts, the scenario's, or an example's."""
        entry = self.scenario.speculation
        config = self.deployment.speculation or (entry.to_config() if entry else EXAMPLE_DRAFT)
        return replace(self.deployment, speculation=config)

    @cached_property
    def plain(self) -> Deployment:
        """The deployment without drafts."""
        return replace(self.deployment, speculation=None)

    def try_draft(self, method: str, k: int, acceptance: float) -> Deployment:
        """Draft in another way, or as the plan does."""
        assert self.drafted.speculation is not None
        changed = replace(
            self.drafted.speculation, method=method, num_speculative_tokens=k,
            acceptance_rate=acceptance,
        )  # fmt: skip
        return replace(self.drafted, speculation=changed)

    def compare_draft(
        self, drafted: Deployment | None = None, batch: int | None = None
    ) -> SpeculationSpeedup:
        """Compare decoding with drafts to decoding without, at the plan's batch or another."""
        memory = get_memory_plan(self.plain)
        return evaluate_speculation(
            drafted or self.drafted, batch or self.decode_batch, self.context, memory
        )
