"""The command that opens JupyterLab: lab."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_lab(commands: "Subparsers") -> None:
    """Declare `headroom lab`."""
    parser = commands.add_parser(
        "lab",
        help="open the cockpit and the notebooks in JupyterLab",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="DIR",
        help="folder for a copy of the notebooks; existing files are kept (default: "
        "headroom-notebooks). Further options go to JupyterLab and take an equals sign: "
        "--no-browser --port=8899",
    )
    parser.set_defaults(run=run_lab, takes_rest=lambda _: True, extra="lab")


def run_lab(options: argparse.Namespace) -> None:
    """Open JupyterLab, which gets the options that this command does not know."""
    from planner.ui.lab_server import DEFAULT_FOLDER, open_lab

    words = [
        *([options.folder] if options.folder else []),
        *(word for word in options.rest if word != "--"),
    ]
    folder = None if not words or words[0].startswith("-") else words.pop(0)
    open_lab(Path(folder or DEFAULT_FOLDER), words)
