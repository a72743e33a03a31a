"""Error messages for invalid requests: they name the field as the request does, and what is allowed there.

Pydantic reports errors for every branch of a union, in Python's terms. Here a union has one problem: that of the branch
the value was probably meant for, or one that lists everything allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenuto.base.errors import InvalidRequest, TenutoError, Unsupported, UnsupportedMediaType
from tenuto.serve.shared.schemas import ID_LENGTH, ID_PATTERN, REQUIRED, UNSUPPORTED

MAX_SHOWN = 8
"""Maximum number of problems listed in one message."""
MAX_READ = 1000
"""Maximum number of Pydantic's errors that are read: a large body can have very many."""

_TYPES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
"""The expected kind of value, by Pydantic's error type."""
_RULES = {
    "extra_forbidden": "is not a known field here",
    "greater_than": "should be greater than {gt}",
    "greater_than_equal": "should be greater than or equal to {ge}",
    "less_than": "should be less than {lt}",
    "less_than_equal": "should be less than or equal to {le}",
    "missing": "is required",
    "string_pattern_mismatch": "should match the pattern {pattern}",
    "string_too_long": "should have at most {max_length} characters",
    "string_too_short": "should have {min_length} or more characters",
    "string_unicode": "should be text of whole Unicode characters",
    "too_long": "should have at most {max_length} items, not {actual_length}",
    "too_short": "should have {min_length} or more items, not {actual_length}",
    "value_error": "is refused: {error}",
    REQUIRED: "is required",
    UNSUPPORTED: "{problem}",
}
"""The problem with a value of the right kind, by Pydantic's error type. Braces are filled in from the error's
context."""
_ID_RULE = f"should be 1 to {ID_LENGTH} letters, digits, '.', '_', ':' and '-', and not '.' or '..'"
_PLURALS = {
    "NewMessage": "messages",
    "ContentPart": "parts",
    "ResponsePart": "parts",
    "bool": "booleans",
    "constrained-float": "numbers",
    "constrained-int": "integers",
    "constrained-str": "strings",
    "float": "numbers",
    "int": "integers",
    "str": "strings",
}
"""Names of list elements, by Pydantic's names of union branches. Elements of other lists are objects."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a request.

    `place`: keys and indices that lead to the value. `branches`: the union branches on the way, each after the number
    of parts of `place` before it. `text`: the problem with the value. `wanted`: the expected kind, if the value is of
    the wrong kind. `of_length`: the value is a list of the wrong length.
    """

    place: Location
    branches: tuple[tuple[int, str], ...]
    text: str
    wanted: str | None = None
    unsupported: bool = False
    of_length: bool = False


def refusal_of(errors: Sequence[Any], body: Any, content_type: str | None) -> TenutoError:
    """Returns the error for the answer. `errors`: Pydantic's errors. `body`: the parsed body, or bytes if it was not
    declared as JSON."""
    for error in errors:
        if error["type"] == "json_invalid":
            at, why = error["loc"][-1], error["ctx"]["error"]
            return InvalidRequest(f"the body is not JSON: {why} at character {at}")
        if tuple(error["loc"]) == ("body",) and isinstance(body, bytes):
            given = "not given" if content_type is None else ascii(content_type[:60])
            return UnsupportedMediaType(f"the body's content-type is {given}; allowed: application/json")
        if tuple(error["loc"]) == ("body",) and error["type"] == "missing":
            return InvalidRequest("the body is empty; allowed: a JSON object")
    problems: list[tuple[str, Problem]] = []
    errors = errors[:MAX_READ]
    for kind in dict.fromkeys(error["loc"][0] for error in errors):
        found = [_problem(error, body) for error in errors if error["loc"][0] == kind]
        problems += [(kind, problem) for problem in _resolved(found)]
    text = "; ".join(f"{_subject(kind, problem.place)} {problem.text}" for kind, problem in problems[:MAX_SHOWN])
    if len(problems) > MAX_SHOWN:
        text += f"; and {len(problems) - MAX_SHOWN} more"
    error_type = Unsupported if all(problem.unsupported for _, problem in problems) else InvalidRequest
    return error_type(text, param=_name(problems[0][1].place) or None)


