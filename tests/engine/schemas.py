"""Random JSON schemas, and engines that answer in them: `python -m tests.engine.schemas [COUNT] [--model MODEL]`.

The witness generates any text that a schema allows, which a model seldom does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

import jsonschema

import tenuto

DEPTH = 3
PATTERNS = ("^[a-f]{1,4}$", "^\\d{4}-\\d{2}-\\d{2}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$")
WORDS = ("red", "green", 'quo"te', "new\nline", "back\\slash", "é", "😀", "", "a/b", "Ω≈ç")


def schemas(seed: int) -> Iterator[dict[str, Any]]:
    """Yields an endless series of schemas whose texts are all short enough to end."""
    random = Random(seed)
    while True:
        yield _root(random)


def _root(random: Random) -> dict[str, Any]:
    if random.random() < 0.2:
        below = {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/node"}]}
        node = _object(random, 1, {"below": below})
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    if random.random() < 0.2:
        shared = _schema(random, 1)
        return {"$defs": {"shared": shared}, **_object(random, 2, {"one": {"$ref": "#/$defs/shared"}})}
    return _schema(random, DEPTH)


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "const", "types"]
    if depth:
        kinds += ["object", "array", "anyOf"] * 3
    kind = random.choice(kinds)
    if kind == "object":
        return _object(random, depth, {})
    if kind == "array":
        low = random.randrange(3)
        return {
            "type": "array",
            "items": _schema(random, depth - 1),
            "minItems": low,
            "maxItems": low + random.randrange(1, 4),
        }
    if kind == "anyOf":
        return {"anyOf": [_schema(random, depth - 1) for _ in range(random.randrange(1, 4))]}
    return _leaf(random, kind)


def _leaf(random: Random, kind: str) -> dict[str, Any]:
    low, span = random.randrange(-50, 50), random.randrange(1, 100)
    short = random.randrange(4)
    leaves: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": short, "maxLength": short + random.randrange(1, 12)},
        "pattern": {"type": "string", "pattern": random.choice(PATTERNS)},
        "integer": {"type": "integer", "minimum": 20 * low, "maximum": 20 * (low + span)},
        "number": {"type": "number", "minimum": low, "maximum": low + span, "multipleOf": 0.25},  # few digits
        "enum": {"enum": random.sample([*WORDS, 1, 2.5, None, True], random.randrange(1, 5))},
        "const": {"const": random.choice([*WORDS, 7, False])},
        "types": {"type": random.sample(["boolean", "null"], random.randrange(1, 3))},
    }
    return leaves.get(kind, {"type": kind})


def _object(random: Random, depth: int, also: dict[str, Any]) -> dict[str, Any]:
    names = random.sample(["a", "name", "long name", 'q"', "é", "x-1", "value", "items", "type"], random.randrange(5))
    properties = {name: _schema(random, depth - 1) for name in names} | also
    required = [name for name in properties if random.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def check(
    engine: tenuto.Engine, chosen: Sequence[dict[str, Any]], most: int = 2000, unfinished: list[str] | None = None
) -> int:
    """Makes the engine answer in all of the schemas at once. Returns the number of tokens generated; raises
    `AssertionError` if an answer does not parse or validate, or is not finished after `most` tokens. If `unfinished` is
    a list, such answers are added to it instead: a small model may nest objects endlessly."""
    turns = [
        engine.session().turn(f"{n}:", grammar={"json_schema": schema}, max_new_tokens=most, temperature=1.0, seed=n)
        for n, schema in enumerate(chosen)
    ]
    tokens = 0
    for schema, turn in zip(chosen, turns, strict=True):
        text = "".join(turn)
        result = turn.result()
        if unfinished is not None and result.reason == "length":
            unfinished.append(text)
            continue
        assert result.reason == "stop", f"{result.reason} after {text[:200]!r}, by {schema}"
        jsonschema.validate(json.loads(text), schema)
        tokens += result.usage.generated
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--model", default="witness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=2000, help="most tokens of an answer")
    given = parser.parse_args()
    tokens, source = 0, schemas(given.seed)
    unfinished: list[str] | None = None if given.model == "witness" else []
    with tenuto.Engine(given.model, context_length=4096, max_running=16) as engine:
        for start in range(0, given.count, 16):
            tokens += check(engine, list(islice(source, min(16, given.count - start))), given.most, unfinished)
        engine.audit()
    rest = f", but {len(unfinished)} were not finished after {given.most} tokens" if unfinished else ""
    print(f"{given.count} schemas, {tokens} tokens: every answer parses and validates{rest}")


if __name__ == "__main__":
    main()
