"""vLLM's own parser, of an installed vLLM, reads out of every command what was planned."""

import json
import os
import subprocess
import sys
from typing import Any

import launch_plans
import pytest
from launch_plans import filled, plans

from planner.engines.cli_options import get_cli_options

PARSE = """
import json, sys
import vllm, vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()  # a machine without a GPU has no defaults to show
try:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.common.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
if len(sys.argv) > 1:
    print(json.dumps([vllm.__version__, sorted(parser._option_string_actions)]))
else:
    print(json.dumps([vars(parser.parse_args(words)) for words in json.load(sys.stdin)], default=str))
"""
INTERPRETERS = [
    one for one in os.environ.get("VLLM_PYTHON", sys.executable).split(os.pathsep) if one
]


def run(interpreter: str, *more: str, words: list[list[str]] | None = None) -> Any:
    """What vLLM's parser under `interpreter` makes of command lines; the test is skipped where there is no vLLM."""
    done = subprocess.run([interpreter, "-c", PARSE, *more], input=json.dumps(words), capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": "", "VLLM_LOGGING_LEVEL": "ERROR"}, check=False)  # fmt: skip
    if "No module named 'vllm'" in done.stderr:
        pytest.skip(
            "vLLM is not installed; VLLM_PYTHON names interpreters that have it (pip install vllm:"
            " 8 GB)"
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_vllm_itself_reads_what_is_planned(
    interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, spellings = run(interpreter, "what it knows")
    monkeypatch.setitem(launch_plans.VERSIONS, "vllm", [version])
    launches = list(plans("vllm", 150, 5))
    lines = [[filled(word) for word in launch.arguments][2:] for launch in launches]
    found = run(interpreter, words=lines)
    known = get_cli_options("vllm", version)
    hidden = (
        set(spellings) - known.spellings
    )  # what 0.33 no longer shows of a switch, and still takes
    assert str(known.version) == version and known.spellings <= set(spellings)
    assert all(name.startswith("--no-") and not known.parse([name]).errors for name in hidden)
    assert len(found) == len(lines)
    for line, theirs in zip(lines, found, strict=True):
        ours = known.parse(line)
        assert theirs["model_tag"] == line[0] and ours.values
        for name, value in ours.values.items():
            assert theirs[name] == value, (name, line)
