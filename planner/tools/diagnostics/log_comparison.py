"""Compare a startup log with the plan of its deployment, and calibrate the next plan."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.readers import read_text
from planner.core.templates import render_template
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
from planner.tools.diagnostics.startup_log import (
    COUNT_FIGURES,
    LOG_PHRASES,
    StartupError,
    StartupLog,
    find_memory_shortage,
    find_startup_errors,
    has_memory_error,
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
MAX_SIZE_ERROR_FRACTION = 0.2
"""Largest error of a size, as a fraction of GPU memory; above, the log is of another deployment."""
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


def _compare_figure(term: str, planned: Interval, logged: float) -> ComparisonRow:
    """Compare one planned and logged figure, in bytes or, for counts, in their own unit."""
    size = 1 if term in COUNT_FIGURES else GIB
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

    @property
    def has_failed(self) -> bool:
        """Whether the log ends in an error."""
        return bool(self.errors or self.log.failure)

    @cached_property
    def largest_deviation(self) -> ComparisonRow | None:
        """The term of the budget that is furthest off, else the cache's layout; None if none."""
        terms = (line for line in self.lines if line.term in BUDGET_TERMS and line.status == "FAIL")
        wrong = [line for line in terms if not (self.inferred and line.term == "unexplained")]
        figures, layout = self.log.figures, self.plan.layout
        is_stated = {"kv_available", "kv_tokens"} <= {*figures}
        if not wrong and is_stated and not layout.stage_bytes_per_block[1:]:
            tokens = layout.build_pool([figures["kv_available"]]).reported_tokens
            if abs(figures["kv_tokens"] - tokens) > 0.015 * figures["kv_tokens"]:
                return self.get_line("kv_tokens")
        return max(wrong, key=lambda line: abs(line.difference), default=None)

    @cached_property
    def misfit(self) -> ComparisonRow | None:
        """The size that is off by so much of the GPU that the log is of another deployment."""
        max_error = MAX_SIZE_ERROR_FRACTION * self.plan.deployment.gpu.memory_bytes / GIB
        off = [line for line in self.lines if line.unit == "GiB" and line.status == "FAIL"]
        far = (line for line in off if abs(line.difference) > max_error)
        return max(far, key=lambda line: abs(line.difference), default=None)

    @property
    def calibration(self) -> dict[MemoryTerm, float]:
        """Bytes to add to each term, for `deploy_on` or a scenario's `memory_calibration`.

        The rest of the logged total goes to the activation peak, or to non-torch memory if the log
        states the activation peak.
        """
        shifts = {t: line.difference * GIB for t in MEMORY_TERMS if (line := self.get_line(t))}
        rest = self.get_line("unexplained")
        if rest and not (self.inferred or self.is_ambiguous):
            shifts["non_torch" if "activation" in shifts else "activation"] = rest.difference * GIB
        earlier = dict(self.plan.deployment.memory_calibration)
        return {term: shift + earlier.get(term, 0.0) for term, shift in shifts.items()}

    @property
    def is_ambiguous(self) -> bool:
        """Whether the rest is negative, or another utilization, which the log does not state, may explain it."""
        rest, total = self.get_line("unexplained"), self.plan.deployment.gpu.memory_bytes
        return rest is not None and (
            rest.value < 0
            or (
                not self.states_utilization
                and abs(rest.difference) * GIB > AMBIGUOUS_FRACTION * total
            )
        )

    @property
    def scenario_line(self) -> str:
        """The calibration as a line of a scenario, in GiB; empty if there is nothing to add."""
        if self.misfit:
            return ""
        shifts = ", ".join(
            f"{term}: {shown}"
            for term, size in self.calibration.items()
            if (shown := f"{round(size / GIB, 2) + 0.0:g}") != "0"
        )
        return f"memory_calibration: {{{shifts}}}" if shifts else ""

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
                for size in [1 if line.term in COUNT_FIGURES else GIB]
            },
            "failure": self.log.failure or None,
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
        return self._render("log_verdict", words=LOG_PHRASES, terms=MEMORY_TERMS)

    @property
    def suggestions(self) -> str:
        """Remedies of the errors, and what to ask next."""
        return self._render("log_advice", shortage=find_memory_shortage(self.errors))

    def __str__(self) -> str:
        table = format_table(self.lines, LOG_COLUMNS) if self.lines else []
        formats = describe_formats(self.plan.deployment)
        return self._render("log_explanation", table=table, formats=formats)

    def _render(self, template: str, **values: object) -> str:
        return render_template("tools/diagnostics", template, log=self, **values).strip("\n")

    @property
    def remedies(self) -> MemoryRemedies | None:
        """What frees enough memory if that is what the start failed of; None if not, or unknown."""
        if not has_memory_error(self.errors) or self.misfit:
            return None
        stated = filter(None, (error.figures.get("available_gib") for error in self.errors))
        available = next((float(gib) * GIB for gib in stated), self.log.figures.get("kv_available"))
        if shortage := find_memory_shortage(self.errors):
            needed = self.plan.layout.max_blocks_per_request * self.plan.pool.bytes_per_block
            available = min(needed - shortage.missing, self.plan.kv_available.mid)
        remedies = find_memory_remedies(shift_kv_available(self.plan, available))
        # the budget was kept, and what it leaves did not suffice: a larger one makes it worse
        return remedies.without("gpu_memory_utilization") if remedies and shortage else remedies

    @property
    def utilization_after_shortage(self) -> float:
        """The utilization that leaves free what an allocation lacked.

        One that PyTorch held more than by default had a higher one.
        """
        shortage = find_memory_shortage(self.errors)
        assert shortage is not None
        total, share = shortage.total, self.plan.deployment.args.gpu_memory_utilization
        held = 0.0 if self.states_utilization else round(shortage.allocated / total * 20) / 20
        missing, share = shortage.missing / total, max(share, min(held, 0.95))
        return math.floor(100 * (share - missing) - 1e-9) / 100