def _problem(error: Mapping[str, Any], body: Any) -> Problem:
    """Separates keys and union branches, which Pydantic's location mixes, by following it through the body."""
    place: list[str | int] = []
    branches: list[tuple[int, str]] = []
    value, context = body if error["loc"][0] == "body" else None, error.get("ctx", {})
    parts = error["loc"][1:]
    of_key = bool(parts) and parts[-1] == "[key]"
    for number, part in enumerate(parts[:-1] if of_key else parts):
        last = number == len(parts) - 1
        if isinstance(value, dict) and part in value and last and value is error["input"]:
            branches.append((len(place), str(part)))  # the value has a key with the branch's name
        elif error["loc"][0] != "body" or (isinstance(value, dict) and part in value):
            place.append(part)
            value = value[part] if isinstance(value, dict) else None
        elif isinstance(value, list) and isinstance(part, int):
            place.append(part)
            value = value[part] if part < len(value) else None
        elif last and error["type"] == "missing":
            place.append(part)
        else:
            branches.append((len(place), str(part)))
    if context.get("field"):
        place.append(context["field"])
    wanted = _TYPES.get(error["type"])
    if error["type"] == "literal_error":
        wanted = context["expected"]
    elif error["type"] == "list_type" and branches and branches[-1][0] == len(place):
        wanted = _list_of(branches[-1][1])
    text = f"should be {wanted}" if wanted else _rule(error)
    if of_key:
        return Problem(tuple(place), tuple(branches), f"is a key that {text}")
    of_length = error["type"] in ("too_long", "too_short")
    return Problem(tuple(place), tuple(branches), text, wanted, error["type"] == UNSUPPORTED, of_length)


def _rule(error: Mapping[str, Any]) -> str:
    """Returns the problem with a value of the right kind."""
    context = error.get("ctx", {})
    if context.get("pattern") == ID_PATTERN:
        return _ID_RULE
    rule = _RULES.get(error["type"])
    return rule.format_map(context) if rule is not None else f"is refused: {error['msg']}"


def _resolved(problems: Sequence[Problem]) -> list[Problem]:
    """Returns problems without branches: for every union, those of one branch, or one problem for all branches."""
    found: list[Problem | Location] = []
    unions: dict[Location, dict[str, list[Problem]]] = {}
    for problem in problems:
        if not problem.branches:
            found.append(problem)
            continue
        (depth, branch), *inner = problem.branches
        place = problem.place[:depth]
        if place not in unions:
            found.append(place)
        unions.setdefault(place, {}).setdefault(branch, []).append(replace(problem, branches=tuple(inner)))
    resolved: list[Problem] = []
    for one in found:
        if isinstance(one, Problem):
            resolved.append(one)
        else:
            resolved += _of_union([_resolved(branch) for branch in unions[one].values()])
    return resolved


def _of_union(branches: list[list[Problem]]) -> list[Problem]:
    """Returns the problems of the branch that the value fits best. If it fits several equally well but is of the wrong
    kind for all, returns one problem that lists everything allowed."""
    farthest = max(_distance(branch[0]) for branch in branches)
    meant = [branch for branch in branches if _distance(branch[0]) == farthest]
    wanted = list(dict.fromkeys(branch[0].wanted for branch in meant if branch[0].wanted is not None))
    if len(wanted) < 2:
        return meant[0]
    either = _either(wanted)
    return [Problem(meant[0][0].place, (), f"should be {either}", either)]


def _distance(problem: Problem) -> tuple[tuple[float, ...], bool]:
    """Returns a measure of how well a value fits a branch: the place of the problem, then whether the value there is of
    the right kind. A list of the wrong length, whose entries are not validated, fits better than one whose first entry
    is of the wrong kind."""
    place = tuple(part if isinstance(part, int) else 0 for part in problem.place)
    return (*place, 0.5) if problem.of_length else place, problem.wanted is None


def _either(wanted: Sequence[str]) -> str:
    *others, last = wanted
    comma = "," if len(others) > 1 or " or " in others[0] else ""
    return f"{', '.join(others)}{comma} or {last}"


def _list_of(branch: str) -> str:
    """Describes a list type in plain words, from its branch's name."""
    inner = branch.removeprefix("list[").removesuffix("]")
    return "a list" if inner == branch else f"a list of {_elements(inner)}"


def _elements(name: str) -> str:
    inner = name.removeprefix("list[").removesuffix("]")
    return _PLURALS.get(name, "objects") if inner == name else f"lists of {_elements(inner)}"


def _subject(kind: str, place: Location) -> str:
    """Returns the first words of a message about a field."""
    if not place:
        return f"the {kind}"
    return _name(place) if kind == "body" else f"{kind} parameter {_name(place)}"


def _name(place: Location) -> str:
    """Writes a field's path, as in `messages[1].content`."""
    name = ""
    for part in place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            name += f".{part}" if name else part
        else:
            name += f"[{json.dumps(part[:40])}]"
    return name
