"""A command that opens JupyterLab, run as it is written: does it answer with `start.ipynb`?

Run as a script it ends with 0 if it does: `python tests/lab_answers.py make lab`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 20
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {
        "windowingMode": "none"
    },  # cells out of sight too
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false"},
}


@contextmanager
def serving(command: Sequence[str] | str, folder: Path) -> Iterator[str]:
    """Run `command` in `folder`, with Jupyter settings of its own; its address once it answers.

    The settings stand for a person at a desk: a port that is free, no password, and a browser that
    opens by itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        _configure(Path(home), port)
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": home,
            "JUPYTERLAB_SETTINGS_DIR": f"{home}/user-settings",
        }
        environment["BROWSER"] = "true"  # a program that does nothing
        with tempfile.TemporaryFile("w+") as said:
            server = subprocess.Popen(
                command, cwd=folder, env=environment, shell=isinstance(command, str),
                stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                address = f"http://127.0.0.1:{port}"
                deadline_s = time.monotonic() + START_TIMEOUT_S
                while not _answers(address):
                    if server.poll() is not None or time.monotonic() > deadline_s:
                        said.seek(0)
                        raise RuntimeError(f"{command} does not answer: {said.read()[-3000:]}")
                    time.sleep(0.2)
                yield f"{address}/lab"
            finally:
                if server.poll() is None:
                    os.killpg(
                        server.pid, signal.SIGTERM
                    )  # a group: `make` and a shell are not the server
                server.wait(timeout=STOP_TIMEOUT_S)


def _configure(home: Path, port: int) -> None:
    """Write the settings of a server on `port`."""
    server = {
        "ServerApp": {"port": port, "port_retries": 0, "allow_root": True},
        "IdentityProvider": {"token": ""},
    }
    never = "jupyterlab.handlers.announcements.NeverCheckForUpdate"
    lab = {
        "LabApp": {
            "expose_app_in_browser": True,
            "news_url": None,
            "check_for_updates_class": never,
        }
    }
    (home / "jupyter_server_config.json").write_text(json.dumps(server))
    (home / "jupyter_lab_config.json").write_text(json.dumps(server | lab))
    notebook = {"JupyterNotebookApp": {"expose_app_in_browser": True}}
    (home / "jupyter_notebook_config.json").write_text(json.dumps(server | notebook))
    for name, values in SETTINGS.items():
        path = home / "user-settings" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))


def _answers(address: str) -> bool:
    """Tell whether a server answers at `address`, on its first page too."""
    try:
        with urllib.request.urlopen(address, timeout=5) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def check_start(address: str) -> None:
    """Raise `AssertionError` or `OSError` unless the server opens on `start.ipynb`, which is Headroom's."""
    root = address.removesuffix("/lab")
    with urllib.request.urlopen(root, timeout=20) as page:
        assert page.status == 200 and page.url == f"{address}/tree/start.ipynb", page.url
    with urllib.request.urlopen(f"{root}/api/contents/start.ipynb", timeout=20) as found:
        assert "planner" in json.dumps(json.load(found)["content"])


if __name__ == "__main__":
    with serving(sys.argv[1:], Path.cwd()) as at:
        check_start(at)
        print(f"{' '.join(sys.argv[1:])}: {at}/tree/start.ipynb answers")
