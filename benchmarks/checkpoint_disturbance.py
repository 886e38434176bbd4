"""What a save costs the training beside it, for hpcrun's saves and for torch's.

One trainer with one thread: a plain loop with AdamW, whose whole state is what is saved. A window of steps
begins with the call that saves and ends with the step in which the save is found to be on disk, synced;
beside each there is a window of as many steps without a save, before or after it in turn. What counts is the
mean time of the window's steps over that of the other's, and the longest step over the longest without a
save: the duration of the call alone would not show what copying, hashing and writing take from the steps
after it. `lost_s`: the seconds that all steps of the window took longer.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from checkpoint import Behind

MEAN, WORST = 1.05, 1.5
REST_S = 0.1
WIDTH, BATCH, MOST_STEPS = 256, 32, 400
Begin = Callable[[int], Callable[[], bool]]
"""Begins the save of a step; what it returns tells whether that save is on disk by now."""


class Trainer:
    """A model of many layers, and its training."""

    def __init__(self, layers: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-4, fused=True)
        self.data = torch.randn(BATCH, WIDTH)
        self.count = 0

    def step(self) -> None:
        """One step of training."""
        import torch

        x = self.data
        for layer in self.layers:
            x = x + 0.1 * torch.nn.functional.gelu(layer(x))
        self.optimizer.zero_grad()
        loss: Any = (x - self.data.flip(0)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.count += 1

    def state(self) -> dict[str, Any]:
        """All tensors of model and optimizer, by name."""
        found = {f"model.{name}": tensor for name, tensor in self.layers.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": tensor for name, tensor in values.items()}
        return found

    def steps(self, is_over: Callable[[list[float]], bool], begin: float) -> list[float]:
        """Train until it is over; the seconds of each step, the first from `begin` on."""
        found = list[float]()
        while not found or (not is_over(found) and len(found) < MOST_STEPS):
            self.step()
            now = time.perf_counter()
            found.append(now - begin)
            begin = now
        return found


def no_save(_step: int) -> Callable[[], bool]:
    """For comparison."""
    return lambda: True


@contextmanager
def ours(folder: Path, trainer: Trainer, *, memory: int = 2, **options: Any) -> Iterator[Begin]:
    """hpcrun's saves: through memory and the checkpoint worker, or at once."""
    behind = Behind(folder, memory=memory, **options)
    behind.saves.fence_before(trainer.optimizer)

    def begin(step: int) -> Callable[[], bool]:
        behind.saves.save(step, trainer.state())
        return (lambda: behind.is_stored(step)) if memory else lambda: True

    yield begin
    behind.saves.close()


