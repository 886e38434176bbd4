"""Plain values as JSON and back, with their types; nothing is pickled, and no code named by a save is run.

Numbers, texts, lists and dicts of texts stand for themselves; everything else is an object whose "$" says
what it is. What is neither is given to `other`, such as tensors. Named tuples and enums are made of the
class that the receiving side shows or has imported; a class is never imported for a save.
"""

from __future__ import annotations

import base64
import datetime as dt
import enum
import json
import math
import pathlib
import struct
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch

ValueNode: TypeAlias = Any
"""A value as JSON has it."""
KeyPath: TypeAlias = tuple[Hashable, ...]
"""The keys and numbers that lead to a value."""
EncodeOther: TypeAlias = Callable[[Any, KeyPath], ValueNode]
DecodeOther: TypeAlias = Callable[[dict[str, Any], KeyPath], Any]
TypesByName: TypeAlias = Mapping[str, type]

TYPE_TAG = "$"
MAX_NESTING = 200
_EXACT_INT_LIMIT = 1 << 63
_FACTORIES: dict[str, Any] = {
    one.__name__: one for one in (int, float, str, bool, list, dict, set, tuple, OrderedDict, Counter)
}
_PATHS: dict[str, Any] = {
    one.__name__: one
    for one in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}
_ARRAY_KINDS = "biufcSUMm"
"""Kinds of numpy's types that are bytes and no more."""


class PlainValueError(ValueError):
    """A value that cannot be kept, or made again; its keys lead to it."""

    def __init__(self, keys: KeyPath, problem: str) -> None:
        super().__init__(problem)
        self.keys, self.problem = keys, problem


