"""GET /, the page's files, and GET /cluster/events, which the page and `mini-infer top` read."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.errors import NotFoundError
from router.gateway import Gateway
from router.http.chunk_writer import CHUNK_WRITER
from router.http.routes import Routes
from router.page.feed import Feed

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def add_page(routes: Routes, gateway: Gateway) -> None:
    """Serve the page's files without a key, as a browser cannot send one for them; the page's requests need one."""
    feed = Feed(gateway)
    bundle = {item.name: item.read_bytes() for item in files(__package__).joinpath("static").iterdir()}

    async def page(request: Request) -> Response:
        return _file(request, "index.html", bundle)

    async def part(request: Request) -> Response:
        return _file(request, request.path_params["file"], bundle)

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(headers=EVENT_HEADERS, media_type="text/event-stream")
        writer = request.scope[CHUNK_WRITER]
        return StreamingResponse(feed.events(writer), headers=EVENT_HEADERS, media_type="text/event-stream")

    routes.add("GET", "/", page, "a page with a chat and the cluster as it is now")
    routes.add("GET", "/page/{file}", part, "the files of that page")
    routes.add("GET", "/cluster/events", events, "the cluster each second, as server-sent events")
    routes.open_paths |= {b"/", *(f"/page/{name}".encode() for name in bundle)}


def _file(request: Request, name: str, bundle: dict[str, bytes]) -> Response:
    if name not in bundle:
        raise NotFoundError("the page has no such file")
    headers = HEADERS | {"etag": f'"{hashlib.sha256(bundle[name]).hexdigest()[:16]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(bundle[name], headers=headers, media_type=TYPES[name.rpartition(".")[2]])
