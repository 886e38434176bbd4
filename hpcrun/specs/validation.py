"""From what pydantic finds wrong to our Problems: one line a mistake, with what is allowed there."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hpcrun.errors import SpecProblem

_MAPPING = "must be a mapping of keys to values, not {found}"
_EXPLAINED = {
    "missing": "is missing",
    "model_type": _MAPPING,
    "dict_type": _MAPPING,
    "list_type": "must be a list, not {found}",
    "int_type": "must be a whole number, not {found}",
    "int_from_float": "must be a whole number, not {found}",
    "float_type": "must be a number, not {found}",
    "finite_number": "must be a finite number, not {found}",
    "string_type": "must be text (put it in quotes), not {found}",
    "bool_type": "must be true or false, not {found}",
    "greater_than": "must be above {gt}, not {found}",
    "greater_than_equal": "must be at least {ge}, not {found}",
    "less_than": "must be below {lt}, not {found}",
    "less_than_equal": "must be at most {le}, not {found}",
    "too_short": "must have at least {min_length} items, not {actual_length}",
    "too_long": "must have at most {max_length} items, not {actual_length}",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "{found} is not allowed",
    "value_error": "{error}",
}
"""What pydantic found, in our words; `found` is the value, the other names are from the error's context."""
_RENAMED = {
    "checkpoint.behind": "on_backlog",
    "checkpoint.max_undurable": "max_durable_age",
    "checkpoint.spares": "replicate_to_spares",
    "checkpoint.spread": "flush_duty",
    "checkpoint.undurable": "durability_action",
}
"""Keys of earlier job files, and what they are called now: their values mean the same."""


def problems_of_validation_error(
    error: ValidationError,
    root: type[BaseModel],
    *,
    shorthands: Mapping[str, Sequence[str]] = {},
    inherit: bool = False,
) -> list[SpecProblem]:
    """Every mistake that pydantic found when it read a mapping as `root`, with its dotted key but no place.

    `shorthands`: keys that a section, named by its dotted key, takes besides its fields.
    `inherit`: a key without a description, such as an item of a list, is explained by that of the key above.
    """
    return [_make_problem(details, root, shorthands, inherit) for details in error.errors(include_url=False)]


def suggest_allowed(word: str, allowed: Iterable[str]) -> str:
    """The end of a message on a word that is not allowed: the one that was probably meant, and the list."""
    close = difflib.get_close_matches(word, [*allowed], n=1, cutoff=0.5)
    return f"{f'; did you mean {close[0]}?' if close else ';'} allowed: {', '.join(allowed)}"


def format_value(value: Any) -> str:
    """A value as a message quotes it: printable, on one line and short."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _make_problem(
    details: ErrorDetails, root: type[BaseModel], shorthands: Mapping[str, Sequence[str]], inherit: bool
) -> SpecProblem:
    path = [str(part) for part in details["loc"] if part != "[key]"]
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        section = _section_at(root, path[:-1])
        allowed = [*(section.model_fields if section else ()), *shorthands.get(".".join(path[:-1]), ())]
        new = _RENAMED.get(".".join(path), "")
        text = (
            f"is now called {new}; rename the key"
            if new in allowed
            else f"unknown key{suggest_allowed(path[-1], allowed)}"
        )
    elif kind == "literal_error":
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        text = (
            f"{format_value(details['input'])} is not"
            f" allowed{suggest_allowed(str(details['input']), allowed)}"
        )
    else:
        text = _EXPLAINED.get(kind, "{found} is not allowed").format(
            found=format_value(details["input"]), **context
        )
        meaning = _describe_field(root, path) or (_describe_field(root, path[:-1]) if inherit else "")
        text += f" ({meaning})" if meaning and kind != "value_error" else ""
    return SpecProblem(".".join(path), text)


def _describe_field(root: type[BaseModel], path: Sequence[str]) -> str:
    section = _section_at(root, path[:-1])
    field = section.model_fields.get(path[-1]) if section and path else None
    return (field.description or "") if field else ""


def _section_at(root: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The section that a path leads to, found through the annotations."""
    current: Any = root
    for part in path:
        if _is_section(current):
            field = current.model_fields.get(part)
            current = _without_none(field.annotation) if field else None
        else:
            # The part is a name in a dict or an index in a list; what stands there is the last argument.
            inner = get_args(current)
            current = _without_none(inner[-1]) if inner else None
    return current if _is_section(current) else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _without_none(annotation: Any) -> Any:
    """The X of `X | None`."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    return next(option for option in get_args(annotation) if option is not NoneType)