def encode_value(value: Any, other: EncodeOther, keys: KeyPath = ()) -> ValueNode:
    """A value as JSON; PlainValueError for what cannot be kept. `other` may raise LookupError."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        return value if -_EXACT_INT_LIMIT <= value < _EXACT_INT_LIMIT else {TYPE_TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TYPE_TAG: "float", "v": _bits(value)}
    if len(keys) > MAX_NESTING:
        raise PlainValueError(keys, f"lies more than {MAX_NESTING} levels deep, or contains itself")
    if kind is list:
        return [encode_value(one, other, (*keys, number)) for number, one in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, other, keys)
    if (known := _ENCODERS.get(kind)) is not None:
        return known(value, other, keys)
    try:
        return other(value, keys)
    except LookupError:
        return _encode_of_class(value, other, keys)


def decode_value(node: ValueNode, other: DecodeOther, types: TypesByName, keys: KeyPath = ()) -> Any:
    """The value again; PlainValueError where this side has no class for it."""
    if isinstance(node, list):
        return [decode_value(one, other, types, (*keys, number)) for number, one in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if TYPE_TAG not in node:
        return {key: decode_value(one, other, types, (*keys, key)) for key, one in node.items()}
    maker = _DECODERS.get(str(node[TYPE_TAG]))
    if maker is None:
        return other(node, keys)
    try:
        return maker(node, other, types, keys)
    except (TypeError, ValueError, KeyError, NotImplementedError, AttributeError, OverflowError) as error:
        if isinstance(error, PlainValueError):
            raise
        raise PlainValueError(keys, f"is a {node[TYPE_TAG]} that cannot be made here: {error}") from None


def child_nodes(node: ValueNode, types: TypesByName, keys: KeyPath = ()) -> dict[Hashable, ValueNode] | None:
    """What lies below a mapping or a sequence, by key or number; None for all else."""
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return None
    if TYPE_TAG not in node:
        return dict(node)
    if node[TYPE_TAG] in _MAPPINGS:
        return {decode_value(key, _nothing_else, types, keys): one for key, one in node["v"]}
    if node[TYPE_TAG] in ("tuple", "namedtuple", "deque", "torch.Size"):
        return dict(enumerate(node["v"]))
    return None


def collect_types(value: Any, found: dict[str, type] | None = None) -> dict[str, type]:
    """The classes of enums and named tuples in a value, by the name that a save has for them."""
    found = {} if found is None else found
    if isinstance(value, enum.Enum) or _is_named_tuple(value):
        found[_class_name(type(value))] = type(value)
    if isinstance(value, Mapping):
        for key, one in value.items():
            collect_types(key, found)
            collect_types(one, found)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for one in value:
            collect_types(one, found)
    return found


def are_equal_nodes(one: ValueNode, two: ValueNode) -> bool:
    """Whether two nodes are of equal values; the order of a dict is no part of it."""
    return json.dumps(_ordered(one), sort_keys=True) == json.dumps(_ordered(two), sort_keys=True)


def _ordered(node: ValueNode) -> ValueNode:
    if isinstance(node, list):
        return [_ordered(one) for one in node]
    if not isinstance(node, dict):
        return node
    told = {key: _ordered(one) for key, one in node.items()}
    if node.get(TYPE_TAG) in ("dict", "Counter", "defaultdict", "set", "frozenset"):
        told["v"] = sorted(told["v"], key=lambda one: json.dumps(one, sort_keys=True))
    return told


def _nothing_else(node: dict[str, Any], keys: KeyPath) -> Any:
    raise PlainValueError(keys, f"is a {node[TYPE_TAG]}, which this hpcrun does not know")


def reject_other_values(value: Any, keys: KeyPath) -> ValueNode:
    """An `other` for values that are plain throughout."""
    raise LookupError


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _encode_dict(value: dict[Any, Any], other: EncodeOther, keys: KeyPath) -> ValueNode:
    if all(type(key) is str for key in value) and TYPE_TAG not in value:
        return {key: encode_value(one, other, (*keys, key)) for key, one in value.items()}
    return {TYPE_TAG: "dict", "v": _pairs(value, other, keys)}


def _pairs(value: Mapping[Any, Any], other: EncodeOther, keys: KeyPath) -> list[ValueNode]:
    return [
        [encode_value(key, reject_other_values, (*keys, key)), encode_value(one, other, (*keys, key))]
        for key, one in value.items()
    ]


def _items(value: Iterable[Any], other: EncodeOther, keys: KeyPath) -> list[ValueNode]:
    return [encode_value(one, other, (*keys, number)) for number, one in enumerate(value)]


def _encode_set(value: Any, _other: EncodeOther, keys: KeyPath) -> ValueNode:
    items = sorted(_items(value, reject_other_values, keys), key=lambda one: json.dumps(one, sort_keys=True))
    return {TYPE_TAG: type(value).__name__, "v": items}


def _encode_default(value: Any, other: EncodeOther, keys: KeyPath) -> ValueNode:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        raise PlainValueError(
            keys, f"is a defaultdict that makes {factory!r}; one of {', '.join(_FACTORIES)} can be kept"
        )
    return {TYPE_TAG: "defaultdict", "v": _pairs(value, other, keys), "factory": name}


def _encode_zone(zone: Any, keys: KeyPath) -> ValueNode:
    if zone is None:
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key:
        return zone.key
    if type(zone) is dt.timezone and zone.tzname(None) == dt.timezone(zone.utcoffset(None)).tzname(None):
        offset = zone.utcoffset(None)
        return [offset.days, offset.seconds, offset.microseconds]
    raise PlainValueError(keys, f"has the time zone {zone!r}; fixed offsets and zoneinfo's zones can be kept")


def _zone(node: ValueNode) -> dt.tzinfo | None:
    if node is None:
        return None
    return dt.timezone(dt.timedelta(*node)) if isinstance(node, list) else zoneinfo.ZoneInfo(node)


def _encode_datetime(value: Any, _other: EncodeOther, keys: KeyPath) -> ValueNode:
    day = [value.year, value.month, value.day] if type(value) is dt.datetime else []
    told = [*day, value.hour, value.minute, value.second, value.microsecond]
    return {
        TYPE_TAG: type(value).__name__,
        "v": told,
        "fold": value.fold,
        "zone": _encode_zone(value.tzinfo, keys),
    }


def _encode_array(value: Any, _other: EncodeOther, keys: KeyPath) -> ValueNode:
    """An array or a scalar of numpy's."""
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.hasobject:
        raise PlainValueError(keys, f"is of numpy's type {array.dtype}; numbers, texts and times can be kept")
    shape = list(array.shape) if type(value) is np.ndarray else None
    return {TYPE_TAG: "numpy", "dtype": array.dtype.str, "shape": shape, "v": _text(array.tobytes())}


