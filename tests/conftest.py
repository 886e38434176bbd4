"""What every test gets: the markers of its place, a root for run directories of its own."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.tiers import PURE, TIERS, TierGuard, tiers_of

TOGETHER = ("tests/lab/", "tests/launch/")
"""The first shares a lab; the other's supervisors end what ranks that never met leave in /dev/shm."""
_guard = TierGuard()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `-m pure` would leave out."""
    if config.option.markexpr == PURE and collection_path.suffix == ".py" and tiers_of(collection_path):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that needs more than its markers say as soon as it is imported."""
    if isinstance(collector, pytest.Module):
        _guard.watch(tiers_of(collector.path))
    report = yield
    if problems := _guard.problems():
        report.outcome, report.longrepr = "failed", f"{collector.nodeid} {problems[0]}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its place, and let those of the lab begin, which take longest."""
    for item in items:
        for tier in sorted(tiers_of(item.path)):
            item.add_marker(tier)
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(PURE)
    rank = [*reversed(TIERS), PURE]
    items.sort(
        key=lambda item: min(rank.index(mark.name) for mark in item.iter_markers() if mark.name in rank)
    )


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # has no types
    """With `--dist loadfile`, a folder of TOGETHER goes to one worker as a file does."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Take the place of xdist's own scheduler for whole files."""
    return _ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let the guard look at the test and what it sets up."""
    _guard.watch(mark.name for mark in item.iter_markers())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail a test that needed more than its markers say."""
    yield
    if problems := _guard.problems():
        pytest.fail(problems[0], pytrace=False)


@pytest.fixture(autouse=True)
def runs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HPCRUN_ROOT of this test, so that no test writes into the checkout or sees another's runs."""
    root = tmp_path / "runs"
    monkeypatch.setenv("HPCRUN_ROOT", str(root))
    # Nor what this user's runs have seen of nodes.
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{tmp_path}-config")
    return root


@pytest.fixture(autouse=True)
def signals_let_through() -> Iterator[None]:
    """A verb that a test calls here holds signals back for a supervisor that never comes: undone after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
