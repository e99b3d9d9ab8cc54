"""The command that lists what is shipped: scenarios, models and GPUs."""

import argparse
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.text import escape_to_one_line, format_columns
from planner.core.units import GB, GIB
from planner.ui.commands.options import JSON, declare, format_json, make_command

Listed = tuple[dict[str, Any], tuple[str, ...]]
"""What is listed: its fields for --json, and its cells."""


def run_list(options: argparse.Namespace) -> None:
    """Print what matches a pattern."""
    find, headings = CATALOGS[options.kind]
    fields, cells = zip(*find(options.pattern), strict=True)
    print(
        format_json({options.kind: list(fields)})
        if options.json
        else format_columns([headings, *cells])
    )


def find_scenarios(pattern: str) -> Iterator[Listed]:
    """Yield the shipped scenarios that match, with their questions; see `_filter_names`."""
    from planner.core.readers import read_yaml
    from planner.planning.scenario import SCENARIO_DIR, list_scenarios

    for name in _filter_names(pattern, list_scenarios(), "scenario"):
        question = escape_to_one_line(read_yaml(SCENARIO_DIR / f"{name}.yaml")["question"])
        yield {"name": name, "question": question}, (name, question)


def find_models(pattern: str) -> Iterator[Listed]:
    """Yield the models whose names match; see `_filter_names`."""
    from planner.models.registry import list_model_names, list_models, load_model

    names = list_model_names() if pattern else list_models()
    for name in _filter_names(pattern, names, "model"):
        model = load_model(name)
        architecture, method = model.architecture, model.quantization.method
        fields = {
            "name": name,
            "parameters": architecture.params_total,
            "active_parameters": architecture.params_active,
            "context_tokens": architecture.max_position,
            "dtype": model.dtype,
            "quantization": method,
        }
        yield (
            fields,
            (
                name,
                f"{architecture.params_total / 1e9:.2f} B",
                f"{architecture.params_active / 1e9:.2f} B" if architecture.is_moe else "",
                f"{architecture.max_position:,}",
                model.dtype if method == "none" else method,
            ),
        )


def find_gpus(pattern: str) -> Iterator[Listed]:
    """Yield the GPUs of which a name or an alias matches, with their prices; see `_filter_names`."""
    from planner.hardware.gpus import get_gpu, list_gpus
    from planner.hardware.prices import look_up_gpu_price

    known = {alias: gpu.name for gpu in list_gpus() for alias in (gpu.name, *gpu.aliases)}
    for name in dict.fromkeys(known[name] for name in _filter_names(pattern, known, "GPU")):
        gpu = get_gpu(name)
        price = look_up_gpu_price(gpu)
        fields = {
            "name": name,
            "aliases": list(gpu.aliases),
            "memory_gib": gpu.memory_bytes / GIB,
            "memory_basis": gpu.memory_basis,
            "bandwidth_gb_per_s": gpu.memory_bandwidth / GB,
            "usd_per_hour": price
            and {"median": price.median_usd, "min": price.min_usd, "max": price.max_usd},
            "price_source": str(price) if price else None,
            "engines": {
                engine: [str(first), None if last is None else str(last)]
                for engine, (first, last) in gpu.supported.items()
            },
        }
        yield (
            fields,
            (
                name,
                f"{gpu.memory_bytes / GIB:.1f}",
                f"{gpu.memory_bandwidth / GB:,.0f}",
                f"{price.median_usd:.2f}" if price else "?",
                ", ".join(
                    f"{engine} {first}{f'-{last}' if last else '+'}"
                    for engine, (first, last) in gpu.supported.items()
                ),
            ),
        )


CATALOGS = {
    "scenarios": (find_scenarios, ("scenario", "question")),
    "models": (find_models, ("model", "parameters", "active", "context", "weights")),
    "gpus": (find_gpus, ("GPU", "GiB", "GB/s", "USD/h", "engines, from and to version")),
}
"""What finds each kind of thing that is listed, and the headings of its cells."""


def _filter_names(pattern: str, names: Iterable[str], kind: str) -> list[str]:
    """Return the names that contain `pattern`, in which `*` matches anything.

    Raises `PlannerError` if there are none.
    """
    if len(pattern) > 200:
        raise PlannerError(f"a part of a name has at most 200 letters, got {len(pattern):,}")
    names = list(names)
    matches = [name for name in names if fnmatchcase(name.casefold(), f"*{pattern.casefold()}*")]
    if not matches:
        parts = {part for name in names for part in (name, *re.split("[/-]", name))}
        raise make_unknown_name_error(pattern, parts, kind, min_similarity=0.6)
    return matches


add_list = make_command(
    "list",
    run_list,
    help="list the shipped scenarios, or the models or GPUs of the catalog",
    arguments=[
        declare("kind", choices=CATALOGS, metavar="KIND", help=", ".join(CATALOGS)),
        declare(
            "pattern",
            nargs="?",
            default="",
            metavar="PATTERN",
            help="part of a name; * matches anything",
        ),
        JSON,
    ],
)
