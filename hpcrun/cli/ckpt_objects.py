"""Copies of saves in an object store: `ckpt upload`, `ckpt download`, and their part of `ls` and `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.ckpt_show import (
    choose_saved_step,
    find_run_or_directory,
    print_json,
    refuse_while_running,
    show_progress,
)
from hpcrun.units import render_bytes

if TYPE_CHECKING:
    from contextlib import ExitStack

    from hpcrun.checkpoint.objects.catalogue import BrokenObjectCopy, ObjectCopy
    from hpcrun.checkpoint.objects.store import ObjectStore
    from hpcrun.specs.rundir import RunDir

Url = Annotated[str | None, typer.Option("--url", help="object store; default as in the job")]
Endpoint = Annotated[str | None, typer.Option(help="URL of a store that is not Amazon's; default: the job's")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="run directory, run id, or its unique beginning")]
_Json = Annotated[bool, typer.Option("--json", help="one JSON object")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="only say what would be done")]


def upload(
    run: _Run,
    step: Annotated[int | None, typer.Option(help="which saved step; default the newest")] = None,
    url: Url = None,
    endpoint: Endpoint = None,
    verify: Annotated[bool, typer.Option("--verify", help="read all of it back afterwards")] = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Copy a saved step to an object store; what an interrupted upload has sent is not sent again.

    The save is proved first. The copy exists once all of it is there; exit code 1 if --verify finds damage.
    """
    from hpcrun.checkpoint.objects.catalogue import (
        generation_key_prefix,
        list_generation_copies,
        split_into_objects,
    )
    from hpcrun.checkpoint.objects.download import find_copy_damages
    from hpcrun.checkpoint.objects.upload import upload_save as send
    from hpcrun.errors import EXIT_CHECK_FAILED

    found = find_run_or_directory(run, use="plan" if dry_run else "act")
    saved = choose_saved_step(str(found.path), step)
    size = sum(saved.file_bytes)
    with _open_store(found, url, endpoint) as store:
        target = f"{store.url}/{generation_key_prefix(found.run_id, saved.step, saved.generation)}".rstrip(
            "/"
        )
        told: dict[str, Any] = {"dry_run": dry_run, "step": saved.step, "generation": saved.generation}
        told |= {"url": target, "size_bytes": size}
        if dry_run:
            told["objects"] = sum(len(split_into_objects(one)) for one in saved.file_bytes)
            line = (
                f"would copy step {saved.step} to {target}: {told['objects']} objects, {render_bytes(size)}"
            )
            print_json(told) if as_json else print(line)
            return
        with show_progress(f"step {saved.step}", size) as show:
            sent = send(store, found.run_id, saved, show=show)
        told |= vars(sent) | {"verified": verify, "damages": []}
        if verify:
            (copy,) = [one for one in list_generation_copies(store, found.run_id)[0] if one.url == target]
            with show_progress(f"reading back step {saved.step}", size) as show:
                told["damages"] = find_copy_damages(store, copy, show)
    if as_json:
        print_json(told)
    else:
        _print_upload(told)
    if told["damages"]:
        raise typer.Exit(EXIT_CHECK_FAILED)


