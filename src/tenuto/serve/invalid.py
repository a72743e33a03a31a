"""What is wrong with a request, in the words of who wrote it: the field as it is called there, and what is allowed.

Pydantic says it by branch of a union and by Python's types. Here a union is one problem: that of the branch which its
value was meant for, or, where it is of none, all that is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticCustomError

from tenuto.base.errors import InvalidRequest, TenutoError, Unsupported, UnsupportedMediaType
from tenuto.serve.native.schemas import ID_LENGTH, ID_PATTERN

MOST_SHOWN = 8
"""Problems in one message."""
MOST_READ = 1000
"""Of Pydantic's errors: those of a large body can be very many."""
UNSUPPORTED = "unsupported"
"""The type of problem that `unsupported` makes."""

_TYPES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
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
"""What a value should be, by the type of problem. These say that it is of another kind."""
_SEVERAL = {
    "Message": "messages",
    "Part": "parts",
    "bool": "booleans",
    "constrained-float": "numbers",
    "constrained-int": "integers",
    "constrained-str": "strings",
    "float": "numbers",
    "int": "integers",
    "str": "strings",
}
"""Elements of lists, as they are called in the branches of unions; others are objects."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value) should ")

Place = tuple[str | int, ...]


def unsupported(field: str, said: str) -> PydanticCustomError:
    """To be raised where a request is validated: `field` (empty: the one being validated) is known and not there."""
    return PydanticCustomError(UNSUPPORTED, "{field} {said}", {"field": field, "said": said})


@dataclass(frozen=True, slots=True)
class Problem:
    """`place`: keys and indices that lead to the value. `branches`: of the unions on the way, each with how many parts
    of the place come before. `said`: of the value; `wanted`: what it should be, if it is of another kind."""

    place: Place
    branches: tuple[tuple[int, str], ...]
    said: str
    wanted: str | None = None
    unsupported: bool = False
    of_length: bool = False


def refusal_of(errors: Sequence[Any], body: Any, content_type: str | None) -> TenutoError:
    """The error to answer with. `errors`: Pydantic's. `body`: the request's, parsed; bytes if it is not declared as
    JSON."""
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
    errors = errors[:MOST_READ]
    for kind in dict.fromkeys(error["loc"][0] for error in errors):
        found = [_problem(error, body) for error in errors if error["loc"][0] == kind]
        problems += [(kind, problem) for problem in _resolved(found)]
    said = "; ".join(f"{_subject(kind, problem.place)} {problem.said}" for kind, problem in problems[:MOST_SHOWN])
    if len(problems) > MOST_SHOWN:
        said += f"; and {len(problems) - MOST_SHOWN} more"
    error_type = Unsupported if all(problem.unsupported for _, problem in problems) else InvalidRequest
    return error_type(said, param=_name(problems[0][1].place) or None)


def _problem(error: Mapping[str, Any], body: Any) -> Problem:
    """What is part of the place and what is a branch shows when one follows the body."""
    place: list[str | int] = []
    branches: list[tuple[int, str]] = []
    value, context = body if error["loc"][0] == "body" else None, error.get("ctx", {})
    parts = error["loc"][1:]
    of_key = bool(parts) and parts[-1] == "[key]"
    for number, part in enumerate(parts[:-1] if of_key else parts):
        last = number == len(parts) - 1
        if isinstance(value, dict) and part in value and last and value is error["input"]:
            branches.append((len(place), str(part)))  # and by chance a key, too
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
        wanted = _several(branches[-1][1])
    if of_key:
        return Problem(tuple(place), tuple(branches), f"is a key that should be {wanted or 'another'}")
    said = f"should be {wanted}" if wanted else _said(error, context)
    of_length = error["type"] in ("too_long", "too_short")
    return Problem(tuple(place), tuple(branches), said, wanted, error["type"] == UNSUPPORTED, of_length)


def _said(error: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """What is wrong with a value of the right kind."""
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a field that is known here"
        case "string_pattern_mismatch" if context["pattern"] == ID_PATTERN:
            return f"should be 1 to {ID_LENGTH} letters, digits, '.', '_', ':' and '-', and not '.' or '..'"
        case "value_error":
            return f"is refused: {context['error']}"
        case kind if kind == UNSUPPORTED:
            return str(context["said"])
    text = str(error["msg"]).replace(" after validation", "")
    return _SUBJECT.sub("should ", text)


def _resolved(problems: Sequence[Problem]) -> list[Problem]:
    """Without branches: those of one union become those of one branch, or one problem."""
    found: list[Problem | Place] = []
    unions: dict[Place, dict[str, list[Problem]]] = {}
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
    """The problems of the branch that its value fits farthest. Of several that end at the same place because the value
    there is of another kind, one problem with all that is allowed there."""
    farthest = max(_distance(branch[0]) for branch in branches)
    meant = [branch for branch in branches if _distance(branch[0]) == farthest]
    wanted = list(dict.fromkeys(branch[0].wanted for branch in meant if branch[0].wanted is not None))
    if len(wanted) < 2:
        return meant[0]
    either = _either(wanted)
    return [Problem(meant[0][0].place, (), f"should be {either}", either)]


def _distance(problem: Problem) -> tuple[tuple[float, ...], bool]:
    """How far a value fits: up to where, and whether it is of the right kind there. The entries of a list of a wrong
    length are not looked at; it counts for more than a list whose first entry is of another kind."""
    place = tuple(part if isinstance(part, int) else 0 for part in problem.place)
    return (*place, 0.5) if problem.of_length else place, problem.wanted is None


def _either(wanted: Sequence[str]) -> str:
    *others, last = wanted
    comma = "," if len(others) > 1 or " or " in others[0] else ""
    return f"{', '.join(others)}{comma} or {last}"


def _several(branch: str) -> str:
    """A list, by the name of its branch: of what, if that is plain."""
    inner = branch.removeprefix("list[").removesuffix("]")
    return "a list" if inner == branch else f"a list of {_elements(inner)}"


def _elements(name: str) -> str:
    inner = name.removeprefix("list[").removesuffix("]")
    return _SEVERAL.get(name, "objects") if inner == name else f"lists of {_elements(inner)}"


def _subject(kind: str, place: Place) -> str:
    """A field as its message begins with it."""
    if not place:
        return f"the {kind}"
    return _name(place) if kind == "body" else f"{kind} parameter {_name(place)}"


def _name(place: Place) -> str:
    """A field as one writes where it is, such as `messages[1].content`."""
    name = ""
    for part in place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            name += f".{part}" if name else part
        else:
            name += f"[{json.dumps(part[:40])}]"
    return name
