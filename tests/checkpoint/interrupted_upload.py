"""Uploads a save, as a process that can be killed: `interrupted_upload.py URL ENDPOINT CHECKPOINTS`."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcrun.checkpoint.objects.open_store import open_object_store
from hpcrun.checkpoint.objects.upload import upload_save
from hpcrun.specs.saves import resumable_checkpoints

if __name__ == "__main__":
    url, endpoint, checkpoints = sys.argv[1:]
    with open_object_store(url, endpoint) as opened:
        upload_save(opened, "run-1", resumable_checkpoints(Path(checkpoints))[-1], least=4096)
