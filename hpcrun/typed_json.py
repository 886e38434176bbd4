"""Dataclasses to and from JSON values: one parser for records in files and messages between processes."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hpcrun.errors import UsageError

T = TypeVar("T")
Parser = Callable[[Any], Any]
"""Returns the value as its declared type, or raises WrongValue."""

_SEQUENCES = (list, tuple, Sequence)
_MAX_NUMBER = 1e300
_EXTRA = "extra"


class WrongValue(UsageError):
    """A JSON value is not what the dataclass declares; the text names the field."""


Count = Annotated[int, (0, 2**53)]
"""A step, a rank, an attempt, a number of bytes. Annotated: from the first limit to below the second."""
Seconds = Annotated[float, (0.0, 1e11)]
"""A duration, or a time stamp: what says more is damaged."""


class Tagged:
    """A dataclass whose JSON object names its class under `kind`, so that one of several can be parsed."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class TaggedUnion(Generic[T]):
    """The classes of a union of Tagged dataclasses, by their kinds."""

    def __init__(self, union: Any) -> None:
        self._parser = _tagged_parser(get_args(union) or (union,))

    def parse(self, value: object) -> T:
        """The dataclass in a JSON object, or WrongValue, which names kind and field."""
        parsed: T = self._parser(value)
        return parsed


def parse_typed(
    cls: type[T], values: object, *, allow_extra: bool = False, extra: dict[str, Any] | None = None
) -> T:
    """Make a dataclass from a JSON object, or raise WrongValue with the name of the field.

    Fields are checked against their annotations, nested dataclasses included; true is not an integer, an
    integer is a float, and NaN, infinity and integers beyond 64 bits are refused. Annotated[int, (low, high)]
    is an integer from low to below high. Fields without a default are required. What the class does not
    declare, because a newer version wrote it, is put into `extra`, or ignored with `allow_extra`.
    """
    schema = _schema(cls)  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise WrongValue(f"expected an object, not {_show(values)}")
    if not values.keys() >= schema.required.keys():
        raise WrongValue(f"{next(name for name in schema.required if name not in values)}: is missing")
    parsed: dict[str, Any] = {}
    parsers, name = schema.parsers, ""
    try:
        for name, value in values.items():
            if (parser := parsers.get(name)) is not None:
                parsed[name] = parser(value)
            elif extra is not None:
                extra[name] = value
            elif not allow_extra:
                raise WrongValue(f"is not a field; the fields are {', '.join(parsers) or 'none'}")
    except WrongValue as error:
        raise WrongValue(f"{name}: {error}") from None
    if not schema.is_plain:
        return cls(**parsed)
    # Faster than a frozen class's __init__: there are files with millions of records.
    record = object.__new__(cls)
    record.__dict__.update(schema.defaults, **parsed)
    return record


def dump_typed(record: Any) -> dict[str, Any]:
    """The JSON object of a dataclass: what parse_typed reads back."""
    return asdict(record)


def render_typed(value: Any) -> str:
    """The JSON text of a dataclass, or of what holds some: faster than dump_typed for large ones."""
    return json.dumps(value, default=_object, separators=(",", ":"))


