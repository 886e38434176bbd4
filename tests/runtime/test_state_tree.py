"""A script's state comes back as it was: objects, optimizers, ties, views and plain values, or is refused."""

from __future__ import annotations

import enum
import shutil
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

import hpcrun  # noqa: E402
from hpcrun.errors import UsageError  # noqa: E402
from hpcrun.runtime.control import LoneControl  # noqa: E402
from tests.runtime.random_states import Empty, Masters, Sampler, odd_tensor  # noqa: E402
from tests.runtime.state_world import tell  # noqa: E402
from tests.runtime.worlds import told_by  # noqa: E402

MPI_MISSING = "needs mpiexec: pip install 'hpcrun-slurm[train]'"


def save(folder: Path, state: Any) -> None:
    with hpcrun.Checkpointer(folder, memory=0) as saves:
        saves.save(1, state)


def load(folder: Path, state: Any, **options: Any) -> Any:
    with hpcrun.Checkpointer(folder, memory=0) as saves:
        assert saves.load(state, **options) == 1
    return state


def refused(folder: Path, state: Any, words: str, **options: Any) -> None:
    with hpcrun.Checkpointer(folder, memory=0) as saves, pytest.raises(UsageError, match=words):
        saves.load(state, **options)


def test_random_states_come_back_equal_or_are_refused(tmp_path: Path) -> None:
    told = tell(tmp_path, LoneControl(), range(20), None)
    assert [one for one in told if one[2][0].startswith("different")] == []
    assert sum(one[2] == ["equal"] for one in told) >= 30


@pytest.mark.skipif(shutil.which("mpiexec", path=Path(sys.executable).parent) is None, reason=MPI_MISSING)
@pytest.mark.parametrize("ranks", [2, 3])
def test_so_do_those_of_several_ranks(tmp_path: Path, ranks: int) -> None:
    told = told_by("state_world.py", tmp_path, ranks, "100", "4")
    outcomes = [outcome for *_, of_ranks in told for outcome in of_ranks]
    assert [one for one in told if any(outcome.startswith("different") for outcome in one[2])] == []
    assert outcomes.count("equal") >= ranks * 5


# --- objects


def test_an_object_that_is_empty_before_gets_what_it_had(tmp_path: Path) -> None:
    sampler, empty, best = Sampler(), Empty(), {"loss": 0.5, "steps": [1, (2, 3)]}
    sampler.seen, sampler.order = {7: 3, "7": 4, (1, 2): 5}, torch.tensor([2, 0, 1])
    empty.state = {"deep": [{"x": torch.ones(2, dtype=torch.bfloat16)}, (None,)]}
    save(tmp_path, {"sampler": sampler, "empty": [empty], "best": best})
    new, other = Sampler(), Empty()
    held: dict[str, Any] = {}
    load(tmp_path, {"sampler": new, "empty": [other], "best": held})
    assert new.seen == {7: 3, "7": 4, (1, 2): 5}
    assert new.order is not None
    assert new.order.tolist() == [2, 0, 1]
    assert other.state["deep"][0]["x"].dtype is torch.bfloat16
    assert other.state["deep"][1] == (None,)
    assert held == best


def test_values_are_strict_both_ways(tmp_path: Path) -> None:
    save(tmp_path, {"a": 1, "nested": {"t": torch.ones(1), "n": 2}, "sampler": Sampler()})
    full = {"a": 0, "nested": {"t": torch.zeros(1), "n": 0}, "sampler": Sampler()}
    refused(tmp_path, {**full, "more": 5}, "lacks more")
    refused(tmp_path, {**full, "other": Sampler()}, "lacks other")
    refused(tmp_path, {key: full[key] for key in ("nested", "sampler")}, "also holds a;")
    refused(tmp_path, {key: full[key] for key in ("nested", "a")}, "also holds sampler")
    refused(tmp_path, {**full, "nested": {"t": torch.zeros(1)}}, "also holds nested.n")
    refused(tmp_path, {**full, "a": {}, "nested": {}}, "also holds nested.t")
    assert full == {"a": 0, "nested": full["nested"], "sampler": full["sampler"]}
    state = load(tmp_path, {"nested": {"n": 0, "new": 7}, "more": 5}, strict=False)
    assert state == {"nested": {"n": 2, "new": 7}, "more": 5}


