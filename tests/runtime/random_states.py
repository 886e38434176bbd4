"""Random states of every kind, each in two forms: as it is saved, and fresh, as it is filled.

A number gives the same state on every rank, but for its plain values, which a rank has as its own.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import math
import pathlib
import random
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hpcrun.checkpoint.format import ITEM_BYTES
from hpcrun.runtime.tensor_memory import same_bytes

DTYPES = [getattr(torch, name) for name in ITEM_BYTES]
SHARDED = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
"""That ranks can send each other."""


ODD = ("sparse", "meta", "quantised", "nested", "half complex")


def odd_tensor(kind: str) -> Tensor:
    """A tensor that no save can hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: some of these are on trial, or on their way out
        match kind:
            case "sparse":
                return torch.eye(2).to_sparse_csr()
            case "meta":
                return torch.empty(2, device="meta")
            case "quantised":
                return torch.quantize_per_tensor(torch.rand(2), 0.1, 0, torch.qint8)
            case "nested":
                return torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)
        return torch.empty(2, dtype=torch.complex32)


class Colour(enum.Enum):
    """An enum of a script."""

    RED = 1
    BLUE = "blue"


class Rights(enum.Flag):
    """One whose members add up."""

    READ = 1
    WRITE = 2


class Place(NamedTuple):
    """A named tuple of a script."""

    shard: int
    offset: Any


class Sampler:
    """Counts what it has seen; fresh it has seen nothing."""

    def __init__(self) -> None:
        self.seen: dict[Any, Any] = {}
        self.order: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Its counts, and an order once there is one."""
        return {"seen": self.seen} | ({} if self.order is None else {"order": self.order})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both."""
        self.seen, self.order = dict(state["seen"]), state.get("order")


class Empty:
    """An object without a state until it is given one."""

    def __init__(self) -> None:
        self.state: Any = {}

    def state_dict(self) -> dict[str, Any]:
        """Whatever it has been given."""
        return self.state  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.state = state


class Masters(torch.optim.Optimizer):
    """Keeps full precision and small moments beside half precision parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "kind": "masters"})

    def step(self, closure: Any = None) -> Any:
        """Make a state."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("master", param.detach().float() * 1.001)
                state.setdefault("moment", torch.arange(param.numel(), dtype=torch.int8).reshape(param.shape))
                state.setdefault("scales", torch.linspace(0, 1, 3))
                state.setdefault("mode", "block")
                state.setdefault("place", Place(3, (1, 2)))


