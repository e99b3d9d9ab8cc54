"""Commands that list what is shipped: scenarios, models and gpus."""

import argparse
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.text import escape_to_one_line, format_columns
from planner.core.units import GB, GIB

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_scenarios(commands: "Subparsers") -> None:
    """Declare `planner scenarios`."""
    parser = commands.add_parser("scenarios", help="list the shipped scenarios")
    parser.set_defaults(run=run_scenarios)


def run_scenarios(_options: argparse.Namespace) -> None:
    """Print the shipped scenarios with their questions."""
    from planner.core.readers import read_yaml
    from planner.planning.scenario import SCENARIO_DIR, list_scenarios

    for name in list_scenarios():
        question = read_yaml(SCENARIO_DIR / f"{name}.yaml")["question"]
        print(f"{name:20}{escape_to_one_line(question)}")


def add_models(commands: "Subparsers") -> None:
    """Declare `planner models`."""
    parser = commands.add_parser("models", help="list the models of the catalog")
    _add_pattern(parser)
    parser.set_defaults(run=run_models)


def add_gpus(commands: "Subparsers") -> None:
    """Declare `planner gpus`."""
    parser = commands.add_parser("gpus", help="list the gpus of the catalog")
    _add_pattern(parser)
    parser.set_defaults(run=run_gpus)


def _add_pattern(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        metavar="PATTERN",
        help="part of a name; * is anything",
    )


def run_models(options: argparse.Namespace) -> None:
    """Print the models that match a pattern."""
    from planner.models.registry import list_model_names, list_models, load_model

    names = list_model_names() if options.pattern else list_models()
    rows = [("model", "parameters", "active", "context", "weights")]
    for name in _filter_names(options.pattern, names, "model"):
        model = load_model(name)
        architecture, method = model.architecture, model.quantization.method
        rows.append(
            (
                name,
                f"{architecture.params_total / 1e9:.2f} B",
                f"{architecture.params_active / 1e9:.2f} B" if architecture.is_moe else "",
                f"{architecture.max_position:,}",
                model.dtype if method == "none" else method,
            )
        )
    print(format_columns(rows))


def run_gpus(options: argparse.Namespace) -> None:
    """Print the GPUs that match a pattern."""
    from planner.hardware.gpus import get_gpu, list_gpus
    from planner.hardware.prices import look_up_gpu_price

    known = {alias: gpu.name for gpu in list_gpus() for alias in (gpu.name, *gpu.aliases)}
    matches = _filter_names(options.pattern, known, "GPU")
    rows = [("GPU", "GiB", "GB/s", "USD/h", "engines, from and to version")]
    for gpu in map(get_gpu, dict.fromkeys(known[name] for name in matches)):
        price = look_up_gpu_price(gpu)
        rows.append(
            (
                gpu.name,
                f"{gpu.memory_bytes / GIB:.1f}",
                f"{gpu.memory_bandwidth / GB:,.0f}",
                f"{price.median_usd:.2f}" if price else "?",
                ", ".join(
                    f"{engine} {first}{f'-{last}' if last else '+'}"
                    for engine, (first, last) in gpu.supported.items()
                ),
            )
        )
    print(format_columns(rows))


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
