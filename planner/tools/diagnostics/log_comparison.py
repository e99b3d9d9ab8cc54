"""Compare a startup log with the plan of its deployment, and calibrate the next plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.readers import read_text
from planner.core.redaction import redact_text
from planner.core.text import escape_to_one_line
from planner.core.units import GIB, MIB
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.layout import SpeculationConfig
from planner.hardware.gpus import Gpu, list_gpus, parse_gpu_count
from planner.hardware.gpus import get_gpu as find_gpu
from planner.memory.memory_plan import MEMORY_TERMS, MemoryPlan, MemoryTerm, plan_memory
from planner.models.registry import Model, load_model, load_model_at
from planner.planning.candidate import describe_formats
from planner.planning.memory_remedies import (
    MemoryRemedies,
    find_memory_remedies,
    shift_kv_available,
)
from planner.tools.comparison import Column, ComparisonRow, format_table
from planner.tools.diagnostics.startup_errors import (
    FailedStartError,
    MemoryShortage,
    StartupError,
    find_logged_kv_bytes,
    find_memory_shortage,
    find_startup_errors,
    has_memory_error,
)
from planner.tools.diagnostics.startup_log import (
    COUNT_FIGURES,
    LOG_PHRASES,
    StartupLog,
    find_failures,
    parse_startup_log,
)

EXAMPLE_LOG = CATALOG_DIR / "validation" / "granite-3.1-8b-h100.log"
"""Lines of a public log from an H100, as an example."""
BUDGET_TERMS = (*MEMORY_TERMS, "requested", "unexplained")
"""Terms of the memory budget, in bytes."""
COUNT_UNITS = {
    "max_concurrency": "x", "num_blocks": "blocks", "kv_tokens": "tokens", "longest": "tokens",
}  # fmt: skip
AMBIGUOUS_FRACTION = 0.03
"""Other memory off plan, as a fraction of GPU memory, from which on a log that does not state its
utilization may have had another one."""
MAX_TERM_ERROR_FRACTION = 0.2
"""Largest error of a term, as a fraction of GPU memory; above, the log is of another deployment."""


def _compare_figure(term: str, planned: Interval, logged: float) -> ComparisonRow:
    """Compare one planned and logged figure, in bytes or, for counts, in their own unit."""
    size = _get_unit_size(term)
    return ComparisonRow(
        LOG_PHRASES["words"][term],
        COUNT_UNITS.get(term, "GiB"),
        planned / size,
        logged / size,
        worse="both",
        rounding=0.01,
        decimals=0 if term in ("num_blocks", "kv_tokens", "longest") else 2,
        term=term,
    )


def _get_unit_size(term: str) -> float:
    """Return the bytes of a term's unit; 1 for counts."""
    return 1 if term in COUNT_FIGURES else GIB


LOG_COLUMNS = (
    Column("figure", lambda row: row.name, "<22"),
    Column(
        "planned, 80% interval", lambda row: f"{row.format_value(row.expected)} {row.unit}", "<42"
    ),
    Column("logged", lambda row: row.format_value(row.measured), ">12"),
    Column(
        "",
        lambda row: (
            f"   {'as planned' if row.status == 'PASS' else f'off by {row.difference_text}'}"
        ),
    ),
)