def infer_deployment(
    log: StartupLog, gpu: str | None = None, planned: Deployment | None = None
) -> Deployment:
    """Return the deployment that wrote `log`.

    Arguments that the log does not state are those of `planned`, else the engine's defaults. Raises
    `PlannerError` if the model or the GPU remains unknown.
    """
    arguments = dict(log.arguments)
    quantization, speculation, model_name, gpu_name = (
        arguments.pop(key, None) for key in ("quantization", "speculation", "model", "gpu")
    )
    chip = parse_gpu_count(gpu)[1] if gpu else _find_logged_gpu(gpu_name)
    if planned and (chip is None or chip.name == planned.gpu.name):
        chip = planned.gpu
    if chip is None:
        raise PlannerError("the log does not name its GPU: add --gpu NAME")
    if abs((total := arguments.get("gpu_total", chip.memory_bytes)) / chip.memory_bytes - 1) > 0.1:
        raise PlannerError(
            f"the log's GPU has {total / GIB:.2f} GiB, {chip.name} has"
            f" {chip.memory_bytes / GIB:.2f} GiB"
        )
    model = _resolve_logged_model(model_name, quantization, planned)
    if arguments.pop("enable_expert_parallel", False):
        arguments["ep"] = arguments.get("tp", 1) * arguments.get("dp", 1)
    if arguments.pop("enable_lora", False):
        arguments.setdefault("max_loras", 1)
    base: dict[str, Any] = {} if planned is None else {
        **{size: getattr(planned.layout, size) for size in ("tp", "pp", "dp", "ep", "dcp")},
        **vars(planned.args),
        "other_tenants": planned.other_tenants_bytes, "gpus_per_node": planned.gpus_per_node,
        "speculation": planned.speculation, "engine": planned.engine.name,
        "engine_version": planned.engine.version,
        "memory_calibration": dict(planned.memory_calibration),
    }  # fmt: skip
    if speculation is not None:
        method, draft, num_tokens = speculation
        draft_model = load_model(draft) if draft and draft != model_name else None
        arguments["speculation"] = SpeculationConfig(
            method or "draft_model", int(num_tokens or 1), draft=draft_model
        )
    return deploy_on(model, chip, **{**base, **arguments})


def _find_logged_gpu(name: object) -> Gpu | None:
    """Return the GPU that a log names; None if it names none or an unknown one."""
    try:
        return find_gpu(str(name)) if name else None
    except PlannerError:
        return None


def _resolve_logged_model(
    name: str | None, quantization: object, planned: Deployment | None
) -> Model:
    """Return the planned model, or else the one that a log names."""
    if planned is not None:
        return planned.model
    if name is None:
        raise PlannerError("the log does not name its model: add --model NAME")
    model = load_model_at(name)
    is_named = quantization and model.quantization.method == "none"
    return load_model_at(name, quantization=str(quantization)) if is_named else model


