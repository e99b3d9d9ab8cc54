"""Read a vLLM start-up log: its figures, the arguments that it names, and how it ended.

The phrases that are looked for stand in `catalogs/startup_log.yaml`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.core.readers import read_yaml
from planner.core.units import GIB

LOG_PHRASES: Mapping[str, Any] = read_yaml(CATALOG_DIR / "startup_log.yaml")
COUNT_FIGURES: Mapping[str, list[str]] = LOG_PHRASES["counts"]
"""Figures that are not bytes."""
_MIN_OVER_RANKS = ("free", "kv_available", *COUNT_FIGURES)
"""Of several ranks the tightest counts: the smallest of these, the largest of the others."""
_ARGUMENT_NAMES: Mapping[str, str] = LOG_PHRASES["arguments"]
"""The engine's names of arguments, and ours."""
_ARGUMENT_NAME_PATTERN = f"({'|'.join(_ARGUMENT_NAMES)})"
_ARGUMENT_PATTERN = re.compile(
    rf"(?:\b{_ARGUMENT_NAME_PATTERN}['\"]?\s*[=:]\s*|Defaulting {_ARGUMENT_NAME_PATTERN} to )"
    r"(?='([^']{0,200})'|\"([^\"]{0,200})\"|([\w./+-]{0,199}[\w/]))"  # a full stop ends a sentence
)
_SPECULATION_PATTERNS = {
    "method": r"'(\w{1,80})'",
    "model": r"'([^']{1,200})'",
    "num_spec(?:ulative)?_tokens": r"(\d{1,4})\b",
}


@dataclass(frozen=True)
class StartupLog:
    """What a start-up log states: figures (bytes, but counts as they are) and the engine's arguments."""

    figures: Mapping[str, float]
    arguments: Mapping[str, Any]
    """By our names: model, gpu, tp, engine_version, speculation (method, draft model, tokens) and whatever it names."""
    complete: bool
    """It lists all arguments that are not the engine's defaults."""
    failure: str


def parse_startup_log(text: str) -> StartupLog:
    """The figures and arguments in the `text` of a vLLM start-up log; `PlannerError` when it states none of them."""
    figures = {}
    for name, patterns in {**LOG_PHRASES["figures"], **COUNT_FIGURES}.items():
        lines = next((hits for pattern in patterns if (hits := _find_numbers(pattern, text))), [])
        if lines:
            values = [float(hit.replace(",", "")) for hit in lines]
            value = min(values) if name in _MIN_OVER_RANKS else max(values)
            figures[name] = value if name in COUNT_FIGURES else value * GIB
    arguments, said = dict[str, Any](), dict[str, str]()
    for hit in _ARGUMENT_PATTERN.finditer(text):
        name, word = (group for group in hit.groups() if group is not None)
        said.setdefault(name, word)
    for name, ours in _ARGUMENT_NAMES.items():
        if name in said:
            arguments.setdefault(ours, _parse_value(said[name]))
    if match := re.search(LOG_PHRASES["version"], text):
        arguments["engine_version"] = match[1]
    if speculative := re.search(
        r"speculative_config['\"]?\s*[=:]\s*(?:SpeculativeConfig\(|\{)([^)}\n]{0,999})", text
    ):
        spoken = [
            re.search(rf"\b{key}['\"]?\s*[=:]\s*{form}", speculative[1])
            for key, form in _SPECULATION_PATTERNS.items()
        ]
        arguments["speculation"] = tuple(match and match[1] for match in spoken)
    arguments |= {
        f"gpu_{name}": round(figures[name]) for name in ("total", "free") if name in figures
    }
    failures = [
        found
        for found in re.findall(LOG_PHRASES["failure"], text)
        if "root cause above" not in found
    ]
    if not {"weights", "kv_available", "kv_tokens", "free"} & set(figures) and not (
        failures and "model" in arguments
    ):
        raise PlannerError(
            'no vLLM start-up figures found; lines such as "Available KV cache memory: ..."'
            " would be"
        )
    return StartupLog(
        figures,
        {name: value for name, value in arguments.items() if value not in (None, "auto")},
        "non-default args" in text,
        failures[-1].strip() if failures else "",
    )


def _find_numbers(pattern: str, text: str) -> list[str]:
    """The numbers that `pattern` finds around the first thousand times that its longest plain phrase occurs."""
    phrase = max(re.split(r"N|__|[^\w ]", pattern), key=len)
    pattern = pattern.replace("__", r"[^(\n]{0,80}").replace(
        "N", r"(?<![\d.,])(-?\d[\d,]{0,18}(?:\.\d{1,20})?)", 1
    )
    near = islice(re.finditer(re.escape(phrase), text), 1000)
    return re.findall(
        pattern, "\n".join(text[max(hit.start() - 40, 0) : hit.end() + 200] for hit in near)
    )


def _parse_value(text: str) -> Any:
    text = text.removeprefix("torch.").removesuffix(".json")
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return (
        int(text)
        if re.fullmatch("[0-9]{1,15}", text)
        else float(text)
        if re.fullmatch(r"\d*\.\d+", text)
        else text
    )
