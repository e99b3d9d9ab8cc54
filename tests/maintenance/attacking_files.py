"""Files whose every text attacks whoever shows it, and a stranger's server that would see it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import yaml

from planner.core.catalog import load_catalog
from planner.models.registry import ModelEntry
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG
from planner.ui.notebook_files import NOTEBOOK_DIR

ATTACK = (
    r"<img src=x onerror=window.ran=1>[a](javascript:window.ran=1)"
    r"$$\href{javascript:window.ran=1}{b}$$${HOME}{{7*7}}`c`"
)
"""A text that would run wherever it were taken for HTML, Markdown, a formula or a template; a name of a file, too."""


@contextmanager
def listen() -> Iterator[tuple[str, list[str]]]:
    """The address of a stranger's server, and the paths that were fetched from it."""
    fetched: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as listener:
        Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_address[1]}", fetched
        listener.shutdown()


def write_attacks(place: Path, stranger: str) -> str:
    """Write files whose texts all attack; returns the question of the current scenario."""
    question = (
        f"{ATTACK} <script>window.ran=1</script></script> <iframe src='{stranger}/f'></iframe>"
        f" <img src={stranger}/i> ![a]({stranger}/m) [b]({stranger}/l)"
    )
    config = load_catalog("models.yaml", ModelEntry)["Qwen/Qwen3-8B"].config
    (place / ATTACK).mkdir()
    (place / ATTACK / "config.json").write_text(json.dumps({**config, "_name_or_path": question}))
    calibration = {"coefficients": {"memory": 0.7}, "source": question, "date": "2026-11"}
    scenario = {
        "question": question,
        "model": f"./{ATTACK}",
        "gpus": [{"gpu": "H100-SXM", "at_most": 8}],
        "engine": "vllm",
        "engine_version": "0.20.2",
        "calibration": "own-calibration.txt",
        "speculation": {
            "method": "eagle3", "num_speculative_tokens": 3, "acceptance_rate": 0.6, "head": question
        },
        "workload": {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100}, "rate": 1},
        "service_level": {"ttft": {"p95": 2000}, "tpot": {"p95": 100}},
    }  # fmt: skip
    wrong = {"engine_version": question, "gpus": [{"gpu": question, "at_most": 8}], ATTACK: ATTACK}
    for name, content in {
        "own-calibration.txt": {"H100-SXM": calibration},
        "current.yaml": scenario,
        f"{ATTACK}.yaml": scenario,
        "wrong.yaml": {**scenario, **wrong},
        "fleet.txt": {"scenarios": [f"./{ATTACK}.yaml"], "stock": {"H100-SXM": 8}},
    }.items():
        (place / name).write_text(yaml.safe_dump(content), encoding="utf-8")
    log = EXAMPLE_LOG.read_text(encoding="utf-8")
    (place / "vllm.log").write_text(log.replace("ibm-granite/granite-3.1-8b-instruct", ATTACK))
    files = {"scenarios": f"current, {ATTACK}.yaml", "fleet": "fleet.txt"}
    for name, parameter in {"compare": "scenarios", "fleet": "fleet"}.items():
        notebook = json.loads((NOTEBOOK_DIR / f"{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        cells[0]["source"] = f"{parameter} = {files[parameter]!r}\nkept = ''"
        (place / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return question
