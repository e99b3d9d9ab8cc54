"""What is told of a plan, in words: each macro of `templates/words.j2` is a function here.

`words.describe_offer(offer)` returns one line. Templates of all surfaces know it as `words`, and the
formats of numbers beside it.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from planner.answers.answer import PHRASES, is_same_price
from planner.core import number_format as formats
from planner.core.templates import load_macros, render_template
from planner.core.text import UNBREAKABLE_SPACE, capitalize
from planner.deploy.artifacts import explain_unsupported_artifacts
from planner.engines.model_support import judge_model_support
from planner.hardware.prices import HOURS_PER_MONTH
from planner.memory.memory_plan import explain_memory_utilization, measure_model
from planner.models.registry import load_model
from planner.planning.billing import EQUAL_COST_SHARE
from planner.planning.disaggregated_search import explain_skipped_pools
from planner.planning.max_load import is_least_load
from planner.planning.memory_odds import SURE_MEMORY_PROBABILITY
from planner.planning.slo import explain_implausible_limits, format_latency

KNOWN: Mapping[str, Any] = {
    "words": sys.modules[__name__],
    "phrases": PHRASES,
    "number": formats.format_number,
    "usd": formats.format_usd,
    "percent": formats.format_probability,
    "apart": formats.format_apart,
    "distinct": formats.format_distinct,
    "ends": formats.format_ends,
    "range": formats.format_range,
    "seconds": formats.format_seconds,
    "seconds_range": formats.format_seconds_range,
    "seconds_ends": formats.format_seconds_ends,
    "share": formats.format_share,
    "limit_s": formats.format_limit_seconds,
    "latency": format_latency,
    "cap": capitalize,
    "whole": lambda text: text.replace(" ", UNBREAKABLE_SPACE),
    "load_model": load_model,
    "measure_model": measure_model,
    "judge_model_support": judge_model_support,
    "explain_memory_utilization": explain_memory_utilization,
    "explain_unsupported_artifacts": explain_unsupported_artifacts,
    "explain_skipped_pools": explain_skipped_pools,
    "explain_implausible_limits": explain_implausible_limits,
    "is_least_load": is_least_load,
    "is_same_price": is_same_price,
    "sure_memory": SURE_MEMORY_PROBABILITY,
    "equal_cost": EQUAL_COST_SHARE,
    "days_per_month": HOURS_PER_MONTH / 24,
    "inf": math.inf,
}
"""What templates of every surface know beside their answer."""


def render_words(template: str, **values: object) -> str:
    """Render a template of a surface with `KNOWN` and its own values."""
    return render_template("ui", template, **KNOWN, **values)


def __getattr__(name: str) -> Callable[..., str]:
    """Get a macro as a function."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _get_macro(name)


@cache
def _get_macro(name: str) -> Callable[..., str]:
    """Get a macro as a function that joins its lines by spaces, but for punctuation."""
    macro = getattr(load_macros("answers", "words", **KNOWN), name)

    def say(*values: object) -> str:
        text = re.sub(r"[ \n]+", " ", str(macro(*values))).strip()
        return re.sub(r" (?=[,;:)]|\.(?: |$))|(?<=\() ", "", text)

    return say