@dataclass(frozen=True)
class LogExplanation:
    """A log compared with the plan of the same deployment."""

    log: StartupLog
    plan: MemoryPlan
    lines: tuple[ComparisonRow, ...]
    errors: tuple[StartupError, ...] = ()
    inferred: str = ""  # what the log does not state, and its figures imply
    states_utilization: bool = True  # the log, or the command that wrote it

    def get_line(self, term: str) -> ComparisonRow | None:
        """Return the line of a term; None if the log does not state it."""
        return next((line for line in self.lines if line.term == term), None)

    @cached_property
    def largest_deviation(self) -> ComparisonRow | None:
        """The term of the budget that is furthest off, else the cache's layout; None if none."""
        wrong = [
            line
            for line in self.lines
            if line.term in BUDGET_TERMS
            and line.status == "FAIL"
            and not (self.inferred and line.term == "unexplained")
        ]
        figures, layout = self.log.figures, self.plan.layout
        is_stated = {"kv_available", "kv_tokens"} <= {*figures}
        if not wrong and is_stated and not layout.stage_bytes_per_block[1:]:
            tokens = layout.build_pool([figures["kv_available"]]).reported_tokens
            if abs(figures["kv_tokens"] - tokens) > 0.015 * figures["kv_tokens"]:
                return self.get_line("kv_tokens")
        return max(wrong, key=lambda line: abs(line.difference), default=None)

    @property
    def matches_deployment(self) -> bool:
        """Whether the log can be of this deployment: no term is off by a large part of the GPU."""
        comparison = self.largest_deviation
        max_error = MAX_TERM_ERROR_FRACTION * self.plan.deployment.gpu.memory_bytes / GIB
        return (
            comparison is None
            or comparison.term not in BUDGET_TERMS
            or abs(comparison.difference) <= max_error
        )

    @property
    def calibration(self) -> dict[MemoryTerm, float]:
        """Bytes to add to each term, for `deploy_on` or a scenario's `memory_calibration`.

        The rest of the logged total goes to the activation peak, or to non-torch memory if the log
        states the activation peak.
        """
        earlier = dict(self.plan.deployment.memory_calibration)
        shifts = {
            term: line.difference * GIB + earlier.get(term, 0.0)
            for line in self.lines
            for term in MEMORY_TERMS
            if line.term == term
        }
        rest = self.get_line("unexplained")
        is_known = not self.inferred and not self.has_negative_rest and not self.lower_utilization
        if rest and is_known:
            term: MemoryTerm = "non_torch" if "activation" in self.log.figures else "activation"
            shifts[term] = rest.difference * GIB + earlier.get(term, 0.0)
        return shifts

    @property
    def has_negative_rest(self) -> bool:
        """Whether weights and KV cache are more than the memory that the engine was given."""
        rest = self.get_line("unexplained")
        return rest is not None and rest.value < 0

    @property
    def lower_utilization(self) -> float | None:
        """The utilization that explains much more other memory than planned; None if it is stated."""
        rest, total = self.get_line("unexplained"), self.plan.deployment.gpu.memory_bytes
        if rest is None or self.states_utilization:
            return None
        excess = rest.difference * GIB
        if excess < AMBIGUOUS_FRACTION * total:
            return None
        return round((self.plan.budget_bytes - excess) / total, 2)

    @property
    def scenario_line(self) -> str:
        """The calibration as a line of a scenario, in GiB; empty if there is nothing to add."""
        if not self.matches_deployment:
            return ""
        rounded = {term: round(size / GIB, 2) for term, size in self.calibration.items()}
        shifts = ", ".join(f"{term}: {size:g}" for term, size in rounded.items() if size)
        return f"memory_calibration: {{{shifts}}}" if shifts else ""

    def to_rows(self) -> list[dict[str, object]]:
        """Return the lines as rows by readable names."""
        return [
            {
                "figure": line.name,
                "unit": line.unit,
                "planned": line.format_value(line.expected),
                "logged": line.format_value(line.measured),
                "logged - planned": line.difference_text,
                "in its interval": line.status == "PASS",
            }
            for line in self.lines
        ]

    def to_json(self) -> dict[str, object]:
        """Return the comparison as JSON: sizes in bytes, plans as [expected, low, high] of 80%."""
        return {
            "deployment": str(self.plan.deployment),
            "planned_status": self.plan.status,
            "figures": {
                line.term: {
                    "planned": line.expected and (line.expected * size).as_json_list,
                    "logged": line.value * size,
                    "in_interval": line.status == "PASS",
                }
                for line in self.lines
                for size in [_get_unit_size(line.term)]
            },
            "failure": self.log.failure and redact_text(self.log.failure),
            "errors": [
                {"title": error.phrase.title, "remedy": error.remedy} for error in self.errors
            ],
            "verdict": self.verdict if self.lines else None,
            "inferred": self.inferred or None,
            "scenario_line": self.scenario_line or None,
            "remedies": remedies.to_json() if (remedies := self.remedies) else None,
            "suggestions": self.suggestions or None,
        }

    @property
    def verdict(self) -> str:
        """Which term is furthest off, in a sentence."""
        if not set(MEMORY_TERMS) & {line.term for line in self.lines}:
            if kv := self.get_line("kv_available"):
                state = (
                    "as planned" if kv.status == "PASS" else f"{kv.difference_text} GiB off plan"
                )
                return f"Of the budget the log states the KV cache alone: {state}."
            return (
                "The log states no term of the budget, so there is nothing to hold the plan"
                " against."
            )
        if self.largest_deviation is None and (self.log.failure or self.errors):
            if not self.plan.can_start:
                return "The terms that the log states lie in their intervals, as does its end."
            end = (
                "yet the start failed: what failed is outside this budget, or came after it."
                if "kv_available" in self.log.figures
                else "it ended before it stated the others."
            )
            return f"The terms that the log states lie in their intervals; {end}"
        if self.largest_deviation is None:
            return "Every term lies in its interval: no assumption was off."
        row, difference = self.largest_deviation, self.largest_deviation.difference_text
        if self.has_negative_rest:
            return (
                "Memory cannot be negative: what the log states was not written by a server with"
                f" gpu_memory_utilization {self.plan.deployment.args.gpu_memory_utilization:g}, but"
                f" by one with about {_infer_memory_utilization(self):g}."
            )
        if row.term == "unexplained" and (lower := self.lower_utilization):
            return (
                f"Other memory is {difference.lstrip('+')} {row.unit} above plan. The log does not state"
                f" gpu_memory_utilization: {lower:g} would explain it; so would something else that"
                " takes memory. Add --command to tell."
            )
        if not self.matches_deployment:
            deployment = self.plan.deployment
            text = (
                f"The log does not fit {deployment}: {row.name} is off by {difference} of"
                f" {deployment.gpu.memory_bytes / GIB:.0f} {row.unit}"
            )
            return (
                f"{text}. Is it another GPU (--gpu NAME), model, tensor parallelism or"
                " gpu_memory_utilization?"
            )
        return (
            f"Largest deviation: {row.name}, {difference} {row.unit}. It depends on"
            f" {LOG_PHRASES['rests_on'][row.term]}."
        )

    def __str__(self) -> str:
        head = format_table(self.lines, LOG_COLUMNS) if self.lines else []
        text = (
            f"The plan says: {self.plan.reason or self.plan.status}; weights take"
            f" {self.plan.weights / GIB:.1f} of"
            f" {self.plan.deployment.gpu.memory_bytes / GIB:.1f} GiB on a GPU"
        )
        failure = [f"The log ends with: {self.log.failure}", text] if self.log.failure else []
        logged = f"{self.plan.deployment}, {describe_formats(self.plan.deployment)}"
        verdict = [self.verdict] if self.lines else []
        inferred = [self.inferred] if self.inferred else []
        return "\n".join([logged, *inferred, *head, *failure, *verdict])

    @property
    def remedies(self) -> MemoryRemedies | None:
        """What frees enough memory if that is what the start failed of; None if not, or unknown."""
        logged = find_logged_kv_bytes(self.errors, self.log.figures.get("kv_available"))
        if not has_memory_error(self.errors) or not self.matches_deployment:
            return None
        shortage = find_memory_shortage(self.errors)
        if shortage is None:
            return find_memory_remedies(shift_kv_available(self.plan, logged))
        # the budget was kept, and what it leaves did not suffice: a larger one makes it worse
        needed = self.plan.layout.max_blocks_per_request * self.plan.pool.bytes_per_block
        available = min(needed - shortage.missing, self.plan.kv_available.mid)
        remedies = find_memory_remedies(shift_kv_available(self.plan, available))
        return remedies and remedies.without("gpu_memory_utilization")

    @property
    def shortage_line(self) -> str:
        """By how much an allocation failed, and the utilization that leaves as much; or empty."""
        if (shortage := find_memory_shortage(self.errors)) is None:
            return ""
        share = self.plan.deployment.args.gpu_memory_utilization
        held = (shortage.allocated or 0.0) / shortage.total
        origin = "it has"
        if not self.states_utilization and held > share:
            share, origin = min(round(held * 20) / 20, 0.95), "that PyTorch holds so much suggests"
        lower = math.floor(100 * (share - shortage.missing / shortage.total) - 1e-9) / 100
        return (
            f"{shortage}, beside the budget: gpu_memory_utilization {lower:g} leaves it free ({origin}"
            f" {share:g}), and fewer max_num_seqs need less for sampling and graphs"
        )

    @property
    def suggestions(self) -> str:
        """Remedies of the errors, and what to ask next; empty if the log does not fit."""
        if self.errors or self.log.failure or not self.matches_deployment:
            lines = [f"{error.phrase.title}: {error.remedy}" for error in self.errors]
            lines += filter(None, [self.shortage_line])
            if remedies := self.remedies:
                lines += [f"{'  ' * bool(n)}{line}" for n, line in enumerate(remedies.describe())]
            if lines:
                lines.append(
                    "Next: headroom lint of its command, with --gpu, proposes one that starts."
                )
            return "\n".join(lines)
        return "Next: headroom lint of its command, with --gpu; headroom diagnose, on its /metrics under load."