def compare_log_to_plan(log: StartupLog, memory: MemoryPlan) -> LogExplanation:
    """Compare the figures of log and plan, in the order in which the engine subtracts them.

    What the log does not state of the budget is one line before the KV cache.
    """
    figures, kv, layout = log.figures, memory.kv_available, memory.layout
    graphs = "cudagraph_estimate" if "cudagraph" in memory.budgeted_terms else "cudagraph_actual"
    reserved, size = memory.deployment.engine.facts.null_block_reserved, memory.pool.bytes_per_block
    blocks, tokens = (
        Interval(n * kv.lo / (kv.mid or 1.0), n, n * kv.hi / (kv.mid or 1.0))
        for n in (memory.pool.num_blocks, memory.pool.reported_tokens)
    )
    longest = kv.map_monotone(
        lambda room: layout.compute_max_model_len(max(0, int(max(0.0, room) // size) - reserved))
    )
    planned = {
        "requested": Interval.from_value(memory.budget_bytes), "weights": memory.weights,
        "activation": memory.activation, "non_torch": memory.non_torch, graphs: memory.cudagraph,
        "kv_available": kv, "num_blocks": blocks, "kv_tokens": tokens,
        "max_concurrency": memory.max_concurrency,
        "kv_needed": Interval.from_value(layout.max_blocks_per_request * size), "longest": longest,
    }  # fmt: skip
    parts = {
        name: planned[name]
        for name in ("activation", "non_torch", graphs)
        if name != graphs or "cudagraph" in memory.budgeted_terms
    }
    lines = []
    for name, interval in planned.items():
        is_rest = name == "kv_available" and {"weights", name} <= {*figures}
        if is_rest and not {"activation", "non_torch"} <= {*figures}:
            used = sum(figures.get(part, 0.0) for part in ("weights", name, *parts))
            absent = sum((parts[p] for p in parts if p not in figures), Interval.from_value(0))
            rest = figures.get("requested", memory.budget_bytes) - used
            lines.append(_compare_figure("unexplained", absent, rest))
        if name in figures:
            term = "cudagraph" if name == graphs else name
            lines.append(_compare_figure(term, interval, figures[name]))
    return LogExplanation(log, memory, tuple(lines))


def explain_log_file(
    path: str | Path,
    gpu: str | None = None,
    planned: Deployment | None = None,
    model: str | None = None,
) -> LogExplanation:
    """Compare the log in the file `path` with the plan of its deployment; see `infer_deployment`.

    `planned` is that of the command that wrote the log, `model` what it served, if the log does not say
    so by a name that is known. A GPU that nothing names is inferred from the memory that the log states.
    """
    text = read_text(Path(path), 8 * MIB, errors="replace")
    errors, guess = find_startup_errors(text), ""
    log = parse_startup_log(text, knows_model=model is not None or planned is not None)
    if model is not None:
        log = replace(log, arguments={**log.arguments, "model": model})
    if not (gpu or planned or _find_logged_gpu(log.arguments.get("gpu"))):
        shortage = find_memory_shortage(errors)
        total = log.arguments.get("gpu_total", shortage.total if shortage else 0)
        near = [known for known in list_gpus() if abs(known.memory_bytes - total) < 0.02 * total]
        if near:
            gpu = min(near, key=lambda known: abs(known.memory_bytes - total)).name
            size = f"{total / GIB:.2f} GiB"
            guess = f"Inferred: {gpu}, the nearest to its {size}; --gpu says another. "
    explanation = _explain_log(log, gpu, planned)
    inferred = f"{guess}{explanation.inferred}".strip()
    return replace(explanation, errors=tuple(errors), inferred=inferred)


def _explain_log(log: StartupLog, gpu: str | None, planned: Deployment | None) -> LogExplanation:
    """Compare a log with the plan of its deployment, by the utilization that it implies.

    Weights and KV cache that leave a negative rest, or far less than any plan, say that the server
    was given more memory. Of the values near what they imply, people choose the rounder one.
    """
    is_stated = "gpu_memory_utilization" in log.arguments or planned is not None
    explanation = compare_log_to_plan(log, plan_memory(infer_deployment(log, gpu, planned)))
    explanation = replace(explanation, states_utilization=is_stated)
    rest, memory = explanation.get_line("unexplained"), explanation.plan
    total = memory.deployment.gpu.memory_bytes
    if is_stated or rest is None or rest.difference * GIB > -AMBIGUOUS_FRACTION * total:
        return explanation
    fraction = (memory.budget_bytes - rest.difference * GIB) / total
    rounder = round(fraction * 20) / 20
    fraction = min(rounder if abs(rounder - fraction) < 0.015 else round(fraction, 2), 0.99)
    log = replace(log, arguments={**log.arguments, "gpu_memory_utilization": fraction})
    return replace(
        compare_log_to_plan(log, plan_memory(infer_deployment(log, gpu, planned))),
        inferred=f"Inferred: gpu_memory_utilization {fraction:g}. The log does not state it, and the"
        " default leaves too little for other memory.",
    )
