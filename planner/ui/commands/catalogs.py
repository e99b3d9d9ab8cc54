"""Commands that list what is shipped: scenarios, models and gpus."""

import argparse
from typing import TYPE_CHECKING

from planner.core.text import escape_to_one_line, format_columns
from planner.core.units import GB, GIB
from planner.ui.commands.options import format_json

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_scenarios(commands: "Subparsers") -> None:
    """Declare `headroom scenarios`."""
    parser = commands.add_parser(
        "scenarios", help="list the shipped scenarios, with their questions"
    )
    parser.set_defaults(run=run_scenarios)


def run_scenarios(_options: argparse.Namespace) -> None:
    """Print the shipped scenarios with their questions."""
    from planner.core.readers import read_yaml
    from planner.planning.scenario import SCENARIO_DIR, list_scenarios

    for name in list_scenarios():
        question = read_yaml(SCENARIO_DIR / f"{name}.yaml")["question"]
        print(f"{name:20}{escape_to_one_line(question)}")


def add_models(commands: "Subparsers") -> None:
    """Declare `headroom models`."""
    parser = commands.add_parser(
        "models", help="list the models of the catalog, with size and context"
    )
    _add_pattern(parser)
    parser.set_defaults(run=run_models)


def add_gpus(commands: "Subparsers") -> None:
    """Declare `headroom gpus`."""
    parser = commands.add_parser(
        "gpus", help="list the GPUs of the catalog, with memory, bandwidth and price"
    )
    _add_pattern(parser)
    parser.set_defaults(run=run_gpus)


def _add_pattern(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        metavar="PATTERN",
        help="part of a name; * matches anything",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run_models(options: argparse.Namespace) -> None:
    """Print the models that match a pattern."""
    from planner.ui.catalog_json import find_models, serialize_models

    if options.json:
        print(format_json({"models": serialize_models(options.pattern)}))
        return
    rows = [("model", "parameters", "active", "context", "weights")]
    for name, model in find_models(options.pattern).items():
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
    from planner.hardware.prices import look_up_gpu_price
    from planner.ui.catalog_json import find_gpus, serialize_gpus

    if options.json:
        print(format_json({"gpus": serialize_gpus(options.pattern)}))
        return
    rows = [("GPU", "GiB", "GB/s", "USD/h", "engines, from and to version")]
    for gpu in find_gpus(options.pattern):
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
