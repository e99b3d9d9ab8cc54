"""Configurations of models on the Hugging Face Hub: in the caches of this machine, or downloaded."""

import os
import re
import socket
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path
from urllib.parse import urlsplit

from platformdirs import user_cache_path

from planner.core.access import may_fetch
from planner.core.files import ensure_folder, replace_atomically
from planner.core.http import fetch_bytes
from planner.core.units import MIB

CONFIG_FILES = ("config.json", "hf_quant_config.json")
"""What is downloaded; most checkpoints lack the second file."""
MAX_CONFIG_BYTES = 16 * MIB


def find_hub_config(name: str) -> Path | None:
    """Find the newest `config.json` of a repository that an engine or the planner downloaded."""
    cache_dir, _ = list_config_folders()
    folder = escape(f"models--{name.replace('/', '--')}")
    paths = [*cache_dir.glob(f"{folder}/snapshots/*/config.json"), _locate_config(name)]
    return max(filter(os.path.isfile, paths), key=os.path.getmtime, default=None)


def list_config_folders() -> tuple[Path, Path]:
    """List the folders of configurations: the Hub's own cache, and what the planner downloaded."""
    hub_cache = Path(os.environ.get("HF_HUB_CACHE", _get_home() / "hub"))
    return hub_cache, user_cache_path("headroom") / "models"


def download_hub_config(name: str) -> Path | None:
    """Download the configuration of a repository; None without network or repository."""
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII)
    if not (is_name and may_fetch() and check_hub_reachable()):
        return None
    path = _locate_config(name)
    with suppress(OSError, ValueError):
        for file in CONFIG_FILES:
            address = f"{_get_endpoint()}/{name}/resolve/main/{file}"
            content = fetch_bytes(address, MAX_CONFIG_BYTES, _read_token())
            ensure_folder(path.parent)
            with replace_atomically(path.with_name(file)) as (part,):
                part.write_bytes(content)
    return path if path.is_file() else None


@cache
def check_hub_reachable() -> bool:
    """Return whether the Hub answers; cached, so that only the first unknown name waits."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        hub = urlsplit(_get_endpoint())
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True


def _locate_config(name: str) -> Path:
    return list_config_folders()[1] / name.replace("/", "--") / CONFIG_FILES[0]


def _get_home() -> Path:
    """Return the folder of the Hub's own tools: their cache, and the user's token."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


def _get_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _read_token() -> str:
    """Return the user's token; empty without one."""
    path = _get_home() / "token"
    token = os.environ.get("HF_TOKEN") or (path.read_text("utf-8") if path.is_file() else "")
    return token.strip()
