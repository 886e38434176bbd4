"""What PyTorch passes on of NCCL's errors: the text behind `Last error:`, and its own words for a failure."""

from __future__ import annotations

import re
from typing import NamedTuple

_LAST = re.compile(r"Last error:\s*(?P<text>.*)$")
_END = re.compile(r"\s*(?:$|Exception raised from|Traceback|frame #|File \"|\^)")
_GOES_ON = re.compile(r"\s*(?:This|If|Please|Set|Try|Check) [a-z]")
"""Beginnings of the second line of NCCL's texts."""
_OWN = re.compile(
    r"DistBackendError|NCCL [Ee]rror(?: in| \d+)?:"
    r"|(?:^|\s)nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage|InvalidArgument)\w*: "
    r"|Watchdog caught collective operation timeout|[Ww]atchdog thread terminated with exception"
    r"|NCCL operations have failed or timed out|[Hh]eartbeat monitor timed out|is likely stuck.*[Ww]atchdog"
    r"|\(either an error or timeout\) detected by watchdog|should dump\W* flag|flight recorder dump signal"
    r"|ncclCommWatchdog|Timed out waiting \d+ms for (?:send|recv)|DistStoreError|DistNetworkError"
    r"|entire process down|Timed out initializing process group|monitoredBarrier.*(?:timed out|failed)"
)


class TorchErrorText(NamedTuple):
    """One text, and where its first line stands."""

    text: str
    number: int
    own: bool
    """Whether it is PyTorch's word, and not NCCL's."""


class TorchErrorReader:
    """Reads line by line; several ranks may write at once, each behind its own prefix."""

    def __init__(self) -> None:
        self.found: list[TorchErrorText] = []
        self._open: dict[str, tuple[int | None, str]] = {}

    def read(self, prefix: str, text: str, number: int) -> bool:
        """Read a line that NCCL did not print; return whether it reports an error of NCCL's all the same."""
        rank = _rank(prefix)
        if rank not in self._open:
            # A word that may be a prefix is one if it stood before the line above.
            for other, (_, before) in self._open.items():
                if before and (prefix + text).startswith(before):
                    rank, text = other, (prefix + text)[len(before) :]
                    break
        if match := _LAST.search(text):
            self._open[rank] = None, prefix
            text = match["text"]
            if not text.strip():
                return True
        if rank in self._open:
            at, before = self._open.pop(rank)
            if at is None and not _END.match(text):
                self._open[rank] = len(self.found), before
                self.found.append(TorchErrorText(text.strip(), number, own=False))
                return True
            if at is not None and _GOES_ON.match(text):
                self._open[rank] = at, before
                self.found[at] = self.found[at]._replace(text=f"{self.found[at].text} {text.strip()}")
                return True
        if _OWN.search(text):
            self.found.append(TorchErrorText(text.strip(), number, own=True))
            return True
        return False

    def interrupt(self, prefix: str) -> None:
        """End the text that is open: NCCL itself prints a line."""
        self._open.pop(_rank(prefix), None)


def _rank(prefix: str) -> str:
    """What tells the writers apart: the prefix without its times."""
    return re.sub(r"\d+[:.,]\d+\S*|\d{4}-\d\d-\d\d", "", prefix).strip()
