"""From plan to operation: launch command, systemd unit, verifying benchmark, alerts and checklist, all as text.

What each engine calls its flags, and why each is set, stands in `templates/flags/ENGINE.j2`.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from planner.core.quantities import GIB, PlannerError
from planner.facts.deployment import Deployment
from planner.facts.draft_models import method
from planner.facts.workload import DEFAULT_SECONDS, Lengths
from planner.latency.performance import Performance
from planner.latency.start_up import STORAGE, start_up
from planner.models.registry import model, repository
from planner.operations.flags import options
from planner.operations.rendering import render
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario import Target

DRAIN_S = 120
"""Seconds that requests in flight get to finish when the server is stopped."""
DIRECTORY = "/opt/headroom"
"""Where the systemd unit expects `serve.sh`."""
ONLINE = ("fp8", "bitsandbytes")
"""Quantizations that an engine applies to a 16-bit checkpoint while it loads; others need a checkpoint of their own."""
RAMP, LEAST_PROMPTS = (0.25, 0.5, 0.75, 1.0, 1.25), 100
"""Shares of the planned rate worth benchmarking: up to it, and once beyond; requests of such a step, at least."""
RANGE_RATIO = 0.5
"""Spread of the benchmark's random lengths: uniform within this share of the mean to both sides."""


@dataclass(frozen=True)
class Flag:
    """One option of a launch command, and why it is there."""

    name: str
    value: str | None
    reason: str

    @property
    def parts(self) -> list[str]:
        """The option as arguments; a value that begins like an option is tied to its own."""
        if self.value is None:
            return [self.name]
        return [f"{self.name}={self.value}"] if self.value.startswith("-") else [self.name, self.value]

    def __str__(self) -> str:
        return shlex.join(self.parts)


@dataclass(frozen=True)
class Launch:
    """How to start one replica: program, first port, flags with their reasons."""

    deployment: Deployment
    program: str
    port: int
    flags: tuple[Flag, ...]

    @property
    def command(self) -> list[str]:
        """The command as its arguments."""
        return [*shlex.split(self.program), *(part for flag in self.flags for part in flag.parts)]

    @property
    def line(self) -> str:
        """The command in one line, as a shell reads it."""
        return " ".join([self.program, *map(str, self.flags)])

    def __str__(self) -> str:
        return " \\\n  ".join([self.program, *map(str, self.flags)])


def launch(prediction: Prediction) -> Launch:
    """The command for one replica of what was predicted; `PlannerError` if its engine lacks an option it needs."""
    deployment, memory, workload = prediction.deployment, prediction.memory, prediction.workload
    assert workload is not None
    engine, args, speculation = deployment.engine, deployment.args, deployment.speculation
    can, converted = options(engine.name, engine.version).spellings, _converted(deployment)
    checkpoint = shlex.quote(_checkpoint(deployment))
    if converted and converted not in ONLINE:
        checkpoint = f'"${{MODEL:?name its checkpoint quantised with {converted}}}"'
    speculative: dict[str, Any] = {}
    if speculation:
        speculative = {"method": speculation.method, "num_speculative_tokens": speculation.num_speculative_tokens}
        if speculation.draft:
            speculative["model"] = speculation.draft.name
        elif method(speculation.method).draft in ("layer", "heads"):  # weights that the plan knows only the size of
            speculative["model"] = f"NAME-OF-ITS-{speculation.method.upper()}-HEAD"
    left = memory.total - memory.weights.mid - memory.activation.mid - memory.non_torch.mid
    text = render(
        f"flags/{engine.name}",
        args=args,
        name=deployment.model.name,
        layout=deployment.layout,
        can=can,
        speculative=speculative,
        online_quantization=converted if converted in ONLINE else "",
        drain_s=DRAIN_S,
        total_gib=memory.total / GIB,
        fit=memory.pool.sequences(round(workload.prompt.mean + workload.output.mean)),
        p99_tokens=workload.total_quantile(0.99),
        p99_prompt=math.ceil(workload.prompt.p99),
        static_share=(memory.weights.mid + memory.kv_available.mid) / memory.total,
        free_share=memory.kv_available.mid / left,
    )
    flags = []
    for line in filter(str.strip, text.splitlines()):
        option, _, reason = line.strip().rpartition("  # ")
        name, _, value = option.partition(" ")
        if name not in can:
            raise PlannerError(f"{engine.name} {engine.version} has no option {name}")
        flags.append(Flag(name, unquote(value) or None, reason))
    program = engine.facts["program"].format(model=checkpoint)
    return Launch(deployment, program, engine.facts["port"], tuple(flags))


