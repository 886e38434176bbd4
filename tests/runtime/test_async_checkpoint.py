"""Saves behind training, as one rank sees them; the worker is a stand-in that the test holds by the hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpcrun-slurm[train]'")

from hpcrun.checkpoint.generation import GenerationReader  # noqa: E402
from hpcrun.runtime import worker_client  # noqa: E402
from hpcrun.runtime.async_checkpoint import AsyncCheckpointer  # noqa: E402
from hpcrun.runtime.control import LoneControl  # noqa: E402
from hpcrun.runtime.direct_checkpoint import DirectCheckpointer  # noqa: E402
from hpcrun.runtime.resharding import fill_from_chunks  # noqa: E402
from hpcrun.specs.checkpoint import CheckpointSpec  # noqa: E402
from hpcrun.specs.metrics import metric_as_json  # noqa: E402
from hpcrun.specs.saves import resumable_checkpoints  # noqa: E402
from tests.runtime.worker_stand_in import StandIn  # noqa: E402


class Bench:
    """A rank, its worker, and what was told."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.checkpoints = root / "checkpoints"
        (root / "arena").mkdir()
        self.worker = StandIn(root / "arena", self.checkpoints)
        self.told: list[dict[str, Any]] = []
        tell = lambda metric: self.told.append(metric_as_json(metric))  # noqa: E731
        spec = CheckpointSpec.model_validate({"memory": 2, **options})
        self.direct = DirectCheckpointer(self.checkpoints, LoneControl(), attempt=1, keep=9)
        self.saves = AsyncCheckpointer(spec, self.direct, LoneControl(), self.worker, tell)

    def kinds(self, *kinds: str) -> list[tuple[str, int]]:
        return [(one["kind"], one["step"]) for one in self.told if not kinds or one["kind"] in kinds]

    def loaded(self, step: int) -> dict[str, Any]:
        (saved,) = [one for one in resumable_checkpoints(self.checkpoints) if one.step == step]
        with GenerationReader(saved) as generation:
            assert not list(generation.damages())
            state = {
                name: torch.empty(one.shape, dtype=getattr(torch, one.dtype))
                for name, one in generation.manifest.tensors.items()
                if not name.startswith("rng.")
            }
            fill_from_chunks(generation, state)
        return state


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        benches.append(Bench(tmp_path, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.saves.close()
        bench.worker.kill()


def some_state(value: float = 1.0) -> dict[str, Any]:
    """Types, views and shapes of all kinds, with what a naive copy of memory gets wrong."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8) * value
    return {
        "plain": base.clone(),
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(5, 8),
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 4),
        "half": base.to(torch.bfloat16),
        "tiny": base.to(torch.float8_e4m3fn),
        "yes": base > 20,
        "complex": torch.complex(base, -base).conj(),
        "counts": torch.arange(5),
    }


def test_a_save_is_the_same_bits_as_one_that_was_waited_for(make: Any) -> None:
    bench = make()
    state = some_state()
    assert bench.saves.save(1, 10, state)
    bench.saves.fence()
    bench.saves.settle()
    bench.direct.save(2, 20, state)
    assert bench.loaded(1).keys() == state.keys()
    for name, tensor in bench.loaded(2).items():
        assert torch.equal(
            bench.loaded(1)[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )
        assert torch.equal(tensor.to(torch.complex128), state[name].to(torch.complex128)), name
    assert bench.kinds() == [("save", 1), ("stored", 1)]
    save, stored = bench.told
    assert save["tier"] == "memory"
    assert save["size_bytes"] > 48 * 4
    assert save["seconds"] >= save["fence_wait_s"] >= 0
    assert stored["tier"] == "durable"
    assert stored["lag_s"] > 0


def test_what_changes_after_the_fence_is_not_in_the_save(make: Any) -> None:
    bench = make()
    state = {"a": torch.zeros(100_000)}
    for step in range(1, 6):
        assert bench.saves.save(step, step, state)
        bench.saves.fence()
        state["a"].fill_(step)
    bench.saves.settle()
    assert [bench.loaded(step)["a"].unique().tolist() for step in range(1, 6)] == [[0], [1], [2], [3], [4]]


def test_what_changes_before_the_fence_fails_that_save_and_no_other(make: Any) -> None:
    bench = make()
    state = {"a": torch.zeros(1000), "b": torch.zeros(3)}
    assert bench.saves.save(1, 1, state)
    state["b"].add_(1)
    bench.saves.fence()
    assert bench.saves.save(2, 2, state)
    bench.saves.fence()
    bench.saves.settle()
    assert bench.kinds() == [("save_failed", 1), ("save", 2), ("stored", 2)]
    assert "b was changed while it was copied" in bench.told[0]["why"]
    assert [saved.step for saved in resumable_checkpoints(bench.checkpoints)] == [2]


def test_a_plan_is_kept_but_no_memory_of_the_state_before(make: Any) -> None:
    bench = make()
    for step in (1, 2, 3):
        assert bench.saves.save(step, step, {"a": torch.full((1000,), float(step))})
        bench.saves.fence()
    assert bench.saves.save(4, 4, {"a": torch.full((2000,), 4.0)})
    bench.saves.fence()
    bench.saves.settle()
    assert [bench.loaded(step)["a"].unique().tolist() for step in (1, 2, 3, 4)] == [[1], [2], [3], [4]]
    assert [one["kind"] for one in bench.worker.said].count("plan_slot") == 2


def test_two_saves_with_the_same_bytes_are_told_of(make: Any) -> None:
    bench = make()
    for step, value in ((1, 1.0), (2, 1.0), (3, 2.0)):
        torch.rand(3)  # random state moves on, whatever the weights do
        assert bench.saves.save(step, step, {"a": torch.full((1000,), value)})
        bench.saves.settle()
    bench.saves.settle()
    assert bench.kinds("save_unchanged") == [("save_unchanged", 2)]


def test_a_lost_worker_costs_a_save_and_the_next_one_finds_the_new_one(make: Any) -> None:
    bench = make()
    state = {"a": torch.ones(1000)}
    bench.worker.stores.clear()
    assert bench.saves.save(1, 1, state)
    bench.saves.fence()
    bench.worker.kill()
    assert bench.saves.save(2, 2, state)  # by the ranks themselves
    bench.saves.fence()
    bench.worker.start()
    state["a"].add_(1)
    assert bench.saves.save(3, 3, state)
    bench.saves.fence()
    bench.saves.settle()
    assert [one for one in bench.kinds() if one[0] != "save"] == [
        ("save_failed", 1),
        ("save_failed", 2),
        ("stored", 3),
    ]
    assert [saved.step for saved in resumable_checkpoints(bench.checkpoints)] == [2, 3]


def test_a_worker_lost_before_the_fence_fails_the_save_that_is_copied(make: Any) -> None:
    bench = make()
    assert bench.saves.save(1, 1, {"a": torch.ones(1000)})
    bench.worker.kill()
    bench.saves.fence()
    bench.saves.settle()
    bench.saves.fence()
    assert ("save_failed", 1) in bench.kinds()
    assert not bench.checkpoints.exists()
    bench.checkpoints.touch()  # where nobody can make a directory
    assert not bench.saves.save(2, 2, {"a": torch.ones(1000)})
    assert bench.kinds()[-1] == ("save_failed", 2)


def test_a_save_that_must_not_be_lost_is_written_by_the_ranks_where_no_worker_is(make: Any) -> None:
    bench = make()
    bench.worker.kill()
    bench.saves.save_durably(7, 70, {"a": torch.ones(1000)})
    assert bench.loaded(7)["a"].sum() == 1000
    assert bench.kinds() == [("save_failed", 7), ("save", 7)]


def test_a_save_that_must_not_be_lost_is_waited_for(make: Any) -> None:
    bench = make(durable={"every": 100})
    assert bench.saves.save(6, 60, {"a": torch.zeros(1000)})
    bench.saves.save_durably(7, 70, {"a": torch.ones(1000)})
    assert bench.kinds() == [("save", 6), ("save", 7), ("stored", 7)]
    assert [saved.step for saved in resumable_checkpoints(bench.checkpoints)] == [7]


def test_a_last_save_does_not_wait_for_a_worker_that_is_stuck(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "_HEARTBEAT_EVERY_S", 0.02)
    monkeypatch.setattr(worker_client, "WORKER_STUCK_S", 0.5)
    bench = make()
    bench.worker.stores.clear()
    bench.worker._thread(lambda: bench.worker.stores.wait(1.5) or bench.worker.stores.set())
    bench.saves.save_durably(6, 60, {"a": torch.zeros(1000)})
    assert bench.kinds()[-1] == ("stored", 6)  # slow, but it answers
    bench.worker.stores.clear()
    bench.worker.is_stuck = True
    bench.saves.save_durably(7, 70, {"a": torch.ones(1000)})
    assert not bench.worker.stores.is_set()
    assert bench.loaded(7)["a"].sum() == 1000
    assert bench.kinds()[-2:] == [("save_failed", 7), ("save", 7)]
    assert "no sign of life" in bench.told[-2]["why"]
    # It is still there, and takes connections, but nobody waits long for it.
    assert bench.saves.save(8, 80, {"a": torch.ones(1000)})
    assert bench.kinds()[-2:] == [("save_failed", 8), ("save", 8)]
    assert [one["kind"] for one in bench.worker.said].count("reserve_slots") == 1


def test_memory_that_is_refused_fails_the_save_with_its_reason(make: Any) -> None:
    bench = make(durable={"every": 4})
    bench.worker.refuses = "4 GiB are asked for, 1 GiB is free"
    assert not bench.saves.save(1, 1, {"a": torch.ones(1000)})
    assert "1 GiB is free" in bench.told[0]["why"]
    # What is due in the run directory gets there all the same.
    assert bench.saves.save(4, 4, {"a": torch.ones(1000)})
    assert bench.loaded(4)["a"].sum() == 1000
    assert bench.kinds() == [("save_failed", 1), ("save_failed", 4), ("save", 4)]
    bench.worker.refuses = ""
    assert bench.saves.save(5, 5, {"a": torch.ones(1000)})


def fill_all(bench: Bench) -> None:
    bench.worker.stores.clear()
    for step in (1, 2):
        assert bench.saves.save(step, step, {"a": torch.full((1000,), float(step))})
        bench.saves.fence()


def test_skip_leaves_out_a_save_that_is_due_too_early(make: Any) -> None:
    bench = make(on_backlog="skip")
    fill_all(bench)
    assert not bench.saves.save(3, 3, {"a": torch.zeros(1000)})
    bench.worker.stores.set()
    bench.saves.settle()
    assert bench.saves.save(4, 4, {"a": torch.zeros(1000)})
    assert bench.kinds("save_skipped", "save_failed") == [("save_skipped", 3)]


def test_wait_waits_for_the_one_before(make: Any) -> None:
    bench = make(on_backlog="wait")
    fill_all(bench)
    bench.worker._thread(lambda: bench.worker.stores.wait(0.3) or bench.worker.stores.set())
    assert bench.saves.save(3, 3, {"a": torch.zeros(1000)})
    assert "degrade_saves" not in {one["kind"] for one in bench.worker.said}


def test_degrade_lets_the_older_ones_go_no_further(make: Any) -> None:
    bench = make(on_backlog="degrade")
    fill_all(bench)
    assert bench.saves.save(3, 3, {"a": torch.zeros(1000)})
    assert [one["kind"] for one in bench.worker.said].count("degrade_saves") == 1


def test_a_copy_is_made_of_what_goes_to_the_run_directory_and_of_nothing_else(make: Any) -> None:
    bench = make(every=1, durable={"every": 4}, object={"url": "s3://b/p", "every": 2})
    bench.saves._session.offered = ["durable", "object"]
    tiers = {step: bench.saves._tiers(step, lasting=step == 6) for step in (2, 3, 4, 6, 8)}
    both = ["durable", "object"]
    assert tiers == {2: [], 3: [], 4: both, 6: both, 8: both}
