"""`/docs`: the server's routes and schemas on one page, which loads nothing from other sites."""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #8881; padding: .6rem; overflow-x: auto; }
details { border: 1px solid #8884; border-radius: 6px; margin: .4rem 0; padding: .3rem .7rem; }
summary { cursor: pointer; }
.method { display: inline-block; min-width: 4.2rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; border-top: 1px solid #8883; padding: .2rem .6rem .2rem 0; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""
_FIRST_SENTENCE = re.compile(r".*?[^.]\.(?=\s|$)", re.DOTALL)


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Returns a page of all routes with their parameters, bodies and answers. `/openapi.json` is the same for
    programs."""
    return HTMLResponse(_page(json.dumps(request.app.openapi())))


@cache
def _page(openapi: str) -> str:
    described: dict[str, Any] = json.loads(openapi)
    info, schemas = described["info"], described["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            tag = operation.get("tags", ["other"])[0]
            groups.setdefault(tag, []).append(_operation(method, path, operation))
    links = " · ".join(f'<a href="#{escape(tag)}">{escape(tag)}</a>' for tag in [*groups, "schemas"])
    parts = [f'<h2 id="{escape(tag)}">{escape(tag)}</h2>' + "".join(routes) for tag, routes in groups.items()]
    parts.append('<h2 id="schemas">schemas</h2>' + "".join(_schema(name, one) for name, one in schemas.items()))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])}</p>"
        f'<p>{links} · <a href="/openapi.json">openapi.json</a></p>{"".join(parts)}</body></html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    described = escape(operation.get("description", operation.get("summary", "")))
    found = _FIRST_SENTENCE.match(described)
    first = found[0] if found else described
    body = "".join(_body(operation["requestBody"])) if "requestBody" in operation else ""
    answers = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer.get('description', ''))}{_of_content(answer)}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f'<details><summary><span class="method">{escape(method.upper())}</span><code>{escape(path)}</code> '
        f"{first}</summary><p>{described}</p>{_parameters(operation.get('parameters', []))}{body}"
        f"<h4>Answers</h4><table>{answers}</table></details>"
    )


def _parameters(given: list[dict[str, Any]]) -> str:
    if not given:
        return ""
    rows = "".join(
        f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}</td>"
        f"<td>{_type(one.get('schema', {}))}</td><td>{escape(one.get('description', ''))}</td></tr>"
        for one in given
    )
    return f"<h4>Parameters</h4><table>{rows}</table>"


def _body(body: dict[str, Any]) -> list[str]:
    return ["<h4>Body</h4>", _of_content(body)]


def _of_content(answer: dict[str, Any]) -> str:
    shown = [
        f"<code>{escape(kind)}</code> {_type(one.get('schema', {}))}" for kind, one in answer.get("content", {}).items()
    ]
    return f"<div>{'<br>'.join(shown)}</div>" if shown else ""


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}</td><td>{_type(one)}</td>"
        f"<td>{escape(one.get('description', ''))}</td></tr>"
        for field, one in schema.get("properties", {}).items()
    )
    example = "".join(f"<pre>{escape(json.dumps(one, indent=2))}</pre>" for one in schema.get("examples", []))
    return (
        f'<details id="schema-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<p>{escape(schema.get('description', ''))}</p><table>{rows}</table>{example}</details>"
    )


def _type(schema: dict[str, Any]) -> str:
    """Returns a short description of a schema, with links to the schemas it refers to."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " | ".join(map(_type, schema[key]))
    if "enum" in schema:
        return " | ".join(f"<code>{escape(json.dumps(one))}</code>" for one in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[name]:g}"
        for name, sign in (("minimum", "≥"), ("exclusiveMinimum", "&gt;"), ("maximum", "≤"))
        if name in schema
    ]
    return " ".join([escape(str(kind)), *bounds])