@contextmanager
def plain(root: Path, trainer: Trainer) -> Iterator[Begin]:
    """torch.save, and an fsync."""
    import torch

    def begin(_step: int) -> Callable[[], bool]:
        with (root / "torch-plain").open("wb") as file:
            torch.save(trainer.state(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True

    yield begin


@contextmanager
def asynchronous(root: Path, trainer: Trainer, *, kind: str, keeps_stager: bool = False) -> Iterator[Begin]:
    """torch's distributed checkpoint, in a thread or a process of its own."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    path = root / f"torch-{kind}-{keeps_stager}"
    kept = DefaultStager(StagingOptions(False, False, False, False)) if keeps_stager else None

    def begin(_step: int) -> Callable[[], bool]:
        writer = FileSystemWriter(path, sync_files=True)
        saving: Any = async_save(
            trainer.state(),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType(kind),
            async_stager=kept,
            no_dist=kind == "thread",
        )
        return lambda: bool(saving.done() and saving.result())

    yield begin
    if kept is not None:
        kept.close()


@dataclass
class Windows:
    """Steps with a save and without, window by window."""

    saving: list[list[float]] = field(default_factory=list)
    others: list[list[float]] = field(default_factory=list)

    def means(self) -> list[float]:
        """Of each window with a save over that without."""
        pairs = zip(self.saving, self.others, strict=True)
        return [statistics.fmean(a) / statistics.fmean(b) for a, b in pairs]

    def worst(self) -> list[float]:
        """The longest step of each window with a save over the longest of all without."""
        longest = max(map(max, self.others))
        return [max(one) / longest for one in self.saving]

    def lost(self) -> list[float]:
        """Seconds that a save has cost, all its steps together."""
        pairs = zip(self.saving, self.others, strict=True)
        return [sum(a) - len(a) * statistics.fmean(b) for a, b in pairs]


def candidates(root: Path, trainer: Trainer, stack: ExitStack) -> dict[str, Begin]:
    """All ways to save, and none."""
    made = {
        "ours": ours(root / "ours", trainer),
        "ours, through the page cache": ours(root / "ours-cached", trainer, durable={"direct": False}),
        "ours, without rests": ours(root / "ours-at-once", trainer, flush_duty=0),
        "ours, synchronous": ours(root / "ours-synchronous", trainer, memory=0),
        "torch.save": plain(root, trainer),
        "async_save, thread": asynchronous(root, trainer, kind="thread"),
        "async_save, thread, kept stager": asynchronous(root, trainer, kind="thread", keeps_stager=True),
        "async_save, process": asynchronous(root, trainer, kind="process"),
    }
    return {"no save": no_save} | {name: stack.enter_context(one) for name, one in made.items()}


def settle(root: Path) -> None:
    """Let everything end that was begun before; of torch's saves none is kept."""
    for path in root.glob("torch-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    time.sleep(REST_S)
    os.sync()


def save_window(root: Path, trainer: Trainer, begin: Begin) -> list[float]:
    """The steps from a save's beginning to its end."""
    settle(root)
    start = time.perf_counter()
    is_stored = begin(trainer.count)
    return trainer.steps(lambda _: is_stored(), start)


def other_window(root: Path, trainer: Trainer, count: int) -> list[float]:
    """As many steps without a save."""
    settle(root)
    return trainer.steps(lambda found: len(found) >= count, time.perf_counter())


def measure(root: Path, trainer: Trainer, ways: dict[str, Begin], rounds: int) -> dict[str, Windows]:
    """Windows of all ways in turn; which of a pair comes first changes from round to round."""
    found, lengths = {name: Windows() for name in ways}, dict.fromkeys(ways, 4)
    for number, (name, begin) in itertools.product(range(rounds), ways.items()):
        first = other_window(root, trainer, lengths[name]) if number % 2 else None
        # Without a save, as many steps as ours takes, to see what the machine itself does.
        steps = (
            other_window(root, trainer, lengths["ours"])
            if begin is no_save
            else save_window(root, trainer, begin)
        )
        lengths[name] = len(steps)
        found[name].saving.append(steps)
        found[name].others.append(first or other_window(root, trainer, len(steps)))
    return found


def tell(report: harness.Report, found: dict[str, Windows], load: str) -> None:
    """A row for each way."""
    for name, windows in found.items():
        report.row(
            what=name,
            load=load,
            mean=harness.spread(windows.means()),
            worst=harness.spread(windows.worst()),
            lost_s=harness.spread(windows.lost()),
            steps=statistics.median(map(len, windows.saving)),
            rounds=len(windows.saving),
        )


def claim(report: harness.Report, found: dict[str, Windows]) -> None:
    """What must hold of ours."""
    means, worst = found["ours"].means(), found["ours"].worst()
    shown = f"mean step beside a save over one without, {len(means)} windows"
    report.claim(shown, harness.spread(means), f"at most {MEAN}", statistics.median(means) <= MEAN)
    shown = "longest step beside a save over the longest without"
    report.claim(shown, harness.spread(worst), f"at most {WORST} in all windows", max(worst) <= WORST)
    least = min(statistics.median(one.lost()) for name, one in found.items() if name.startswith(("a", "t")))
    lost = statistics.median(found["ours"].lost())
    report.claim(
        "seconds that a save costs, against the best of torch's",
        f"{lost:.3f}",
        f"below {least:.3f}",
        lost < least,
    )


@contextmanager
def second_trainer(layers: int) -> Iterator[None]:
    """Another trainer, on the core that was free."""
    words = [sys.executable, __file__, "--busy", "--layers", str(layers)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield
        child.kill()


def be_busy(layers: int) -> None:
    """Train until somebody ends this, or the one who started it is gone."""
    trainer, parent = Trainer(layers), os.getppid()
    trainer.step()
    print("ready", flush=True)
    while os.getppid() == parent:
        trainer.step()


def join_group(root: Path) -> None:
    """Torch's saves in a process need a group, also of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{root / 'group'}", rank=0, world_size=1)


def arguments_of(parser: ArgumentParser) -> Any:
    """The options of this script."""
    parser.add_argument("--dir", type=Path, help="where to write; default the temporary directory")
    parser.add_argument(
        "--layers", type=int, help="of the model, 0.75 MiB of state each; default 256, with --quick 64"
    )
    parser.add_argument("--rounds", type=int, help="windows of each kind; default 7, with --quick 3")
    parser.add_argument("--busy", action="store_true", help="only train, for ever")
    return parser.parse_args()


def main() -> int:
    """Print the table and one line a claim."""
    arguments = arguments_of(harness.options(__doc__))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's saves in one process warn of just that
    layers = arguments.layers or (64 if arguments.quick else 256)
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    if arguments.busy:
        be_busy(layers)
        return 0
    report = harness.Report("checkpoint_disturbance")
    report.header()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name, ExitStack() as stack:
        root, trainer = Path(name), Trainer(layers)
        join_group(root)
        stack.callback(dist.destroy_process_group)
        trainer.step()
        ways = candidates(root, trainer, stack)
        measure(root, trainer, ways, 1)  # first saves make plans, slots and processes
        alone = measure(root, trainer, ways, rounds)
        tell(report, alone, "alone")
        with second_trainer(layers):
            tell(report, measure(root, trainer, ways, 1 if arguments.quick else 2), "beside a second trainer")
        claim(report, alone)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