class Fixed:
    """An object that makes something else of its state."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.mean, self.count = dtype, torch.ones(3, dtype=torch.float32), 1

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"].to(self.dtype), 0


def test_what_an_object_makes_of_its_state_is_not_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, {"x": Fixed(torch.float32)})
    words = r"x.mean \(float32 \[3\] was saved, float16 \[3\] is there\): is not what was saved after load"
    refused(tmp_path, {"x": Fixed(torch.float16)}, words)
    load(tmp_path, {"x": Fixed(torch.float32)})
    assert "x.count is not what was saved, after load_state_dict of x" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_an_optimizer_gets_its_state_exactly(tmp_path: Path, steps: int) -> None:
    def masters(value: float, steps: int) -> Any:
        params = [torch.nn.Parameter(torch.full((3, 2), value, dtype=torch.bfloat16))]
        optimizer = Masters(params)
        for _ in range(steps):
            optimizer.step()
        return optimizer, params[0]

    saved, param = masters(1.0, 1)
    saved.state[param]["master"] += 1e-4
    save(tmp_path, {"optimizer": saved})
    fresh, mine = masters(2.0, steps)
    load(tmp_path, {"optimizer": fresh})
    state, was = fresh.state[mine], saved.state[param]
    assert (state["master"].dtype, state["moment"].dtype) == (torch.float32, torch.int8)
    for key in ("master", "moment", "scales"):
        assert torch.equal(state[key], was[key])
    assert (state["mode"], state["place"]) == ("block", was["place"])
    assert type(state["place"]) is type(was["place"])
    two = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(2)], lr=1)
    refused(tmp_path, {"optimizer": two}, "optimizer .was saved with parameters in groups of 1; here .* of 2")


# --- ties and views


def test_tensors_that_are_tied_on_one_side_alone(tmp_path: Path) -> None:
    one, equal, other = torch.arange(4.0), torch.arange(4.0), torch.ones(4)
    save(tmp_path / "apart", {"a": one, "b": other})
    tied = torch.zeros(4)
    refused(tmp_path / "apart", {"a": tied, "b": tied}, "a .shares its memory with b here")
    load(tmp_path / "apart", {"a": tied, "b": tied}, strict=False)
    assert tied.tolist() == [0] * 4
    save(tmp_path / "equal", {"a": one, "b": equal})
    load(tmp_path / "equal", {"a": tied, "b": tied})
    assert torch.equal(tied, one)
    save(tmp_path / "tied", {"a": one, "b": one})
    alone = load(tmp_path / "tied", {"b": torch.zeros(4)}, strict=False)
    assert torch.equal(alone["b"], one)
    save(tmp_path / "alone", {"b": one})
    tied = torch.zeros(4)
    load(tmp_path / "alone", {"a": tied, "b": tied})
    assert torch.equal(tied, one)
    refused(tmp_path / "alone", {"a": torch.zeros(4), "b": torch.zeros(4)}, "lacks a")


def test_marks_on_memory_are_no_ties(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {"base": base, "conjugate": base.conj(), "negative": base.conj().imag, "real": base.real}
    save(tmp_path, state)
    new: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load(tmp_path, new)
    assert all(torch.equal(new[key], state[key]) for key in state)
    below = torch.zeros(2, dtype=torch.complex64)
    load(tmp_path, {**new, "conjugate": below.conj()})
    assert torch.equal(below, base)
    again = torch.zeros_like(base)
    same = {"base": again, "conjugate": again.conj(), "negative": again.conj().imag, "real": again.real}
    load(tmp_path, same)
    assert torch.equal(again, base)


def test_memory_that_overlaps_is_filled_where_the_contents_fit(tmp_path: Path) -> None:
    rows, windows = torch.arange(3.0).expand(2, 3), torch.arange(6.0).unfold(0, 4, 1)
    save(tmp_path, {"rows": rows, "windows": windows, "head": torch.arange(4.0)})
    memory = torch.zeros(6)
    load(
        tmp_path, {"rows": torch.zeros(3).expand(2, 3), "windows": memory.unfold(0, 4, 1), "head": memory[:4]}
    )
    assert memory.tolist() == [0, 1, 2, 3, 4, 5]
    memory = torch.zeros(6)
    wrong = {"rows": torch.zeros(2, 3), "windows": torch.zeros(3, 4), "head": memory[1:5]}
    refused(tmp_path, {**wrong, "windows": memory.unfold(0, 4, 1)}, "shares its memory with .*other contents")
    assert memory.tolist() == [0] * 6


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: odd_tensor("sparse"), "is a sparse_csr tensor"),
        (lambda: odd_tensor("quantised"), "is a quantised tensor"),
        (lambda: odd_tensor("nested"), "is a nested tensor|of the tensor type"),
        (lambda: odd_tensor("meta"), "is on the meta device"),
        (lambda: odd_tensor("half complex"), "is of type complex32"),
        (lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "is of the tensor type"),
        (lambda: torch.nn.UninitializedParameter(), "is of the tensor type .*UninitializedParameter"),
        (lambda: _freed(), "has lost its memory"),
    ],
)
def test_tensors_that_cannot_be_kept_are_named(tmp_path: Path, tensor: Any, words: str) -> None:
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        with pytest.raises(UsageError, match=f"state: deep.0: {words}"):
            saves.save(1, {"deep": [tensor()], "good": torch.ones(1)})
        saves.save(1, {"deep": [torch.ones(2)]})
        with pytest.raises(UsageError, match=r"deep.0 .*(is |lost)"):
            saves.load({"deep": [tensor()]})
        with torch.inference_mode():
            inference = torch.zeros(2)
        with pytest.raises(UsageError, match=r"deep.0 \(is an inference tensor"):
            saves.load({"deep": [inference]})


def _freed() -> Any:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


# --- plain values


class Mode(enum.Enum):
    FAST = 1


class Span(NamedTuple):
    begin: int
    end: Any


VALUES: dict[str, Any] = {
    "tuple": (1, [2, (3,)]),
    "keys": {1: "a", "1": "b", 2.5: "c", None: "d", (1, "x"): "e", True if False else "$": "f", Mode.FAST: 1},
    "named": Span(1, (2,)),
    "enum": [Mode.FAST],
    "numbers": [10**40, -0.0, float("inf"), 1 + 2j, True, np.float32(0.1), np.int64(3)],
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "bytes": b"\x00\xff",
    "sets": [{1, "a"}, frozenset([(1, 2)])],
    "torch": [torch.float8_e5m2, torch.device("cuda:3"), torch.Size([2])],
    "path": Path("a/b"),
    "ordered": OrderedDict(b=1, a=[2]),
    "default": defaultdict(list, {"a": [1]}),
    "counter": Counter("aab"),
    "deque": deque([1, 2], maxlen=3),
}


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {key: _types(one) for key, one in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [_types(one) for one in value]
    return type(value)


def test_values_keep_their_types(tmp_path: Path) -> None:
    save(tmp_path, {"values": VALUES, **VALUES})
    held: dict[str, Any] = {}
    new = load(tmp_path, {"values": held, **dict.fromkeys(VALUES)})
    for key, value in VALUES.items():
        for found in (held[key], new[key]):
            assert _types(found) == _types(value)
            assert (found == value).all() if key == "array" else found == value


def test_a_class_is_never_imported_for_a_save(tmp_path: Path) -> None:
    class Local(enum.Enum):
        ONE = 1

    save(tmp_path, {"best": {"x": Local.ONE}})
    refused(tmp_path, {"best": {}}, r"best.x \(is of .*Local, which is not imported here; import it before")
    assert load(tmp_path, {"best": {"y": Local.ONE}}) == {"best": {"x": Local.ONE}}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: None, "is of type function"),
        (defaultdict(lambda: 0), "is a defaultdict that makes"),
        (np.array([object()]), "is of numpy's type object"),
        (type("Mine", (dict,), {})(), "is of type .*Mine"),
        (torch.Generator(), "is of type torch._C.Generator"),
    ],
)
def test_values_that_cannot_be_kept_are_named(tmp_path: Path, value: Any, words: str) -> None:
    expected = pytest.raises(UsageError, match=rf"state: a.3\.\(1, 2\) {words}")
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves, expected:
        saves.save(1, {"a": {3: {(1, 2): value}}})


def test_names_that_dots_or_types_would_make_one_are_told_apart(tmp_path: Path) -> None:
    def state(value: float) -> dict[Any, Any]:
        names: dict[Any, Any] = {"a.b": torch.full((1,), value), "a": {"b": torch.full((1,), value + 1)}}
        return names | {
            "layer": {1: torch.full((1,), value + 2), "1": torch.full((1,), value + 3)},
            "rng": {"0": torch.full((1,), value + 4)},
            "hpcrun": {"0": torch.full((1,), value + 5)},
        }

    save(tmp_path, state(1.0))
    new = load(tmp_path, state(0.0))
    assert [new["a.b"], new["a"]["b"], new["layer"][1], new["layer"]["1"]] == [1.0, 2.0, 3.0, 4.0]
    assert [new["rng"]["0"], new["hpcrun"]["0"]] == [5.0, 6.0]


# --- until the fence


@pytest.mark.parametrize("count", [100, 3_000_000])
def test_what_torch_does_not_count_is_noticed_before_the_fence(tmp_path: Path, count: int) -> None:
    told: list[dict[str, Any]] = []
    tensors = {name: torch.arange(float(count)) for name in ("data", "numpy", "freed")}
    with hpcrun.Checkpointer(tmp_path, on_record=told.append) as saves:
        for step, change in enumerate((lambda t: t.data.add_(1), lambda t: t.numpy().fill(7), _free), 1):
            name = list(tensors)[step - 1]
            assert saves.save(step, {name: tensors[name]})
            change(tensors[name])
            saves.fence()
    failed = [(one["step"], one["why"]) for one in told if one["kind"] == "save_failed"]
    # What is small was copied before anybody could change it.
    assert [step for step, _ in failed] == ([1, 2] if count > 100 else [])
    assert all("was changed while it was copied" in why for _, why in failed)
    fresh = {"freed": torch.zeros(count)}
    with hpcrun.Checkpointer(tmp_path, memory=0) as saves:
        assert saves.load(fresh) == 3
    assert torch.equal(fresh["freed"], torch.arange(float(count)))


def _free(tensor: Any) -> None:
    tensor.untyped_storage().resize_(0)
