"""Converts plain values to JSON and back, with their types; nothing is pickled and no code is run for a save.

Numbers, texts, lists and dicts with text keys stand for themselves; everything else is an object whose "$"
names its type. Other values, such as tensors, go to the callback `other`. Named tuples and enums become
instances of a class that the receiving state holds or that is already imported; no class is imported for a
save.
"""

from __future__ import annotations

import base64
import datetime as dt
import enum
import itertools
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
"""A value as JSON."""
KeyPath: TypeAlias = tuple[Hashable, ...]
"""The keys and numbers that lead to a value."""
EncodeOther: TypeAlias = Callable[[Any, KeyPath], ValueNode]
DecodeOther: TypeAlias = Callable[[dict[str, Any], KeyPath], Any]
TypesByName: TypeAlias = Mapping[str, type]
Encoder: TypeAlias = Callable[[Any, EncodeOther, KeyPath], ValueNode]
Decoder: TypeAlias = Callable[[dict[str, Any], DecodeOther, TypesByName, KeyPath], Any]

TYPE_TAG = "$"
MAX_NESTING = 200
_EXACT_INT_LIMIT = 1 << 63
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple, OrderedDict, Counter)
}
_PATHS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}
_ARRAY_KINDS = "biufcSUMm"
"""Kinds of numpy types whose values are plain bytes."""


class PlainValueError(ValueError):
    """A value that cannot be saved or restored; `keys` lead to it."""

    def __init__(self, keys: KeyPath, problem: str) -> None:
        super().__init__(problem)
        self.keys, self.problem = keys, problem


def encode_value(value: Any, other: EncodeOther, keys: KeyPath = ()) -> ValueNode:
    """Convert a value to JSON; PlainValueError for what cannot be saved.

    `other` converts what is not plain; it raises LookupError for what it does not know either.
    """
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
        return _encode_items(value, other, keys)
    if kind is dict:
        if all(type(key) is str for key in value) and TYPE_TAG not in value:
            return {key: encode_value(item, other, (*keys, key)) for key, item in value.items()}
        return _encode_mapping(value, other, keys)
    if (encoder := _ENCODERS.get(kind)) is not None:
        return encoder(value, other, keys)
    try:
        return other(value, keys)
    except LookupError:
        return _encode_of_class(value, other, keys)