def _checkpoint(deployment: Deployment) -> str:
    """What an engine loads: a Hub repository or a path, which no option parser takes for an option."""
    found = repository(deployment.model.name)
    return f"./{found}" if found.startswith("-") else found


def _converted(deployment: Deployment) -> str:
    """The quantization that the plan gives to a checkpoint stored otherwise; nothing when it is served as it is."""
    try:
        stored = model(deployment.model.name).quantization.method
    except PlannerError:  # a local configuration: nothing to compare with
        return ""
    planned = deployment.model.quantization.method
    return planned if planned not in (stored, "none") else ""


FILES = ("serve.sh", "headroom@.service", "bench.sh", "alerts.yml", "checklist.md")
"""What `documents` writes; alert rules only where the catalog knows the engine's own names of metrics."""


def file_names(prediction: Prediction) -> list[str]:
    """The files that `documents` makes."""
    return [name for name in FILES if prediction.deployment.engine.facts["metrics"] or name != "alerts.yml"]


def documents(prediction: Prediction, targets: Sequence[Target], storage: str = STORAGE) -> dict[str, str]:
    """File name -> text: shell script, systemd template unit, benchmark, Prometheus rules, checklist (Markdown).

    `prediction` is the whole deployment's at its rate (or concurrency). `bench.sh` runs shares of that on one replica,
    and states what the plan predicts for each. A starting server reads its weights from `storage`. Raises
    `PlannerError` when the deployment does not fit.
    """
    if prediction.performance is None:
        raise PlannerError(f"nothing to deploy: {prediction.memory.reason}")
    deployment = prediction.deployment
    layout, engine = deployment.layout, deployment.engine
    slowest = sorted(targets, key=lambda target: target.seconds)  # one limit per metric: the last and widest
    values: dict[str, Any] = {
        "title": f"{deployment.model.name} on {layout} of {deployment.gpu.name}, {engine.name} {engine.version}",
        "launch": launch(prediction), "p": prediction, "d": deployment, "layout": layout, "targets": targets,
        "checkpoint": _checkpoint(deployment), "metrics": engine.facts["metrics"], "ramp": ramp(prediction),
        "nodes": math.ceil(layout.gpus_per_replica / deployment.gpus_per_node),
        "goodput": {("e2el" if t.metric == "e2e" else t.metric): t.seconds for t in slowest if t.metric != "itl"},
        "start_up": start_up(deployment, storage),
        "drain_s": DRAIN_S, "directory": DIRECTORY, "range_ratio": RANGE_RATIO, "prompts": benchmark_prompts,
    }  # fmt: skip
    return {name: render(name, **values) for name in file_names(prediction)}


def ramp(prediction: Prediction) -> dict[float, Performance]:
    """What `bench.sh` should measure on one replica at growing shares of its traffic: requests/s -> prediction.

    Each step is replayed as the script runs it, from its first request to its last.
    """
    layout, workload = prediction.deployment.layout, prediction.workload
    assert workload is not None
    served = prediction.performance.request_tps.mid if prediction.performance else 0.0
    prompt, output = _random(workload.prompt.mean, workload.prefix_tokens), _random(workload.output.mean)
    hits = float(workload.prefix_tokens > 0)
    drawn = replace(workload, prompt=prompt, output=output, prefix_hit_rate=hits, trace=None)
    found = {}
    for share in RAMP:
        rate = float(f"{(workload.rate or served) / layout.replicas * share:.3g}")
        step = replace(drawn.at(rate), num_prompts=benchmark_prompts(rate))
        found[rate] = predict(prediction.deployment.with_replicas(1), step).performance
    return {rate: performance for rate, performance in found.items() if performance}


def benchmark_prompts(rate: float) -> int:
    """Requests of one step of `bench.sh`: ten minutes of arrivals, and enough for a percentile."""
    return max(round(rate * DEFAULT_SECONDS), LEAST_PROMPTS)


def _random(mean: float, prefix: int = 0) -> Lengths:
    """Lengths as `--random-range-ratio` draws them: a shared prefix, and the rest uniform around its mean."""
    rest = max(mean - prefix, 1.0)
    low, high = (prefix + rest * (1 + side * RANGE_RATIO) for side in (-1, 1))
    return Lengths.uniform(high, low / high)
