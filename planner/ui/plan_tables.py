"""Tables of an answer, for the summary of a report: the terminal's facts, the candidates, a benchmark."""

from collections.abc import Mapping, Sequence

import pandas as pd

from planner.answers import Answer, Performance, words
from planner.core.number_format import format_number
from planner.planning.slo import SloTarget, list_benchmark_targets
from planner.ui.plan_text import list_facts

MAX_CANDIDATE_ROWS, MAX_REJECTED_ROWS = 10, 12


def build_fact_table(answer: Answer) -> pd.DataFrame:
    """Return every fact that the terminal tells of an answer, by name."""
    return pd.DataFrame(list_facts(answer), columns=["fact", "answer"])


def build_candidate_table(answer: Answer) -> pd.DataFrame:
    """Return the ten best deployments from best to worst; the closest first if none is feasible."""
    rows = []
    for offer in answer.candidates[:MAX_CANDIDATE_ROWS]:
        found = offer.performance
        row: dict[str, object] = {
            "deployment": words.describe_offer(offer),
            "engine": str(offer.deployment.engine),
        }
        row["cost"] = words.format_price(offer)
        for target in answer.scenario.slo_targets:
            value = found and found.get_for_display(target.metric, target.percentile) * 1e3
            row[f"{target.name} (ms)"] = value
        verdict = "" if offer.is_confident else words.explain_shortfall(offer)
        row["what is missing"] = verdict
        rows.append({**row, "figures": found and found.source_label})
    return pd.DataFrame(rows)


def build_rejection_table(answer: Answer) -> pd.DataFrame:
    """Return the dozen largest options that could not be evaluated, and why."""
    largest = sorted(answer.rejected, key=lambda rejection: -rejection.gpus)
    rows = dict.fromkeys((each.description, each.gpu, each.reason) for each in largest)
    return pd.DataFrame(list(rows)[:MAX_REJECTED_ROWS], columns=["layout", "GPU", "why not"])


def build_ramp_table(
    predicted: Mapping[float, Performance], targets: Sequence[SloTarget] = ()
) -> pd.DataFrame:
    """Return the metrics of the SLOs and output throughput of one replica by request rate."""
    judged = list_benchmark_targets(targets)
    rows = [
        (format_number(rate), *(p.get(t.metric, t.percentile) * 1e3 for t in judged), p.output_tps)
        for rate, p in predicted.items()
    ]
    names = [f"{target.name} (ms)" for target in judged]
    return pd.DataFrame(rows, columns=["requests/s", *names, "output tokens/s"])
