"""Configurations of models on the Hugging Face Hub: in the caches of this machine, or downloaded."""

import os
import re
import socket
from contextlib import suppress
from functools import cache
from glob import escape
from pathlib import Path
from urllib.parse import urlsplit

from planner.core.errors import PlannerError
from planner.core.files import ensure_folder, find_user_cache, replace_atomically
from planner.core.http import fetch_bytes
from planner.core.units import MIB

CONFIG_FILES = ("config.json", "hf_quant_config.json")
"""What is downloaded; most checkpoints lack the second file."""
MAX_CONFIG_BYTES = 16 * MIB


def find_hub_config(name: str) -> Path | None:
    """Find the newest `config.json` of a repository that an engine or the planner downloaded."""
    folder = escape(f"models--{name.replace('/', '--')}")
    hub_cache, own = _find_hub_cache(), _locate_config(name)
    paths = [*hub_cache.glob(f"{folder}/snapshots/*/config.json")] if hub_cache else []
    paths += [own] if own else []
    return max(filter(os.path.isfile, paths), key=os.path.getmtime, default=None)


def download_hub_config(name: str) -> Path | None:
    """Download the configuration of a repository; None without network or repository.

    Raises `PlannerError` if the user has no folder to keep it in.
    """
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII)
    if not (is_name and check_hub_reachable()):
        return None
    if not (path := _locate_config(name)):
        raise PlannerError(
            f"the configuration of {name} can't be kept: there is no home folder; name a folder in"
            " XDG_CACHE_HOME"
        )
    for file in CONFIG_FILES:
        address = f"{_get_endpoint()}/{name}/resolve/main/{file}"
        try:
            content = fetch_bytes(address, MAX_CONFIG_BYTES, _read_token())
        except (OSError, ValueError):
            break
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


def _locate_config(name: str) -> Path | None:
    folder = find_user_cache()
    return folder / "models" / name.replace("/", "--") / CONFIG_FILES[0] if folder else None


def _find_hub_cache() -> Path | None:
    home = _find_home()
    folder = os.environ.get("HF_HUB_CACHE") or (home and home / "hub")
    return Path(folder) if folder else None


def _find_home() -> Path | None:
    """Return the folder of the Hub's own tools, their cache and the user's token; None without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return None


def _get_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _read_token() -> str:
    """Return the user's token; empty without one."""
    token = os.environ.get("HF_TOKEN", "")
    with suppress(OSError):
        token = token or ((home := _find_home()) and (home / "token").read_text("utf-8")) or ""
    return token.strip()