def _decode_array(node: dict[str, Any], _other: DecodeOther, _types: TypesByName, keys: KeyPath) -> Any:
    kind = np.dtype(str(node["dtype"]))
    if kind.kind not in _ARRAY_KINDS or kind.hasobject:
        raise PlainValueError(keys, f"is of numpy's type {kind}")
    array = np.frombuffer(bytearray(base64.b64decode(node["v"])), dtype=kind)
    if not kind.itemsize:  # of texts without a letter
        array = np.zeros(tuple(node["shape"] or ()), dtype=kind)
    return array.reshape(node["shape"]) if node["shape"] is not None else array.reshape(())[()]


def _encode_of_class(value: Any, other: EncodeOther, keys: KeyPath) -> ValueNode:
    """What goes by more than its exact type: enums, named tuples, numpy's scalars."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        named = kind.__members__.get(value.name or "")
        told = (
            {"name": value.name}
            if named is value
            else {"value": encode_value(value.value, reject_other_values, keys)}
        )
        return {TYPE_TAG: "enum", "class": _class_name(kind), **told}
    if _is_named_tuple(value):
        told = {"class": _class_name(kind), "fields": list(kind._fields)}
        return {TYPE_TAG: "namedtuple", **told, "v": _items(value, other, keys)}
    if isinstance(value, np.generic) and kind.__module__ == "numpy":
        return _encode_array(value, other, keys)
    raise PlainValueError(keys, f"is of type {_shown(kind)}")


def _is_named_tuple(value: Any) -> bool:
    fields = getattr(type(value), "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _shown(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _class(name: str, types: TypesByName, keys: KeyPath) -> Any:
    """A class that the receiving state shows, or that is imported here already."""
    if name in types:
        return types[name]
    module, _, path = name.partition(":")
    # A script's own classes are in __main__ or in the module that it is imported as.
    alike = [kind for known, kind in types.items() if known.partition(":")[2] == path]
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type):
        return found
    if len(alike) == 1:
        return alike[0]
    raise PlainValueError(
        keys, f"is of {name.replace(':', '.')}, which is not imported here; import it before the load"
    )


def _decode_enum(node: dict[str, Any], _other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    kind = _class(str(node["class"]), types, keys)
    if not issubclass(kind, enum.Enum):
        raise PlainValueError(keys, f"is an enum, but here {_shown(kind)} is none")
    if "name" not in node:
        return kind(decode_value(node["value"], _nothing_else, types, keys))
    if node["name"] not in kind.__members__:
        raise PlainValueError(keys, f"is {node['name']}, which {_shown(kind)} does not have here")
    return kind.__members__[node["name"]]


def _decode_named(node: dict[str, Any], other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    kind, fields = _class(str(node["class"]), types, keys), tuple(node["fields"])
    if not issubclass(kind, tuple) or getattr(kind, "_fields", None) != fields:
        raise PlainValueError(keys, f"is a tuple of {', '.join(fields)}; here {_shown(kind)} is not")
    return tuple.__new__(kind, decode_value(node["v"], other, types, keys))


def _decode_pairs(node: dict[str, Any], other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    found = {}
    for key_node, one in node["v"]:
        key = decode_value(key_node, _nothing_else, types, keys)
        found[key] = decode_value(one, other, types, (*keys, key))
    match node[TYPE_TAG]:
        case "OrderedDict":
            return OrderedDict(found)
        case "Counter":
            return Counter(found)
        case "defaultdict":
            factory = node["factory"]
            return defaultdict(None if factory is None else _FACTORIES[factory], found)
    return found


def _decode_sequence(node: dict[str, Any], other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    items = decode_value(node["v"], other, types, keys)
    match node[TYPE_TAG]:
        case "tuple":
            return tuple(items)
        case "set":
            return set(items)
        case "frozenset":
            return frozenset(items)
        case "deque":
            return deque(items, node["maxlen"])
        case "range":
            return range(*items)
        case "slice":
            return slice(*items)
    return torch.Size(items)


def _decode_scalar(node: dict[str, Any], _other: DecodeOther, _types: TypesByName, _keys: KeyPath) -> Any:
    value = node["v"]
    match node[TYPE_TAG]:
        case "int":
            return int(value, 16)
        case "float":
            return _float(value)
        case "complex":
            return complex(_float(value[0]), _float(value[1]))
        case "bytes":
            return base64.b64decode(value)
        case "bytearray":
            return bytearray(base64.b64decode(value))
        case "torch.device":
            return torch.device(value)
        case "torch.dtype":
            found = getattr(torch, value)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"torch has no type {value}")
            return found
        case "path":
            return _PATHS[node["class"]](value)
        case "Decimal":
            return Decimal(value)
        case "Fraction":
            return Fraction(*(int(part, 16) for part in value))
    return uuid.UUID(hex=value)


def _decode_time(node: dict[str, Any], _other: DecodeOther, _types: TypesByName, _keys: KeyPath) -> Any:
    match node[TYPE_TAG]:
        case "date":
            return dt.date(*node["v"])
        case "timedelta":
            return dt.timedelta(*node["v"])
        case "time":
            hour, minute, second, micro = node["v"]
            return dt.time(hour, minute, second, micro, _zone(node["zone"]), fold=node["fold"])
    year, month, day, hour, minute, second, micro = node["v"]
    zone, fold = _zone(node["zone"]), node["fold"]
    return dt.datetime(year, month, day, hour, minute, second, micro, zone, fold=fold)


def _scalar(tag: str, told: Callable[[Any], ValueNode]) -> Callable[[Any, EncodeOther, KeyPath], ValueNode]:
    return lambda value, _other, _keys: {TYPE_TAG: tag, "v": told(value)}


def _mapping(tag: str) -> Callable[[Any, EncodeOther, KeyPath], ValueNode]:
    return lambda value, other, keys: {TYPE_TAG: tag, "v": _pairs(value, other, keys)}


def _sequence(tag: str) -> Callable[[Any, EncodeOther, KeyPath], ValueNode]:
    return lambda value, other, keys: {TYPE_TAG: tag, "v": _items(value, other, keys)}


def _parts(*names: str) -> Callable[[Any], ValueNode]:
    return lambda value: [getattr(value, name) for name in names]


_MAPPINGS = ("dict", "OrderedDict", "Counter", "defaultdict")
_ENCODERS: dict[type, Callable[[Any, EncodeOther, KeyPath], ValueNode]] = {
    tuple: _sequence("tuple"),
    torch.Size: _sequence("torch.Size"),
    OrderedDict: _mapping("OrderedDict"),
    Counter: _mapping("Counter"),
    defaultdict: _encode_default,
    set: _encode_set,
    frozenset: _encode_set,
    deque: lambda value, other, keys: {**_sequence("deque")(value, other, keys), "maxlen": value.maxlen},
    complex: _scalar("complex", lambda value: [_bits(value.real), _bits(value.imag)]),
    bytes: _scalar("bytes", _text),
    bytearray: _scalar("bytearray", _text),
    range: lambda value, _, keys: {
        TYPE_TAG: "range",
        "v": _items(_parts("start", "stop", "step")(value), _, keys),
    },
    slice: lambda value, _, keys: {
        TYPE_TAG: "slice",
        "v": _items(_parts("start", "stop", "step")(value), _, keys),
    },
    torch.dtype: _scalar("torch.dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: _scalar("torch.device", str),
    **{
        kind: lambda value, _o, _k: {TYPE_TAG: "path", "class": type(value).__name__, "v": str(value)}
        for kind in _PATHS.values()
    },
    Decimal: _scalar("Decimal", str),
    Fraction: _scalar("Fraction", lambda value: [hex(value.numerator), hex(value.denominator)]),
    uuid.UUID: _scalar("UUID", lambda value: value.hex),
    dt.date: _scalar("date", _parts("year", "month", "day")),
    dt.timedelta: _scalar("timedelta", _parts("days", "seconds", "microseconds")),
    dt.time: _encode_datetime,
    dt.datetime: _encode_datetime,
    np.ndarray: _encode_array,
}
_DECODERS: dict[str, Callable[[dict[str, Any], DecodeOther, TypesByName, KeyPath], Any]] = {
    **dict.fromkeys(_MAPPINGS, _decode_pairs),
    **dict.fromkeys(("tuple", "set", "frozenset", "deque", "range", "slice", "torch.Size"), _decode_sequence),
    **dict.fromkeys(("int", "float", "complex", "bytes", "bytearray", "torch.device"), _decode_scalar),
    **dict.fromkeys(("torch.dtype", "path", "Decimal", "Fraction", "UUID"), _decode_scalar),
    **dict.fromkeys(("date", "timedelta", "time", "datetime"), _decode_time),
    "numpy": _decode_array,
    "enum": _decode_enum,
    "namedtuple": _decode_named,
}


def render_key_path(keys: Sequence[Hashable]) -> str:
    """Keys as people and manifests have them, joined by dots."""
    return ".".join(str(key) for key in keys)
