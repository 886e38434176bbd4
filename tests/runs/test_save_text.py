"""What people read of saves: what is safe, what failed, how far the last one is; not every copy in memory."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrun.runs.save_text import describe_save, is_durable_save


@pytest.mark.parametrize(
    ("line", "text", "kept"),
    [
        ({"kind": "save", "seconds": 1.25}, "step 7: saved in 1.2 s", True),
        ({"kind": "save", "seconds": 0.01, "level": "memory"}, "", False),
        (
            {"kind": "stored", "level": "durable", "lag_s": 2.04},
            "step 7: saved after 2.0 s beside training",
            True,
        ),
        ({"kind": "stored", "level": "local", "lag_s": 2.0}, "", False),
        (
            {"kind": "stored", "level": "object", "lag_s": 9.0},
            "step 7: saved (object) after 9.0 s beside training",
            False,
        ),
        (
            {"kind": "save_failed", "level": "durable", "why": "disk full"},
            "step 7: was not saved (durable): disk full",
            False,
        ),
        (
            {"kind": "save_skipped", "why": "busy"},
            "step 7: is not saved, the save before is still being stored (busy)",
            False,
        ),
        (
            {"kind": "flush", "levels": ["durable"], "size_bytes": 4e9, "done_bytes": 1e9, "seconds": 3.0},
            "step 7: 953.7 MiB of 3.725 GiB written (25%), to durable after 3.0 s",
            False,
        ),
        (
            {"kind": "flush", "levels": ["object"], "size_bytes": 4e9},
            "step 7: 3.725 GiB on their way to object",
            False,
        ),
        (
            {"kind": "flush", "levels": None, "size_bytes": "x", "seconds": None},
            "step 7: on its way to ",
            False,
        ),
        ({"kind": "step"}, "", False),
    ],
)
def test_lines_of_saves(line: dict[str, Any], text: str, kept: bool) -> None:
    assert describe_save({"step": 7, **line}) == text
    assert is_durable_save(line) is kept