class Noted(torch.nn.Module):
    """A module with a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.note: Any = {}

    def get_extra_state(self) -> Any:
        """The note."""
        return self.note

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.note = state


class Maker:
    """Makes one state; `is_fresh`: in the form that is filled."""

    def __init__(self, seed: int, rank: int, mesh: Any, *, is_fresh: bool) -> None:
        self.plan = random.Random(seed)
        """What there is, the same for both forms and on every rank."""
        self.own = random.Random(f"{seed} {rank} {is_fresh}")
        self.bits = torch.Generator().manual_seed(2 * seed + is_fresh)
        self.is_fresh, self.mesh = is_fresh, mesh
        self.may_refuse = False
        self._tensors: list[Tensor] = []

    def state(self) -> dict[Any, Any]:
        """A whole state."""
        return {self.key(number): self.part(0) for number in range(self.plan.randint(1, 7))}

    def key(self, number: int) -> Any:
        """Any kind of key, none twice."""
        kinds: list[Any] = [f"k{number}", f"a.{number}", number, str(number), (number, "x"), 0.5 + number]
        return self.plan.choice([f"name{number}", *kinds])

    def part(self, depth: int) -> Any:
        """A tensor, an object, a container of such, or a plain value."""
        makers: list[Callable[[], Any]] = [self.tensor, self.tensor, self.thing, self.plain]
        if depth < 3:
            makers += [lambda: self.container(depth)]
        return self.plan.choice(makers)()

    def container(self, depth: int) -> Any:
        """Parts together."""
        count = self.plan.randint(0, 3)
        keys = [self.key(number) for number in range(count)]
        parts = [self.part(depth + 1) for _ in range(count)]
        match self.plan.choice(["dict", "dict", "list", "ordered"]):
            case "list":
                return parts
            case "ordered":
                return OrderedDict(zip(keys, parts, strict=True))
        return dict(zip(keys, parts, strict=True))

    def tensor(self) -> Tensor:
        """Of any type, new, a view, or one that is there already."""
        kind = self.plan.random()
        if kind < 0.02:
            self.may_refuse = True
            return odd_tensor(self.plan.choice(ODD))
        if kind < 0.25 and self._tensors:
            return self.again(self.plan.choice(self._tensors))
        made = self.new()
        if self.mesh is not None and made.dim() and made.numel() and made.dtype in SHARDED:
            layouts = [Shard(0), Shard(made.dim() - 1), Replicate()]
            saved, filled, is_sharded = (
                self.plan.choice(layouts),
                self.plan.choice(layouts),
                self.plan.random(),
            )
            if is_sharded < 0.6:
                return distribute_tensor(made.detach(), self.mesh, [filled if self.is_fresh else saved])
        self._tensors.append(made)
        return made

    def new(self) -> Tensor:
        """Random bits of a random type and shape."""
        dtype = self.plan.choice(DTYPES)
        shape = [self.plan.choice([0, 1, 2, 3, 5]) for _ in range(self.plan.choice([0, 1, 2, 2, 3]))]
        if self.plan.random() < 0.1:
            shape = [self.plan.randint(3000, 9000)]
        count = math.prod(shape)
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=self.bits).bool()
        bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=self.bits, dtype=torch.uint8)
        made = bits.view(dtype).reshape(shape)
        if self.plan.random() < 0.2 and made.dim() > 1 and made.numel():
            made = made.transpose(0, 1)
        if dtype.is_floating_point and dtype.itemsize > 1 and self.plan.random() < 0.2:
            made.requires_grad_()
        return made

    def again(self, one: Tensor) -> Tensor:
        """The same tensor, a part or another view of it."""
        views: list[Callable[[], Tensor]] = [lambda: one, lambda: one.detach()]
        if one.dim() and one.numel():
            views += [lambda: one.detach()[:1], lambda: one.detach().t() if one.dim() == 2 else one]
            views += [lambda: one.detach()[:1].expand(3, *one.shape[1:])]
        if one.dtype in (torch.complex64, torch.complex128):
            views += [lambda: one.detach().conj(), lambda: one.detach().conj().imag]
        made = self.plan.choice(views)()
        change = self.plan.random()
        if self.is_fresh and change < 0.3:
            return made.detach().clone()
        return made

    def thing(self) -> Any:
        """An object with a state."""
        kind = self.plan.choice(["sampler", "empty", "module", "adam", "masters", "rates"])
        steps = self.plan.randint(0, 2)
        fresh_steps = self.plan.randint(0, 1)
        if kind == "sampler":
            sampler, count = Sampler(), self.plan.randint(0, 4)
            order = self.new()
            seen = {self.key(number): self.value(0) for number in range(count)}
            if not self.is_fresh:
                sampler.seen, sampler.order = seen, (order if count else None)
            return sampler
        if kind == "empty":
            empty, state = (
                Empty(),
                {"x": self.new(), "y": [self.value(0), {"z": self.new()}], "w": (self.new(),)},
            )
            empty.state = {} if self.is_fresh else state
            return empty
        if kind == "module":
            noted, note = Noted(), self.value(0)
            noted.weight.data = torch.rand(3, 2, generator=self.bits)
            noted.note = {} if self.is_fresh else note
            return noted
        dtype = torch.bfloat16 if kind == "masters" else torch.float32
        params = [torch.nn.Parameter(torch.rand(3, 2, generator=self.bits).to(dtype)) for _ in range(2)]
        optimizer: Any = Masters(params) if kind == "masters" else torch.optim.AdamW(params, lr=0.1)
        rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
        for _ in range(fresh_steps if self.is_fresh else steps):
            for param in params:
                param.grad = torch.rand(3, 2, generator=self.bits).to(dtype)
            optimizer.step()
            rates.step()
        return rates if kind == "rates" else optimizer

    def plain(self) -> Any:
        """A plain value; fresh it is often another kind."""
        value, emptied = self.value(0), self.plan.random() < 0.5
        if self.is_fresh and emptied:
            return type(value)() if type(value) in (dict, list, set, OrderedDict, Counter) else None
        return value

    def value(self, depth: int) -> Any:
        """Of any kind that is kept; what is in it is the rank's own."""
        own = self.own
        simple: list[Callable[[], Any]] = [
            lambda: own.randint(-9, 9),
            lambda: own.choice([10**30, -(1 << 63), 1 << 63]),
            lambda: own.choice([1.5, math.nan, math.inf, -0.0, 0.1]),
            lambda: own.choice(["", "text", "ü\n\x00", "$"]),
            lambda: own.choice([True, False, None]),
            lambda: own.choice([b"\x00\xff", bytearray(b"x"), complex(0.5, -math.inf)]),
            lambda: own.choice([Colour.RED, Colour.BLUE, Rights.READ | Rights.WRITE, Rights(0)]),
            lambda: Place(own.randint(0, 5), (own.random(),)),
            lambda: own.choice([torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])]),
            lambda: own.choice([np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("n")]),
            lambda: np.random.default_rng(own.randint(0, 99)).random((2, own.randint(0, 3))),
            lambda: np.array(["a", "bcd"]),
            lambda: pathlib.PurePosixPath("a/b"),
            lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, own.randint(0, 9), datetime.UTC),
            lambda: own.choice([datetime.date(2026, 1, 2), datetime.timedelta(days=-1, microseconds=1)]),
            lambda: own.choice(
                [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=own.randint(0, 9))]
            ),
            lambda: own.choice([range(2, 9, 3), frozenset([1, "a"]), {2, (3, 4)}]),
        ]
        if depth > 2 or self.plan.random() < 0.5:
            return self.plan.choice(simple)()
        kind, count = self.plan.choice(["list", "tuple", "dict", "keys", "others"]), self.plan.randint(0, 3)
        parts = [self.value(depth + 1) for _ in range(count)]
        keys: list[Any] = [1, "1", 1.5, None, (1, "a"), Colour.RED, "$", "a.b"]
        named = dict(zip(self.plan.sample(keys, count), parts, strict=True))
        match kind:
            case "list":
                return parts
            case "tuple":
                return tuple(parts)
            case "dict":
                return {f"n{number}": part for number, part in enumerate(parts)}
            case "keys":
                return named
        others: list[Any] = [
            OrderedDict(named),
            defaultdict(list, named),
            Counter("abca"),
            deque(parts, maxlen=5),
            Place(1, parts),
        ]
        return self.plan.choice(others)


