"""A run whose saves are gone goes on from its copies in an object store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="pip install 'hpcrun-slurm[s3]'")

from hpcrun.checkpoint.objects.catalogue import list_whole_copies
from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.upload import upload_save
from hpcrun.errors import SiteError
from hpcrun.launch.agents.local_node import LocalNode
from hpcrun.launch.checkpointing.coordinator import CheckpointCoordinator
from hpcrun.specs.checkpoint import CheckpointSpec
from hpcrun.specs.events.checkpoint import RestoreEvent
from hpcrun.specs.events.event import Event
from hpcrun.specs.job import JobSpec
from hpcrun.specs.placement import Placement
from hpcrun.specs.rundir import Attempt, RunDir
from hpcrun.specs.saves import resumable_checkpoints
from tests.checkpoint.generations import save
from tests.event_lines import event_line


class Far:
    """A run whose saves of steps 5 and 10 are also in a store."""

    def __init__(self, path: Path) -> None:
        self.run, self.url = RunDir(path / "run"), f"local://{path}/store"
        self.notes: list[str] = []
        self.events: list[RestoreEvent] = []
        for step in (5, 10):
            saved = save(self.run.checkpoints, step)
            with open_object_store(self.url) as store:
                upload_save(store, self.run.run_id, saved)

    def prepare(self, number: int, url: str = "") -> None:
        section = CheckpointSpec.model_validate({"object": {"url": url or self.url}})
        spec = JobSpec.model_construct(checkpoint=section)

        def tell(attempt: Attempt, event: Event) -> None:
            assert isinstance(event, RestoreEvent)
            self.events.append(event)

        nodes = LocalNode(self.run)
        self.coordinator = CheckpointCoordinator(self.run, spec, nodes, tell, self.notes.append)
        self.coordinator.prepare(self.run.attempt(number).create(), Placement(nodes.alive), {})
        nodes.close()

    @property
    def steps(self) -> list[int]:
        return [one.step for one in resumable_checkpoints(self.run.checkpoints)]


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path)


def test_where_nothing_is_left_the_newest_copy_is_brought_home(far: Far) -> None:
    shutil.rmtree(far.run.checkpoints)
    far.prepare(2)
    assert far.steps == [10]
    assert far.coordinator.step() == 10
    (event,) = far.events
    assert (event.step, event.tiers) == (10, ("object",))
    assert far.notes[-1] == "going on from step 10, out of the object store"


def test_a_damaged_copy_leads_to_the_one_before(far: Far) -> None:
    shutil.rmtree(far.run.checkpoints)
    (copy,) = [one for one in list_whole_copies(far.url, far.run.run_id) if one.saved.step == 10]
    (path,) = Path(copy.url.removeprefix("local://")).glob("data-*.bin.*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    far.prepare(2)
    assert far.steps == [5]
    assert far.events[0].lost_steps == 0
    assert copy.url in far.events[0].passed_over[0]


def test_a_damaged_save_gives_way_to_its_copy(far: Far) -> None:
    (far.run.checkpoints / "step-00000010" / "data-00000.bin").write_bytes(b"")
    far.prepare(2)
    assert far.steps == [5, 10]
    assert (far.events[0].step, far.events[0].lost_steps) == (10, 0)


def test_what_is_nearer_and_whole_needs_no_store(far: Far) -> None:
    far.prepare(2, "nonsense://nowhere")
    assert (far.events, far.notes) == ([], [])


def test_a_store_that_is_away_stops_only_a_run_that_has_nothing_else(far: Far) -> None:
    shutil.rmtree(far.run.checkpoints)
    far.prepare(2, "nonsense://nowhere")
    assert far.notes[0].startswith("copies in the object store are not considered: nonsense:// needs")
    line = event_line("checkpoint_stored", 1.0, tier="object", step=10)
    far.run.events.write_text(json.dumps(line) + "\n")
    with pytest.raises(SiteError, match="all that is left of this run is in the object store: nonsense"):
        far.prepare(3, "nonsense://nowhere")


def test_that_nothing_is_copied_without_memory_is_said(far: Far) -> None:
    far.prepare(1)
    assert "checkpoint.memory is 0" in far.notes[0]