def infer_deployment(
    log: StartupLog, gpu: str | None = None, planned: Deployment | None = None
) -> Deployment:
    """Return the deployment that wrote `log`.

    Arguments that the log does not state are those of `planned`, else the engine's defaults. Raises
    `PlannerError` if the model or the GPU remains unknown.
    """
    arguments = dict(log.arguments)
    arguments |= {
        name: str(arguments[name]) for name in ("quantization", "gpu") if name in arguments
    }
    quantization, speculation, model_name, gpu_name = (
        arguments.pop(key, None) for key in ("quantization", "speculation", "model", "gpu")
    )
    chip = (
        parse_gpu_count(gpu)[1]
        if gpu
        else _find_logged_gpu(gpu_name) or (planned.gpu if planned else None)
    )
    total = arguments.get("gpu_total", 0)
    if chip is None:
        near = " or ".join(
            known.name
            for known in list_gpus()
            if not known.slice_of and abs(known.memory_bytes - total) < 0.02 * total
        )
        hint = f"; with {total / GIB:.2f} GiB it may be {near}" if near else ""
        raise PlannerError(f"the log does not name its GPU: add --gpu NAME{hint}")
    if planned and planned.gpu.name == chip.name:
        chip = planned.gpu
    model = _resolve_logged_model(model_name, quantization, planned)
    if total and abs(total - chip.memory_bytes) > 0.1 * chip.memory_bytes:
        raise PlannerError(
            f"the log's GPU has {total / GIB:.2f} GiB, {chip.name} has"
            f" {chip.memory_bytes / GIB:.2f} GiB"
        )
    for size in ("tp", "pp", "dp", "dcp"):
        if not isinstance(arguments.get(size, 1), int):
            raise PlannerError(f"the log's {size} is {arguments[size]!r:.60}, not a whole number")
    if arguments.pop("enable_expert_parallel", False):
        arguments["ep"] = arguments.get("tp", 1) * arguments.get("dp", 1)
    if arguments.pop("enable_lora", False):
        arguments.setdefault("max_loras", 1)
    base: dict[str, Any] = {}
    if planned is not None:
        sizes = () if log.complete else ("tp", "pp", "dp", "ep", "dcp")
        base = {size: getattr(planned.layout, size) for size in sizes}
        base |= {
            "other_tenants": planned.other_tenants_bytes, "gpus_per_node": planned.gpus_per_node,
            "speculation": planned.speculation,
        }  # fmt: skip
        base |= {"engine": planned.engine.name, "engine_version": planned.engine.version}
        base |= {
            "memory_calibration": dict(planned.memory_calibration),
            **({} if log.complete else vars(planned.args)),
        }
    arguments |= replace(log, arguments=arguments).engine_args
    if speculation is not None:
        method, draft, num_tokens = speculation
        draft_model = load_model(draft) if draft and draft != model_name else None
        arguments["speculation"] = SpeculationConfig(
            method or "draft_model", int(num_tokens or 1), draft=draft_model
        )
    return deploy_on(model, chip, **{**base, **arguments})


