"""Configurations from the Hub: what is sent, what is kept, and who gets the user's token."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.models import hub
from planner.models.registry import load_model

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
QUANTIZED = {"quantization": {"quant_algo": "FP8"}}


@contextmanager
def serve(pages: dict[str, bytes | str]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Serve pages, and redirects where a page is text; yield the address and (path, token) of every request."""
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            page = pages.get(self.path)
            self.send_response(404 if page is None else 307 if isinstance(page, str) else 200)
            if isinstance(page, str):
                self.send_header("Location", page)
            self.end_headers()
            if isinstance(page, bytes):
                self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub.check_hub_reachable.cache_clear()
    yield
    hub.check_hub_reachable.cache_clear()


def test_a_configuration_is_downloaded_once_with_its_formats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = {
        "/acme/Once-1/resolve/main/config.json": "/cache/config.json",
        "/cache/config.json": json.dumps(CONFIG).encode(),
        "/acme/Once-1/resolve/main/hf_quant_config.json": json.dumps(QUANTIZED).encode(),
    }
    with serve(pages) as (address, seen):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        found = load_model("acme/Once-1")
        assert found.quantization.method == "fp8" and len(found.architecture.layers) == 2
        assert {token for _, token in seen} == {"Bearer hf_mine"}, "also after a redirect"
        num_requests = len(seen)
        path = hub.find_hub_config("acme/Once-1")
        assert path and json.loads(path.read_text()) == CONFIG and len(seen) == num_requests


def test_another_host_never_gets_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text("hf_mine\n")
    with serve({"/file": json.dumps(CONFIG).encode()}) as (other, seen_by_other):
        page = "/acme/Away-1/resolve/main/config.json"
        with serve({page: f"{other}/file"}) as (address, seen):
            monkeypatch.setenv("HF_ENDPOINT", address)
            assert hub.download_hub_config("acme/Away-1")
    assert seen[0] == (page, "Bearer hf_mine") and seen_by_other == [("/file", None)]


@pytest.mark.parametrize("name", ["acme/None-1", "../etc/passwd", "acme/a b", "acme"])
def test_what_the_hub_lacks_is_unknown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({}) as (address, seen):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert hub.download_hub_config(name) is None
        assert [path for path, _ in seen] == ["/acme/None-1/resolve/main/config.json"] * (
            name == "acme/None-1"
        )


def test_without_a_network_an_unknown_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlannerError, match="or a network to ask the Hub"):
        load_model("acme/Offline-1")
