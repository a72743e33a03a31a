"""The pages for browsers: the chat at `/`, the map at `/map`, and the files that they load from this server alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from tenuto.base.errors import NotFound

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
"""Pages load and connect to nothing but this server, run no inline scripts, and are shown in no other page."""

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the pages: its content, its type, and a tag that changes with its content."""

    content: bytes
    kind: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        content = path.read_bytes()
        return cls(content, TYPES[path.suffix], f'"{sha256(content).hexdigest()[:20]}"')


@cache
def _files() -> dict[str, StaticFile]:
    """Returns the files by their paths below `/static`."""
    found = (path for path in STATIC.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): StaticFile.read(path) for path in found}


def _answer(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise NotFound(f"there is no file {name[:200]!r}")
    headers = {
        "cache-control": "no-cache",
        "etag": file.tag,
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)


@router.get("/map")
async def memory_map(request: Request) -> Response:
    """Returns the page with the memory map."""
    return _answer(request, "map.html")


@router.get("/static/{name:path}")
async def static(request: Request, name: str) -> Response:
    """Returns a file of the pages."""
    return _answer(request, name)


@router.get("/")
async def root(request: Request) -> Response:
    """Returns the chat page to browsers, and sends other clients to `/docs`."""
    if "text/html" in request.headers.get("accept", ""):
        response = _answer(request, "chat.html")
    else:
        response = RedirectResponse("/docs")
    response.headers["vary"] = "accept"
    return response
