"""Fetch what an address names, within limits of time and size, from HTTP servers only."""

from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib import request
from urllib.parse import urlsplit

from planner.core.errors import PlannerError
from planner.core.units import MIB

FETCH_DEADLINE_S = 30
"""For a whole answer, redirects included."""


class SameHostRedirects(request.HTTPRedirectHandler):
    """Follow redirects; a token stays with the server that it is for."""

    def redirect_request(self, req: request.Request, *answer: Any) -> request.Request | None:
        """Return the request to follow."""
        following = super().redirect_request(req, *answer)
        if following and urlsplit(following.full_url)[:2] != urlsplit(req.full_url)[:2]:
            following.remove_header("Authorization")
        return following


_HTTP_HANDLERS = (
    request.ProxyHandler,
    request.UnknownHandler,
    request.HTTPHandler,
    request.HTTPSHandler,
    request.HTTPDefaultErrorHandler,
    SameHostRedirects,
    request.HTTPErrorProcessor,
)
"""The usual ones, without those for files, FTP and data in the address."""


def fetch_bytes(address: str, max_bytes: int, token: str = "") -> bytes:
    """Fetch a whole answer within `FETCH_DEADLINE_S`; `PlannerError` if there is none."""
    results: SimpleQueue[bytes | Exception] = SimpleQueue()

    def fetch() -> None:
        try:
            results.put(_fetch_body(address, max_bytes, token))
        except Exception as error:
            results.put(error)

    # a server that sends a byte now and then never runs into a socket's own limit
    Thread(target=fetch, daemon=True).start()
    try:
        body = results.get(timeout=FETCH_DEADLINE_S)
        if isinstance(body, Exception):
            raise body
        return body
    except Empty:
        problem = f"no whole answer within {FETCH_DEADLINE_S} s"
    except (OSError, ValueError, HTTPException) as error:
        problem = str(error) or type(error).__name__
    raise PlannerError(f"cannot read {address}: {problem}")


def _fetch_body(address: str, max_bytes: int, token: str) -> bytes:
    """Return the body of an HTTP answer, also after redirects, which lead to HTTP only."""
    opener = request.OpenerDirector()
    for handler in _HTTP_HANDLERS:
        opener.add_handler(handler())
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    prepared = request.Request(address, headers=headers)
    with opener.open(prepared, timeout=FETCH_DEADLINE_S / 3) as response:
        body: bytes = response.read(max_bytes + 1)
        if len(body) > max_bytes:
            raise ValueError(f"the answer has more than {max_bytes // MIB} MiB")
        if response.length:
            raise ValueError(f"the answer is cut short, {response.length:,} bytes are missing")
        return body
