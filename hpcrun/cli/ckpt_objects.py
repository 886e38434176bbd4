"""Checkpoints in an object store: `ckpt upload`, `ckpt download`, and their part of `ckpt verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.options import AsJson, DryRun, Endpoint, IsOver, SavesRun, Step, Url
from hpcrun.cli.output import print_json, show_progress
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.specs.rundir import RunDir
from hpcrun.units import format_bytes

if TYPE_CHECKING:
    from hpcrun.checkpoint.verify import VerifyResult


def upload(
    run: SavesRun,
    step: Step = None,
    url: Url = None,
    endpoint: Endpoint = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it back afterwards.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to an object store.

    The checkpoint is verified first. An interrupted upload continues where it stopped. The copy exists once
    all of it is there. Exits with 1 if --verify finds damage.
    """
    from hpcrun.checkpoint.objects.catalogue import (
        generation_key_prefix,
        list_generation_copies,
        split_into_objects,
    )
    from hpcrun.checkpoint.objects.download import find_copy_damages
    from hpcrun.checkpoint.objects.run_store import open_run_store
    from hpcrun.checkpoint.objects.upload import upload_save
    from hpcrun.runs.checkpoint_access import choose_checkpoint, find_run_or_directory

    run_dir = find_run_or_directory(run, use="plan" if dry_run else "act")
    saved = choose_checkpoint(run_dir, step)
    label, size = f"step {saved.step}", sum(saved.file_bytes)
    with open_run_store(run_dir, url, endpoint) as store:
        prefix = generation_key_prefix(run_dir.run_id, saved.step, saved.generation)
        target = f"{store.url}/{prefix}".rstrip("/")
        report: dict[str, Any] = {"dry_run": dry_run, "step": saved.step, "generation": saved.generation}
        report |= {"url": target, "size_bytes": size}
        if dry_run:
            objects = sum(len(split_into_objects(file)) for file in saved.file_bytes)
            if as_json:
                print_json(**report, objects=objects)
            else:
                print(f"would copy {label} to {target}: {objects} objects, {format_bytes(size)}")
            return
        with show_progress(label, size) as show:
            sent = upload_save(store, run_dir.run_id, saved, show=show)
        report |= vars(sent) | {"verified": verify, "damages": []}
        if verify:
            copies, _ = list_generation_copies(store, run_dir.run_id)
            (copy,) = [copy for copy in copies if copy.url == target]
            with show_progress(f"reading back {label}", size) as show:
                report["damages"] = find_copy_damages(store, copy, show)
    if as_json:
        print_json(**report)
    else:
        _print_upload(report)
    if report["damages"]:
        raise typer.Exit(EXIT_CHECK_FAILED)


def download(
    run: SavesRun,
    step: Step = None,
    url: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Object store; default: the job's.")
    ] = None,
    endpoint: Endpoint = None,
    is_over: IsOver = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint from an object store to the run directory.

    `train --resume` finds it there. Every byte is verified before it counts; another checkpoint of the same
    step is set aside. By default the newest whole copy is fetched.
    """
    from hpcrun.checkpoint.objects.download import download_copy, find_whole_save
    from hpcrun.checkpoint.objects.run_store import choose_copy, open_run_store
    from hpcrun.runs.checkpoint_access import find_run_or_directory, require_finished

    run_dir = find_run_or_directory(run, use="plan" if dry_run else "act")
    require_finished(run_dir, "download", assume_over=is_over)
    with open_run_store(run_dir, url, endpoint) as store:
        copy = choose_copy(store, run_dir, step)
        label, size = f"step {copy.saved.step}", sum(copy.saved.file_bytes)
        saved = find_whole_save(copy, run_dir.checkpoints)
        is_fetched = saved is None and not dry_run
        if is_fetched:
            with show_progress(label, size) as show:
                saved = download_copy(store, copy, run_dir.checkpoints, show)
    path = saved.path if saved else run_dir.checkpoints / f"step-{copy.saved.step:08d}"
    if as_json:
        print_json(
            dry_run=dry_run,
            step=copy.saved.step,
            url=copy.url,
            generation=copy.saved.generation,
            size_bytes=size,
            fetched=is_fetched,
            path=str(path),
        )
    elif is_fetched:
        print(f"{label}: {format_bytes(size)} from {copy.url}, whole, in {path}")
    elif saved is not None:
        print(f"{label}: is whole in {path}; nothing to fetch")
    else:
        print(f"would fetch {label}, {format_bytes(size)}, from {copy.url} to {path}")


def verify_object_copies(
    run: RunDir, step: int | None, url: str | None, endpoint: str | None
) -> list[VerifyResult]:
    """Read the copies in a store back, newest first."""
    from hpcrun.checkpoint.objects.catalogue import list_generation_copies
    from hpcrun.checkpoint.objects.download import find_copy_damages
    from hpcrun.checkpoint.objects.run_store import open_run_store
    from hpcrun.checkpoint.verify import VerifyResult

    results: list[VerifyResult] = []
    with open_run_store(run, url, endpoint) as store:
        copies, broken = list_generation_copies(store, run.run_id)
        for copy in reversed([copy for copy in copies if step in (None, copy.saved.step)]):
            with show_progress(f"step {copy.saved.step}", sum(copy.saved.file_bytes)) as show:
                damages = find_copy_damages(store, copy, show)
            results.append(VerifyResult.of(copy.saved.step, copy.url, damages))
        if step is None:
            results += [VerifyResult.of(None, copy.url, [copy.problem]) for copy in broken]
        elif not results:
            steps = ", ".join(str(copy.saved.step) for copy in copies) or "none"
            raise UsageError(f"{store.url}: has no copy of step {step} of {run.id} (copies: {steps})")
    return results


def _print_upload(report: dict[str, Any]) -> None:
    kept = f", {report['kept_objects']} were there" if report["kept_objects"] else ""
    sent = f"{report['sent_objects']} objects sent ({format_bytes(report['sent_bytes'])}){kept}"
    print(f"step {report['step']}: {report['url']}: {sent}")
    if report["unproved_objects"]:
        remedy = "" if report["verified"] else "; --verify reads them back"
        print(f"the store has no checksum of {report['unproved_objects']} objects{remedy}")
    for damage in report["damages"]:
        print(f"  {damage}")
    if report["verified"] and not report["damages"]:
        print("read back: whole")
