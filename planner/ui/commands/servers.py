"""The command after launch: verify."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planner.core.errors import PlannerError, require_extra
from planner.core.files import (
    OWN_PDF,
    check_not_overwriting,
    check_replaceable,
    replace_atomically,
)
from planner.ui.commands.options import (
    add_force,
    format_json,
    parse_count,
    watch_command,
)

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Add PLAN, a written plan."""
    parser.add_argument(
        "plan",
        metavar="PLAN",
        help="folder that `headroom plan --out` wrote, its plan.json, or a scenario",
    )


def add_verify(commands: "Subparsers") -> None:
    """Declare `headroom verify`."""
    parser = commands.add_parser(
        "verify",
        help="compare a launched server's measurements with its plan: PASS or FAIL",
        description="Compare a launched server's measurements with its plan. Exit code: 0 for PASS, 1"
        " for FAIL, 3 if no KV cache or no latency was measured.",
    )
    add_plan_argument(parser)
    parser.add_argument(
        "--bench", nargs="+", type=Path, default=[], metavar="FILE",
        help="results of bench.sh (vllm bench serve), SGLang's bench_serving, GuideLLM, AIPerf, "
        "genai-perf or inference-perf, or the table that vLLM and SGLang print",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="PAGE",
        help="one or two saved /metrics pages of a replica, the earlier first, or its URL",
    )  # fmt: skip
    parser.add_argument("--log", type=Path, metavar="LOG", help="startup log of the server")
    parser.add_argument(
        "--seconds", type=float, metavar="S",
        help="time between the two pages, if the files' times do not show it",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=parse_count, default=1, metavar="N",
        help="number of replicas that the benchmark ran on (default: 1, as in bench.sh)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the result to FILE.md or FILE.pdf"
    )
    add_force(parser)
    parser.set_defaults(run=run_verify)


VERDICT_CODES = {"PASS": 0, "FAIL": 1, "NOT MEASURED": 3}
"""Exit codes of `headroom verify`."""
OWN_PAGE = "Cost and power are not in these files."
"""What every page of `headroom verify` says (`launch_check.md.j2`)."""


@watch_command
def run_verify(options: argparse.Namespace) -> int:
    """Print what was measured beside what was planned; the exit code is the verdict's."""
    from planner.tools.diagnostics.launch_check import check_launch

    out = options.out
    if out is not None:
        pages = [Path(page) for page in (options.plan, *options.metrics)]
        check_not_overwriting([*options.bench, *pages, *filter(None, [options.log])], [out])
        if out.suffix not in (".md", ".pdf"):
            raise PlannerError(f"--out names a .md or .pdf file, got {out}")
        own = OWN_PDF if out.suffix == ".pdf" else ("# ", OWN_PAGE)
        check_replaceable(out, *own, force=options.force)
    typeset = load_typesetter() if out is not None and out.suffix == ".pdf" else str.encode
    check = check_launch(
        options.plan, options.bench, options.metrics, options.log, options.seconds, options.replicas
    )
    print(format_json(check.to_json()) if options.json else check)
    if out is not None:
        with replace_atomically(out) as (part,):
            part.write_bytes(typeset(check.to_markdown()))
    return VERDICT_CODES[check.verdict]


def load_typesetter() -> Callable[[str], bytes]:
    """Return the function that makes a PDF of a page of Markdown."""
    with require_extra("report", "a PDF"):
        import pypandoc
        import typst

    def typeset(text: str) -> bytes:
        style = f'#set document(keywords: "{OWN_PDF[1]}")\n'
        style += "#set page(margin: 1.5cm)\n#set text(size: 9pt)\n#set table(stroke: 0.3pt)\n"
        style += "#let horizontalrule = line(length: 100%)\n"
        body = pypandoc.convert_text(text, "typst", format="gfm")
        return bytes(typst.compile((style + body).encode(), ignore_system_fonts=True))

    return typeset
