"""DataSpec: the `data` section of a job: which text or tokens to train on, and how they are cut."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpcrun.specs.fields import SpecSection

PYTHON_STDLIB = "python-stdlib"
"""Stands for the standard library's own sources, as a corpus that every machine has."""


class DataSpec(SpecSection):
    """What to train on: text taken byte by byte, or a file of tokens made by `hpcrun data prepare`."""

    text: str | None = Field(
        default=None,
        min_length=1,
        description="text file or directory, one token per byte; python-stdlib: Python's own sources",
    )
    tokens: str | None = Field(
        default=None, min_length=1, description="token file (FILE.bin) made by `hpcrun data prepare`"
    )
    pattern: str = Field(
        default="*",
        min_length=1,
        description="which files of a text directory: *.txt at any depth, books/*.txt in that directory",
    )
    seq_len: int = Field(default=256, gt=0, description="tokens per training sequence")
    holdout: float = Field(
        default=0.02, ge=0, lt=1, description="fraction of sequences held out for evaluation; 0: none"
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        default=None, description="token type of a file without FILE.bin.json next to it"
    )
    shuffle: bool = Field(default=True, description="new random order every epoch; false: in stored order")

    @model_validator(mode="after")
    def _one_source(self) -> DataSpec:
        if (self.text is None) == (self.tokens is None):
            given = "neither" if self.text is None else "both"
            raise ValueError(f"give exactly one of text and tokens, found {given}")
        if self.text is not None and self.dtype is not None:
            raise ValueError("dtype is for token files, text is read byte by byte; remove dtype")
        if self.tokens is not None and self.pattern != "*":
            raise ValueError("pattern is for text directories, tokens names one file; remove pattern")
        return self
