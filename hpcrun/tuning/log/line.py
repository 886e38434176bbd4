"""What stands before a line of a log: tags of launchers, times, containers' marks and colours.

One function for every reader. What can only be a prefix is taken off wherever it stands; a word that could as
well belong to the message is taken off only where something follows that a reader looks for.
"""

from __future__ import annotations

import re

_COLOUR = re.compile(
    r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0e-\x1f]"
)
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AP]M)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_DATE = rf"\d{{4}}[-/]\d\d[-/]\d\d(?:[T ]{_TIME}{_ZONE})?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = (
    rf"(?:{_DATE}|\d\d[-/.]\d\d[-/.]\d{{4}} {_TIME}"
    rf"|(?:[A-Z][a-z]{{2}},? )?{_MONTH} +\d{{1,2}},? {_TIME}(?: \d{{4}})?"
    rf"|\d{{1,2}}:\d\d:\d\d(?:[.,]\d+)?|\d{{10}}\.\d+)"
)
_CERTAIN = re.compile(
    r"\s*(?:"
    rf"\[{_CLOCK}\]:?|{_CLOCK}(?=[\s\[<:|,-])[:|,-]?"
    r"|\[\s*\d+\.\d+\]"  # the kernel's clock
    r"|\[[^\]\s]+\](?:<std\w+>)?:|<std\w+>:"  # torchrun --tee, mpirun --tag-output, torch's [rank0]:
    r"|\d{1,6}:(?= )"  # srun -l
    r"|\[[^\]\s]+\](?:<std\w+>|\[std\w+\])"
    r"|\[(?:pod|container)/[^\]]*\]"
    r"|\([^()]*\b(?:pid|ip|rank)=[^()]*\)"  # Ray and what stands on it
    r"|(?:stdout|stderr) [FP](?= )"  # Kubernetes' files
    r"|<\d{1,3}>(?:1 )?(?=\S)"  # syslog's priority
    r"|[\w.-]+ [\w./@-]+\[\d+\]:(?=\s)"  # host program[pid]:
    r"|\[?(?:INFO|WARNING|WARN|ERROR|DEBUG|STDOUT|STDERR)\]?[:|]?(?=\s+\S+:\d+:\d+ \[)"
    r")\s*"
)
_PERHAPS = re.compile(
    r"\s*(?:"
    r"\[[\w.,:@/ -]+\]"  # mpiexec -prepend-rank, pssh
    r"|\d+:(?=[^\d:])"  # srun -l
    r"|[A-Za-z][\w.@/-]*(?:[\[(]\d+[\])])?:(?=\s|#|[RN]CCL\b|Last error:|\w[\w.-]*:\d+:\d+ )"  # pdsh, clush
    r"|[A-Za-z][\w.@/-]*\s+\|(?=\s)"  # docker compose
    r"|(?:stdout|stderr)[:|]?(?=\s)"
    r"|[A-Za-z][\w.-]*(?=\s+(?:#|[RN]CCL version\b|\w[\w.-]*:\d+:\d+ \[))"
    r")"
)
_WANTED = re.compile(
    r"\s*(?:#|[RN]CCL (?:version|INFO|WARN|TRACE|ERROR)\b|[A-Za-z0-9][\w.-]*:\d+:\d+ |\d+\s+\d+\s+[a-z]\w+\s"
    r"|Last error:|nccl\w+Error:|torch\.|Traceback|RuntimeError:|NET/OFI|what\(\)|Rank\s+\d+\s)"
)


def split_log_prefix(raw: str) -> tuple[str, str]:
    """What stands before the message, without colours, and the message."""
    line = _COLOUR.sub("", raw)
    start = 0
    while True:
        if match := _CERTAIN.match(line, start):
            start = match.end()
            continue
        match = _PERHAPS.match(line, start)
        if match is None or not _is_wanted(line, match.end()):
            break
        start = match.end()
    message = line[start:].lstrip() if start else line
    return line[: len(line) - len(message)], message


def strip_log_prefix(raw: str) -> str:
    """The message of a line of a log, without the prefixes of launchers."""
    return split_log_prefix(raw)[1]


def _is_wanted(line: str, start: int) -> bool:
    """Whether a reader looks for what stands there, perhaps behind more prefixes."""
    for _ in range(4):
        if _WANTED.match(line, start):
            return True
        match = _CERTAIN.match(line, start) or _PERHAPS.match(line, start)
        if match is None:
            return False
        start = match.end()
    return False