def _object(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{value!r}: no JSON value")
    names = _schema(value.__class__).parsers
    values = {name: getattr(value, name) for name in names}
    return {"kind": value.kind, **values} if isinstance(value, Tagged) else values


class _Schema(NamedTuple):
    """How objects of a class are parsed."""

    parsers: Mapping[str, Parser]
    required: Mapping[str, None]
    defaults: Mapping[str, Any]
    is_plain: bool
    """An object is its fields and their defaults alone: no method runs when one is made."""


@cache
def _schema(cls: Any) -> _Schema:
    hints, declared = get_type_hints(cls, include_extras=True), [entry for entry in fields(cls) if entry.init]
    has_factories = any(entry.default_factory is not MISSING for entry in declared)
    has_methods = hasattr(cls, "__post_init__") or hasattr(cls, "__slots__")
    return _Schema(
        {entry.name: _parser(hints[entry.name]) for entry in declared},
        {e.name: None for e in declared if e.default is MISSING and e.default_factory is MISSING},
        {entry.name: entry.default for entry in declared if entry.default is not MISSING},
        is_plain=not (has_factories or has_methods) and len(declared) == len(fields(cls)),
    )


def _parser(hint: Any) -> Parser:
    """The parser of a type; TypeError, at the first use of its class, where the type is not supported."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is Any or hint is object:
        return lambda value: value
    if origin is Annotated:
        return _limited_parser(_parser(args[0]), *args[1])
    if isinstance(hint, type) and issubclass(hint, Tagged):
        return _tagged_parser((hint,))
    if is_dataclass(hint):
        return lambda value: parse_typed(hint, value)  # type: ignore[arg-type]
    if origin is Literal:
        return _literal_parser(args)
    if origin in (Union, types.UnionType):
        if all(isinstance(argument, type) and issubclass(argument, Tagged) for argument in args):
            return _tagged_parser(args)
        return _union_parser([_parser(argument) for argument in args])
    if origin is tuple and args[-1] is not Ellipsis:
        return _pair_parser([_parser(argument) for argument in args])
    if origin in _SEQUENCES:
        return _sequence_parser(_parser(args[0]), list if origin is list else tuple)
    if origin in (dict, Mapping) and args[0] is str:
        return _mapping_parser(_parser(args[1]))
    if hint is dict:
        return _mapping_parser(lambda value: value)
    raise TypeError(f"{hint}: no JSON value has this type")


def _integer(value: Any) -> int:
    # Not isinstance: true is not a number here.
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise WrongValue(f"expected an integer, not {_show(value)}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -_MAX_NUMBER < value < _MAX_NUMBER:
        raise WrongValue(f"expected a number, not {_show(value)}")
    return float(value)


def _exactly(cls: type, name: str) -> Parser:
    def parse(value: Any) -> Any:
        if type(value) is not cls:
            raise WrongValue(f"expected {name}, not {_show(value)}")
        return value

    return parse


_SCALARS: Mapping[Any, Parser] = {
    int: _integer,
    float: _number,
    str: _exactly(str, "a text"),
    bool: _exactly(bool, "true or false"),
    type(None): _exactly(type(None), "null"),
}


def _limited_parser(parser: Parser, low: float, high: float) -> Parser:
    def parse(value: Any) -> Any:
        number = parser(value)
        if not low <= number < high:
            raise WrongValue(f"expected a number from {low:g} to {high:g}, not {_show(value)}")
        return number

    return parse


def _literal_parser(allowed: Sequence[Any]) -> Parser:
    def parse(value: Any) -> Any:
        if not any(type(value) is type(entry) and value == entry for entry in allowed):
            raise WrongValue(f"expected one of {', '.join(map(str, allowed))}, not {_show(value)}")
        return value

    return parse


def _tagged_parser(classes: Sequence[type]) -> Parser:
    by_kind = {cls.kind: cls for cls in classes if issubclass(cls, Tagged)}

    def parse(value: Any) -> Any:
        if type(value) is not dict:
            raise WrongValue(f"expected an object, not {_show(value)}")
        kind = value.get("kind")
        cls = by_kind.get(kind) if type(kind) is str else None
        if cls is None:
            raise WrongValue(f"kind: expected one of {', '.join(by_kind)}, not {_show(kind)}")
        try:
            return parse_typed(cls, {name: item for name, item in value.items() if name != "kind"})
        except WrongValue as error:
            raise WrongValue(f"{kind}: {error}") from None

    return parse


def _union_parser(parsers: Sequence[Parser]) -> Parser:
    def parse(value: Any) -> Any:
        problems = []
        for parser in parsers:
            try:
                return parser(value)
            except WrongValue as error:
                problems.append(str(error))
        # Of a type or null, the type's problem tells more.
        raise WrongValue(problems[0])

    return parse


def _pair_parser(parsers: Sequence[Parser]) -> Parser:
    def parse(value: Any) -> Any:
        if type(value) not in (list, tuple) or len(value) != len(parsers):
            raise WrongValue(f"expected a list of {len(parsers)}, not {_show(value)}")
        return tuple(parser(item) for parser, item in zip(parsers, value, strict=True))

    return parse


def _sequence_parser(parser: Parser, cls: type) -> Parser:
    def parse(value: Any) -> Any:
        if type(value) not in (list, tuple):
            raise WrongValue(f"expected a list, not {_show(value)}")
        return cls(map(parser, value))

    return parse


def _mapping_parser(parser: Parser) -> Parser:
    def parse(value: Any) -> Any:
        if type(value) is not dict:
            raise WrongValue(f"expected an object, not {_show(value)}")
        parsed = {}
        for name, item in value.items():
            if type(name) is not str:
                raise WrongValue(f"expected names that are texts, not {_show(name)}")
            parsed[name] = parser(item)
        return parsed

    return parse


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