def decode_value(node: ValueNode, other: DecodeOther, types: TypesByName, keys: KeyPath = ()) -> Any:
    """Make the value from its JSON; PlainValueError where its class is missing here."""
    if isinstance(node, list):
        return [decode_value(item, other, types, (*keys, number)) for number, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if TYPE_TAG not in node:
        return {key: decode_value(item, other, types, (*keys, key)) for key, item in node.items()}
    decoder = _DECODERS.get(str(node[TYPE_TAG]))
    if decoder is None:
        return other(node, keys)
    try:
        return decoder(node, other, types, keys)
    except (TypeError, ValueError, KeyError, NotImplementedError, AttributeError, OverflowError) as error:
        if isinstance(error, PlainValueError):
            raise
        raise PlainValueError(keys, f"is a {node[TYPE_TAG]} that cannot be made here: {error}") from None


def child_nodes(node: ValueNode, types: TypesByName, keys: KeyPath = ()) -> dict[Hashable, ValueNode] | None:
    """The children of a mapping or a sequence, by key or number; None for any other node."""
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return None
    if TYPE_TAG not in node:
        return dict(node)
    if node[TYPE_TAG] in _MAPPINGS:
        return {decode_value(key, _refuse_node, types, keys): child for key, child in node["v"]}
    if node[TYPE_TAG] in ("tuple", "namedtuple", "deque", "torch.Size"):
        return dict(enumerate(node["v"]))
    return None


def collect_types(value: Any) -> dict[str, type]:
    """Return the classes of all enums and named tuples in a value, by their names in a save."""
    is_named = isinstance(value, enum.Enum) or _is_named_tuple(value)
    types = {_class_name(type(value)): type(value)} if is_named else {}
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = itertools.chain(value.keys(), value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = value
    for item in items:
        types |= collect_types(item)
    return types


def are_equal_nodes(node: ValueNode, other: ValueNode) -> bool:
    """Whether two nodes hold equal values; the order of a dict does not matter."""
    return _sort_text(_ordered(node)) == _sort_text(_ordered(other))


def _ordered(node: ValueNode) -> ValueNode:
    if isinstance(node, list):
        return [_ordered(item) for item in node]
    if not isinstance(node, dict):
        return node
    ordered = {key: _ordered(item) for key, item in node.items()}
    if node.get(TYPE_TAG) in ("dict", "Counter", "defaultdict", "set", "frozenset"):
        ordered["v"] = sorted(ordered["v"], key=_sort_text)
    return ordered


def _sort_text(node: ValueNode) -> str:
    return json.dumps(node, sort_keys=True)


def _refuse_node(node: dict[str, Any], keys: KeyPath) -> Any:
    raise PlainValueError(keys, f"is a {node[TYPE_TAG]}, which this hpcrun does not know")


def reject_other_values(value: Any, keys: KeyPath) -> ValueNode:
    """Serve as `other` where only plain values are allowed."""
    raise LookupError


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _encode_mapping(value: Mapping[Any, Any], other: EncodeOther, keys: KeyPath) -> ValueNode:
    pairs = [
        [encode_value(key, reject_other_values, (*keys, key)), encode_value(item, other, (*keys, key))]
        for key, item in value.items()
    ]
    return {TYPE_TAG: type(value).__name__, "v": pairs}


def _encode_items(items: Iterable[Any], other: EncodeOther, keys: KeyPath) -> list[ValueNode]:
    return [encode_value(item, other, (*keys, number)) for number, item in enumerate(items)]


def _encode_set(value: Any, _other: EncodeOther, keys: KeyPath) -> ValueNode:
    items = _encode_items(value, reject_other_values, keys)
    return {TYPE_TAG: type(value).__name__, "v": sorted(items, key=_sort_text)}


def _encode_defaultdict(value: Any, other: EncodeOther, keys: KeyPath) -> ValueNode:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        raise PlainValueError(
            keys, f"is a defaultdict that makes {factory!r}; one of {', '.join(_FACTORIES)} can be kept"
        )
    return _encode_mapping(value, other, keys) | {"factory": name}


def _encode_path(value: Any, _other: EncodeOther, _keys: KeyPath) -> ValueNode:
    return {TYPE_TAG: "path", "class": type(value).__name__, "v": str(value)}


def _encode_zone(zone: Any, keys: KeyPath) -> ValueNode:
    if zone is None:
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key:
        return zone.key
    if type(zone) is dt.timezone and zone.tzname(None) == dt.timezone(zone.utcoffset(None)).tzname(None):
        offset = zone.utcoffset(None)
        return [offset.days, offset.seconds, offset.microseconds]
    raise PlainValueError(keys, f"has the time zone {zone!r}; fixed offsets and zoneinfo's zones can be kept")


def _decode_zone(node: ValueNode) -> dt.tzinfo | None:
    if node is None:
        return None
    return dt.timezone(dt.timedelta(*node)) if isinstance(node, list) else zoneinfo.ZoneInfo(node)


def _encode_time(value: Any, _other: EncodeOther, keys: KeyPath) -> ValueNode:
    day = [value.year, value.month, value.day] if type(value) is dt.datetime else []
    parts = [*day, value.hour, value.minute, value.second, value.microsecond]
    zone = _encode_zone(value.tzinfo, keys)
    return {TYPE_TAG: type(value).__name__, "v": parts, "fold": value.fold, "zone": zone}


def _encode_array(value: Any, _other: EncodeOther, keys: KeyPath) -> ValueNode:
    """Encode an array or a scalar of numpy's."""
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
    if not kind.itemsize:  # empty texts
        array = np.zeros(tuple(node["shape"] or ()), dtype=kind)
    return array.reshape(node["shape"]) if node["shape"] is not None else array.reshape(())[()]


def _encode_of_class(value: Any, other: EncodeOther, keys: KeyPath) -> ValueNode:
    """Encode what more than its exact type identifies: enums, named tuples, numpy's scalars."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        node: dict[str, Any] = {TYPE_TAG: "enum", "class": _class_name(kind)}
        if kind.__members__.get(value.name or "") is value:
            return node | {"name": value.name}
        return node | {"value": encode_value(value.value, reject_other_values, keys)}
    if _is_named_tuple(value):
        node = {TYPE_TAG: "namedtuple", "class": _class_name(kind), "fields": list(kind._fields)}
        return node | {"v": _encode_items(value, other, keys)}
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
    """Return a class that the receiving state holds, or that is already imported."""
    if name in types:
        return types[name]
    module, _, path = name.partition(":")
    # A script's own classes are in __main__ or in the module that it is imported as.
    alike = [kind for other, kind in types.items() if other.partition(":")[2] == path]
    owner: Any = sys.modules.get(module)
    for part in path.split("."):
        owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
    if isinstance(owner, type):
        return owner
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
        return kind(decode_value(node["value"], _refuse_node, types, keys))
    if node["name"] not in kind.__members__:
        raise PlainValueError(keys, f"is {node['name']}, which {_shown(kind)} does not have here")
    return kind.__members__[node["name"]]


def _decode_named_tuple(node: dict[str, Any], other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    kind, fields = _class(str(node["class"]), types, keys), tuple(node["fields"])
    if not issubclass(kind, tuple) or getattr(kind, "_fields", None) != fields:
        raise PlainValueError(keys, f"is a tuple of {', '.join(fields)}; here {_shown(kind)} is not")
    return tuple.__new__(kind, decode_value(node["v"], other, types, keys))


def _decode_pairs(node: dict[str, Any], other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    values = {}
    for key_node, value_node in node["v"]:
        key = decode_value(key_node, _refuse_node, types, keys)
        values[key] = decode_value(value_node, other, types, (*keys, key))
    if (kind := _MAPPINGS[node[TYPE_TAG]]) is not defaultdict:
        return kind(values)
    factory = node["factory"]
    return defaultdict(None if factory is None else _FACTORIES[factory], values)


def _decode_deque(node: dict[str, Any], other: DecodeOther, types: TypesByName, keys: KeyPath) -> Any:
    return deque(decode_value(node["v"], other, types, keys), node["maxlen"])


def _decode_time(node: dict[str, Any], _other: DecodeOther, _types: TypesByName, _keys: KeyPath) -> Any:
    kind: Callable[..., Any] = dt.datetime if node[TYPE_TAG] == "datetime" else dt.time
    return kind(*node["v"], _decode_zone(node["zone"]), fold=node["fold"])


def _decode_path(node: dict[str, Any], _other: DecodeOther, _types: TypesByName, _keys: KeyPath) -> Any:
    return _PATHS[node["class"]](node["v"])


def _decode_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {name}")
    return dtype


def _attributes(*names: str) -> Callable[[Any], ValueNode]:
    return lambda value: [getattr(value, name) for name in names]


def _scalar_encoder(tag: str, encode: Callable[[Any], ValueNode]) -> Encoder:
    return lambda value, _other, _keys: {TYPE_TAG: tag, "v": encode(value)}


def _scalar_decoder(decode: Callable[[Any], Any]) -> Decoder:
    return lambda node, _other, _types, _keys: decode(node["v"])


def _sequence_encoder(tag: str, items: Callable[[Any], Iterable[Any]] = iter) -> Encoder:
    return lambda value, other, keys: {TYPE_TAG: tag, "v": _encode_items(items(value), other, keys)}


def _sequence_decoder(make: Callable[[list[Any]], Any]) -> Decoder:
    return lambda node, other, types, keys: make(decode_value(node["v"], other, types, keys))


_MAPPINGS: Mapping[str, Any] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict
}  # fmt: skip
_SCALARS: Mapping[str, tuple[type, Callable[[Any], ValueNode], Callable[[Any], Any]]] = {
    "complex": (complex, lambda z: [_bits(z.real), _bits(z.imag)], lambda bits: complex(*map(_float, bits))),
    "bytes": (bytes, _text, base64.b64decode),
    "bytearray": (bytearray, _text, lambda text: bytearray(base64.b64decode(text))),
    "torch.dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _decode_dtype),
    "torch.device": (torch.device, str, torch.device),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (
        Fraction,
        lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda parts: Fraction(*(int(part, 16) for part in parts)),
    ),
    "UUID": (uuid.UUID, lambda value: value.hex, lambda text: uuid.UUID(hex=text)),
    "date": (dt.date, _attributes("year", "month", "day"), lambda day: dt.date(*day)),
    "timedelta": (
        dt.timedelta,
        _attributes("days", "seconds", "microseconds"),
        lambda parts: dt.timedelta(*parts),
    ),
}
"""By tag: the type, its content as JSON, and the value made of that again."""
_BOUNDS = _attributes("start", "stop", "step")
_ENCODERS: Mapping[type, Encoder] = {
    **{kind: _scalar_encoder(tag, encode) for tag, (kind, encode, _) in _SCALARS.items()},
    tuple: _sequence_encoder("tuple"),
    torch.Size: _sequence_encoder("torch.Size"),
    range: _sequence_encoder("range", _BOUNDS),
    slice: _sequence_encoder("slice", _BOUNDS),
    deque: lambda value, other, keys: {
        **_sequence_encoder("deque")(value, other, keys),
        "maxlen": value.maxlen,
    },
    set: _encode_set,
    frozenset: _encode_set,
    **dict.fromkeys((OrderedDict, Counter), _encode_mapping),
    defaultdict: _encode_defaultdict,
    **dict.fromkeys(_PATHS.values(), _encode_path),
    dt.time: _encode_time,
    dt.datetime: _encode_time,
    np.ndarray: _encode_array,
}
_DECODERS: Mapping[str, Decoder] = {
    **{tag: _scalar_decoder(decode) for tag, (_, _, decode) in _SCALARS.items()},
    "int": _scalar_decoder(lambda text: int(text, 16)),
    "float": _scalar_decoder(_float),
    "tuple": _sequence_decoder(tuple),
    "torch.Size": _sequence_decoder(torch.Size),
    "range": _sequence_decoder(lambda bounds: range(*bounds)),
    "slice": _sequence_decoder(lambda bounds: slice(*bounds)),
    "set": _sequence_decoder(set),
    "frozenset": _sequence_decoder(frozenset),
    "deque": _decode_deque,
    **dict.fromkeys(_MAPPINGS, _decode_pairs),
    "path": _decode_path,
    "time": _decode_time,
    "datetime": _decode_time,
    "numpy": _decode_array,
    "enum": _decode_enum,
    "namedtuple": _decode_named_tuple,
}


def render_key_path(keys: Sequence[Hashable]) -> str:
    """Join keys with dots, as in manifests and messages."""
    return ".".join(str(key) for key in keys)
