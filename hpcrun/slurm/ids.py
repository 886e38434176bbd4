"""Job ids as Slurm writes them: of a job, an array or an element of it, a component, a step."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ID = re.compile(
    r"(?P<job>\d{1,10})(?:_(?P<element>\d{1,9}|\[(?P<listed>[^\]]*)(?P<closed>\])?)|\+(?P<offset>\d{1,6}))?"
    r"(?:\.(?:batch|extern|interactive|\d{1,10}(?:\+\d{1,6})?))?(?:[;@](?P<cluster>[\w.-]+))?",
    re.ASCII,
)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)


@dataclass(frozen=True)
class JobId:
    """One id: `123`, `123_4`, `123_[0-400:4%2]`, `18+0`, `123.batch`, `123;cluster`."""

    job: int
    elements: tuple[range, ...] = ()
    """The array elements that the id stands for; empty for a job that is no array, or a whole array."""
    truncated: bool = False
    """Slurm cut the list of elements short: there are more than `elements` holds."""
    offset: int | None = None
    """Which component of a heterogeneous job."""
    cluster: str = ""

    @property
    def element(self) -> int | None:
        """The one element that the id names; None for a job, or for several elements."""
        single = len(self.elements) == 1 and len(self.elements[0]) == 1 and not self.truncated
        return self.elements[0][0] if single else None

    def holds(self, element: int) -> bool | None:
        """Whether an element of the array is among those named; None when the cut list cannot say."""
        if any(element in listed for listed in self.elements):
            return True
        return None if self.truncated else False

    def __str__(self) -> str:
        if self.offset is not None:
            return f"{self.job}+{self.offset}"
        return str(self.job) if self.element is None else f"{self.job}_{self.element}"


def parse_job_id(text: str) -> JobId | None:
    """The id, or None where the text is none; a list of elements that Slurm cut short is marked so."""
    match = _ID.fullmatch(text.strip())
    if match is None:
        return None
    element, listed, offset = match["element"], match["listed"], match["offset"]
    elements: tuple[range, ...] = ()
    whole = True
    if listed is not None:
        closed = match["closed"] is not None
        # Without its end the list may stop within a number.
        elements, whole = parse_array_elements(listed if closed else listed.rpartition(",")[0])
        whole = whole and closed
    elif element is not None:
        elements = (range(int(element), int(element) + 1),)
    return JobId(
        job=int(match["job"]),
        elements=elements,
        truncated=not whole,
        offset=None if offset is None else int(offset),
        cluster=match["cluster"] or "",
    )


def parse_array_elements(text: str) -> tuple[tuple[range, ...], bool]:
    """Parse the element ranges of `0-400:4%2` or a cut `1,3,...`, and say whether the list is whole."""
    listed, _, limit = text.partition("%")
    elements, whole = [], re.fullmatch(r"[0-9]{0,9}", limit) is not None
    for item in filter(None, listed.split(",")):
        match = _RANGE.fullmatch(item)
        if match is None:
            whole = False
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        elements.append(range(first, last + 1, max(step, 1)))
    return tuple(elements), whole