def download(
    run: _Run,
    step: Annotated[int | None, typer.Option(help="which step; default the newest whole copy")] = None,
    url: Annotated[str | None, typer.Option("--from", metavar="URL", help="default as in the job")] = None,
    endpoint: Endpoint = None,
    is_over: Annotated[bool, typer.Option("--is-over", help="nobody saw the run's end: it is over")] = False,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Bring a step from an object store to the run directory, where `train --resume` finds it.

    Every byte is proved before it counts; a save of that step that is not this one is set aside.
    """
    from hpcrun.checkpoint.objects import download as home

    found = find_run_or_directory(run, use="plan" if dry_run else "act")
    refuse_while_running(found, "download", believe=is_over)
    with _open_store(found, url, endpoint) as store:
        copy = _choose_copy(store, found, step)
        size = sum(copy.saved.file_bytes)
        told: dict[str, Any] = {"dry_run": dry_run, "step": copy.saved.step, "url": copy.url}
        told |= {"generation": copy.saved.generation, "size_bytes": size}
        saved = home.find_whole_save(copy, found.checkpoints)
        told["fetched"] = saved is None and not dry_run
        if saved is None and not dry_run:
            with show_progress(f"step {copy.saved.step}", size) as show:
                saved = home.download_copy(store, copy, found.checkpoints, show)
    told["path"] = str(saved.path if saved else found.checkpoints / f"step-{copy.saved.step:08d}")
    if as_json:
        print_json(told)
    elif told["fetched"]:
        print(f"step {told['step']}: {render_bytes(size)} from {copy.url}, whole, in {told['path']}")
    elif saved is not None:
        print(f"step {told['step']}: is whole in {told['path']}; nothing to fetch")
    else:
        print(f"would fetch step {told['step']}, {render_bytes(size)}, from {copy.url} to {told['path']}")


def find_object_copies(
    run: str, url: str | None, endpoint: str | None
) -> tuple[list[ObjectCopy], list[BrokenObjectCopy], str | None]:
    """The copies of a run for `ckpt ls`; or why they are not known. Nothing where the job has no store."""
    from hpcrun.checkpoint.objects.catalogue import list_generation_copies
    from hpcrun.errors import HpcrunError

    found = find_run_or_directory(run)
    try:
        if url is None and _job_store(found) is None:
            return [], [], None
        with _open_store(found, url, endpoint) as store:
            return *list_generation_copies(store, found.run_id), None
    except HpcrunError as error:
        if url is not None:
            raise
        return [], [], str(error)


def open_object_copies(
    run: RunDir, url: str | None, endpoint: str | None, stack: ExitStack
) -> tuple[list[tuple[ObjectStore, ObjectCopy]], str | None]:
    """The copies of a run with their store, open until the stack is; or why they are not known."""
    from hpcrun.checkpoint.objects.catalogue import list_generation_copies
    from hpcrun.errors import HpcrunError

    try:
        if url is None and _job_store(run) is None:
            return [], None
        store = stack.enter_context(_open_store(run, url, endpoint))
        return [(store, copy) for copy in list_generation_copies(store, run.run_id)[0]], None
    except HpcrunError as error:
        if url is not None:
            raise
        return [], str(error)


def verify_object_copies(
    run: str, step: int | None, url: str | None, endpoint: str | None, as_json: bool
) -> None:
    """`ckpt verify` of the copies in a store, newest first: all of them are read back."""
    from hpcrun.checkpoint.objects.catalogue import list_generation_copies
    from hpcrun.checkpoint.objects.download import find_copy_damages
    from hpcrun.errors import EXIT_CHECK_FAILED, UsageError

    found, results = find_run_or_directory(run), list[dict[str, Any]]()
    with _open_store(found, url, endpoint) as store:
        copies, broken = list_generation_copies(store, found.run_id)
        for copy in reversed([one for one in copies if step in (None, one.saved.step)]):
            with show_progress(f"step {copy.saved.step}", sum(copy.saved.file_bytes)) as show:
                wrong = find_copy_damages(store, copy, show)
            state = "damaged" if wrong else "whole"
            results.append({"step": copy.saved.step, "path": copy.url, "state": state, "damages": wrong})
        if step is None:
            told = {"step": None, "state": "damaged"}
            results += [told | {"path": one.url, "damages": [one.problem]} for one in broken]
        elif not results:
            known = ", ".join(str(one.saved.step) for one in copies) or "none"
            raise UsageError(f"{store.url}: has no copy of step {step} of {found.id} (copies: {known})")
    whole = [one["step"] for one in results if one["state"] == "whole"]
    if as_json:
        print_json({"saves": results, "newest_whole_step": max(whole, default=None)})
    else:
        for one in results:
            print(f"{one['path']}: {one['state']}")
            for damage in one["damages"]:
                print(f"  {damage}")
        if not results:
            print("no copy")
    if len(whole) < len(results):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_upload(told: dict[str, Any]) -> None:
    kept = f", {told['kept_objects']} were there" if told["kept_objects"] else ""
    sent = f"{told['sent_objects']} objects sent ({render_bytes(told['sent_bytes'])}){kept}"
    print(f"step {told['step']}: {told['url']}: {sent}")
    if told["unproved_objects"]:
        print(
            f"the store tells no checksum of {told['unproved_objects']} objects"
            + ("" if told["verified"] else "; --verify reads them back")
        )
    for damage in told["damages"]:
        print(f"  {damage}")
    if told["verified"] and not told["damages"]:
        print("read back: whole")


def _choose_copy(store: ObjectStore, run: RunDir, step: int | None) -> ObjectCopy:
    from hpcrun.checkpoint.objects.catalogue import list_generation_copies
    from hpcrun.errors import UsageError

    copies, _ = list_generation_copies(store, run.run_id)
    chosen = [one for one in copies if one.problem is None and step in (None, one.saved.step)]
    if not chosen:
        known = ", ".join(f"{one.saved.step}{' (damaged)' * bool(one.problem)}" for one in copies) or "none"
        what = "whole copy" if step is None else f"whole copy of step {step}"
        raise UsageError(f"{store.url}: has no {what} of {run.id} (copies: {known})")
    return chosen[-1]


def _job_store(run: RunDir) -> tuple[str, str | None] | None:
    """URL and endpoint from the run's job."""
    from hpcrun.specs.load import load_run_job

    wanted = load_run_job(run).spec.checkpoint.object if run.spec.exists() else None
    return None if wanted is None else (wanted.url, wanted.endpoint)


@contextmanager
def _open_store(run: RunDir, url: str | None, endpoint: str | None) -> Iterator[ObjectStore]:
    """The store that was asked for, or the job's; UsageError without one."""
    from hpcrun.checkpoint.objects.open_store import open_object_store
    from hpcrun.errors import UsageError

    if url is None:
        of_job = _job_store(run)
        if of_job is None:
            raise UsageError(f"{run.id}: its job has no checkpoint.object; say where with --url (or --from)")
        url, endpoint = of_job[0], endpoint or of_job[1]
    with open_object_store(url, endpoint) as store:
        store.check()
        yield store