def _find_logged_gpu(name: str | None) -> Gpu | None:
    """Return the GPU that a log names; None if it names none or an unknown one."""
    try:
        return find_gpu(name) if name else None
    except PlannerError:
        return None


def _resolve_logged_model(
    name: str | None, quantization: str | None, planned: Deployment | None
) -> Model:
    """Return the model that a log names; the planned one if it names none, or an unknown path."""
    if name is None and planned is None:
        raise PlannerError("the log does not name its model: add --model NAME")
    if planned is not None and name in (None, planned.model.name):
        return planned.model
    try:
        model = load_model_at(str(name))
    except PlannerError:
        if planned is None:
            raise
        return planned.model
    if (
        planned is not None
        and model.architecture.params_total != planned.model.architecture.params_total
    ):
        raise PlannerError(f"the log is of {name}, the command serves {planned.model.name}")
    return (
        load_model_at(str(name), quantization=quantization)
        if quantization and model.quantization.method == "none"
        else model
    )


def compare_log_to_plan(log: StartupLog, memory: MemoryPlan) -> LogExplanation:
    """Compare the figures of log and plan, in the order in which the engine subtracts them."""
    reserved = memory.deployment.engine.facts.null_block_reserved
    graphs = "cudagraph_estimate" if "cudagraph" in memory.budgeted_terms else "cudagraph_actual"
    planned = {
        "requested": Interval.from_value(memory.budget_bytes), "weights": memory.weights,
        "activation": memory.activation,
        "non_torch": memory.non_torch, graphs: memory.cudagraph,
        "kv_available": memory.kv_available,
        "num_blocks": Interval.from_value(memory.pool.num_blocks),
        "kv_tokens": Interval.from_value(memory.pool.reported_tokens),
        "max_concurrency": memory.max_concurrency,
        "kv_needed": Interval.from_value(
            memory.layout.max_blocks_per_request * memory.pool.bytes_per_block
        ),
        "longest": Interval(*(
            memory.layout.compute_max_model_len(
                max(0, int(max(0.0, size) // memory.pool.bytes_per_block) - reserved)
            )
            for size in (memory.kv_available.lo, memory.kv_available.mid, memory.kv_available.hi)
        )),
    }  # fmt: skip
    pool = (memory.kv_available.mid or 1.0, memory.kv_available.lo, memory.kv_available.hi)
    for name in ("num_blocks", "kv_tokens"):
        mid = planned[name].mid
        planned[name] = Interval(mid * pool[1] / pool[0], mid, mid * pool[2] / pool[0])
    terms = {
        name: "cudagraph" if name == graphs else name for name in planned if name in log.figures
    }
    lines = [
        _compare_figure(term, planned[name], log.figures[name]) for name, term in terms.items()
    ]
    if (rest := _compare_unexplained_memory(log.figures, memory, graphs)) is not None:
        lines.insert([line.term for line in lines].index("kv_available"), rest)
    return LogExplanation(log, memory, tuple(lines))


def _compare_unexplained_memory(
    figures: Mapping[str, float], memory: MemoryPlan, graphs: str
) -> ComparisonRow | None:
    """Compare the rest of the logged budget with the planned terms that the log does not state."""
    if not {"weights", "kv_available"} <= set(figures) or {"activation", "non_torch"} <= set(
        figures
    ):
        return None
    used = figures["weights"] + figures["kv_available"]
    missing = Interval.from_value(0)
    for name in (
        "activation",
        "non_torch",
        *((graphs,) if "cudagraph" in memory.budgeted_terms else ()),
    ):
        if name in figures:
            used += figures[name]
        else:
            missing = missing + getattr(memory, "cudagraph" if name == graphs else name)
    return _compare_figure(
        "unexplained", missing, figures.get("requested", memory.budget_bytes) - used
    )


def _infer_memory_utilization(explanation: LogExplanation) -> float | None:
    """Return the utilization that an excerpt implies; None if it fits as it is.

    Weights and KV cache that leave a negative rest, or far less than any plan, say that the server
    was given more memory. Of the values near what they imply, people choose the rounder one.
    """
    rest, memory = explanation.get_line("unexplained"), explanation.plan
    total = memory.deployment.gpu.memory_bytes
    if rest is None or (rest.value >= 0 and rest.difference * GIB > -AMBIGUOUS_FRACTION * total):
        return None
    fraction = (memory.budget_bytes - rest.difference * GIB) / total
    rounder = round(fraction * 20) / 20
    return min(rounder if abs(rounder - fraction) < 0.015 else round(fraction, 2), 0.99)


def explain_log_file(
    path: str | Path,
    gpu: str | None = None,
    planned: Deployment | None = None,
    model: str | None = None,
) -> LogExplanation:
    """Compare the log in the file `path` with the plan of its deployment; see `infer_deployment`.

    `planned` is that of the command that wrote the log, `model` what it served, if the log does not say
    so by a name that is known.
    """
    text = read_text(Path(path), 8 * MIB, errors="replace")
    errors = find_startup_errors(text)
    if gpu is not None:
        parse_gpu_count(gpu)
    try:
        log = parse_startup_log(text, knows_model=model is not None or planned is not None)
        guessed = ""
        if model is not None:
            log = replace(log, arguments={**log.arguments, "model": model})
        if gpu is None and planned is None and not _find_logged_gpu(log.arguments.get("gpu")):
            gpu, guessed = _guess_gpu(find_memory_shortage(errors))
        explanation = _explain_log(log, gpu, planned)
    except PlannerError as error:
        lines = [one.line for one in errors] or find_failures(text)
        if not lines:
            raise
        line = redact_text(escape_to_one_line(lines[-1]))[:400]
        raise FailedStartError(line, errors, str(error)) from None
    inferred = " ".join(filter(None, (guessed, explanation.inferred)))
    return replace(explanation, errors=tuple(errors), inferred=inferred)


def _guess_gpu(shortage: MemoryShortage | None) -> tuple[str | None, str]:
    """Return the GPU whose memory is nearest to what PyTorch states, and that it is a guess."""
    whole = [gpu for gpu in list_gpus() if not gpu.slice_of]
    if shortage is None:
        return None, ""
    near = sorted(whole, key=lambda gpu: abs(gpu.memory_bytes - shortage.total))
    if abs(near[0].memory_bytes - shortage.total) > 0.02 * shortage.total:
        return None, ""
    stated = f"{shortage.total / GIB:.2f} GiB"
    return (
        near[0].name,
        f"Inferred: {near[0].name}, of all GPUs the nearest to its {stated}; --gpu says another.",
    )


def _explain_log(log: StartupLog, gpu: str | None, planned: Deployment | None) -> LogExplanation:
    """Compare a log with the plan of its deployment, by the utilization that it implies."""
    is_stated = "gpu_memory_utilization" in log.arguments or planned is not None
    explanation = compare_log_to_plan(log, plan_memory(infer_deployment(log, gpu, planned)))
    inferred = ""
    if not is_stated and (utilization := _infer_memory_utilization(explanation)):
        arguments = {**log.arguments, "gpu_memory_utilization": utilization}
        completed = replace(log, arguments=arguments)
        explanation = compare_log_to_plan(
            completed, plan_memory(infer_deployment(completed, gpu, planned))
        )
        inferred = (
            f"Inferred: gpu_memory_utilization {utilization:g}. The log does not state it, and the"
            " default leaves too little for other memory."
        )
    return replace(
        explanation,
        inferred=inferred,
        states_utilization=is_stated or bool(inferred),
    )