def facts(value: Any, is_state: bool = True) -> Any:
    """A copy of a state that later changes leave alone, to be compared."""
    if isinstance(value, DTensor):
        return facts(value.full_tensor())
    if isinstance(value, Tensor):
        return ("tensor", value.detach().resolve_conj().resolve_neg().clone())
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return ("object", type(value), facts(dict(value.state_dict())))
    if isinstance(value, Mapping):
        factory = getattr(value, "default_factory", None)
        pairs = {(type(key), key): facts(one) for key, one in value.items()}
        return ("mapping", type(value), factory, pairs)
    if isinstance(value, list | tuple | deque):
        return ("sequence", type(value), getattr(value, "maxlen", None), [facts(one) for one in value])
    if isinstance(value, np.ndarray):
        return ("array", value.dtype, value.shape, value.tobytes())
    return ("value", type(value), repr(value) if isinstance(value, float | complex) else value)


def difference(one: Any, two: Any, path: str = "") -> str:
    """Where two copies differ first; empty where they do not."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return "" if same_bytes(one, two) else path
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return f"{path}: {list(one)} against {list(two)}"
        return next((d for key in one if (d := difference(one[key], two[key], f"{path}.{key[1]}"))), "")
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        if len(one) != len(two):
            return f"{path}: lengths"
        pairs = enumerate(zip(one, two, strict=True))
        return next((d for number, (a, b) in pairs if (d := difference(a, b, f"{path}[{number}]"))), "")
    return "" if type(one) is type(two) and one == two else f"{path}: {one!r} against {two!r}"
