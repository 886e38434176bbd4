"""How much of what NCCL says the tables of `tune read` know; makes the table of its warnings anew.

    git clone https://github.com/NVIDIA/nccl
    python benchmarks/log_knowledge.py --nccl nccl            compares
    python benchmarks/log_knowledge.py --nccl nccl --write    makes hpcrun/tuning/log/nccl_messages.tsv anew
    --rccl DIR and --ofi DIR: the same for ROCm/rccl and aws/aws-ofi-nccl, which the patterns alone must know

Every WARN of every tagged release from 2.18 on is looked up, with samples in the place of its values. What
the table says of a message already stays as it is; a new message is classified by its file and words: read
those rows. Without a checkout only what is in tests/data/tuning is judged: the logs in healthy and the
environments of public repositories. With one, the lines that prove the errors of lint are looked up.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import harness

from hpcrun.specs.yaml import load_yaml
from hpcrun.tuning.lint.lint import lint_layers
from hpcrun.tuning.lint.script_exports import parse_script_exports
from hpcrun.tuning.log.diagnosis import diagnose_nccl_log, explain_log_line
from hpcrun.tuning.log.nccl_log import parse_nccl_log
from hpcrun.tuning.log.nccl_messages import (
    MESSAGE_TABLE,
    NcclMessage,
    clear_message_cache,
    find_nccl_message,
    load_nccl_messages,
    subsystem_of_source,
)

_FIRST = (2, 18)
_SOURCE = re.compile(r"\.(cc|cpp|h|hpp|cu|c|cuh|inl)$")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_PIECE = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(PRI\w+|[a-z]\w*|#\w+)(?=\s*"|\s*$))')
_VALUE = re.compile(r"%[-+ #0]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|h|ll|l|z|j|t)?[a-zA-Z]|\\n")
_TARGET = 150
_SHORT = 12
"""Letters that a fragment has at least."""
_HEALTHY = Path(__file__).parents[1] / "tests" / "data" / "tuning" / "healthy"
_THREADS = _HEALTHY.with_name("threads")
_ENVIRONMENTS = _HEALTHY.with_name("environments")
_PROVED_AT = "v2.30.7-1"
_SAMPLES = {
    "d": "7",
    "i": "7",
    "u": "7",
    "x": "7f",
    "p": "0x7f00",
    "s": "name",
    "c": "c",
    "f": "1.5",
    "m": "name",
}


@dataclass
class Template:
    """One text as it stands in the source."""

    text: str
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The releases of each file."""

    @property
    def sample(self) -> str:
        """How it may look in a log."""
        shown = _VALUE.sub(lambda m: " " if m[0] == "\\n" else _SAMPLES.get(m[0][-1], "name"), self.text)
        return shown.replace('\\"', '"').strip()

    @property
    def pieces(self) -> list[str]:
        """What stands between its values."""
        return [" ".join(piece.replace('\\"', '"').split()) for piece in _VALUE.split(self.text)]


def releases(repository: Path) -> list[str]:
    """The tags from 2.18 on, the oldest first."""
    tags = _git(repository, "tag").split()
    found = [tag for tag in tags if re.fullmatch(r"v2\.\d+\.\d+-1", tag) and _numbers(tag)[:2] >= _FIRST]
    return sorted(found, key=_numbers)


def templates(repository: Path, tag: str, macro: str = "WARN") -> Iterator[tuple[str, str]]:
    """Text and file of every WARN of one release."""
    tree = _git(repository, "ls-tree", "-r", "--name-only", tag, "src").split("\n")
    names = [name for name in tree if _SOURCE.search(name) and name != "src/include/debug.h"]
    asked = "".join(f"{tag}:{name}\n" for name in names).encode()
    data = subprocess.run(
        ["git", "-C", str(repository), "cat-file", "--batch"], input=asked, capture_output=True, check=True
    ).stdout
    at = 0
    for name in names:
        end = data.index(b"\n", at)
        size = int(data[at:end].split()[2])
        source = data[end + 1 : end + 1 + size].decode(errors="replace")
        at = end + size + 2
        for call in _calls(_COMMENT.sub("", source), macro):
            yield _template(call), name.removeprefix("src/")


def collect(repository: Path) -> dict[str, Template]:
    """All texts of all releases."""
    found: dict[str, Template] = {}
    for tag in releases(repository):
        for text, name in templates(repository, tag):
            told = found.setdefault(text, Template(text)).places[name]
            if tag not in told:
                told.append(tag)
    return found


def _calls(source: str, macro: str) -> Iterator[str]:
    for match in re.finditer(rf"\b{macro}\s*\(", source):
        depth, at, quoted = 1, match.end(), False
        while at < len(source) and depth:
            letter = source[at]
            if quoted and letter == "\\":
                at += 1
            elif letter == '"':
                quoted = not quoted
            elif not quoted:
                depth += (letter == "(") - (letter == ")")
            at += 1
        yield source[match.end() : at - 1].replace("\\\n", " ")


def _template(call: str) -> str:
    """The strings at the front; a macro's name between them stands for a value."""
    told, at = "", 0
    while match := _PIECE.match(call, at):
        told += "%s" if match[1] is None and not match[2].startswith("PRI") else match[1] or "d"
        at = match.end()
    return told


def shortest(all_texts: dict[str, Template]) -> dict[str, str]:
    """For each text the fewest words in one piece that no other text has; else its longest.

    A text that differs from another by a name alone is the same.
    """
    joined: dict[str, str] = {}
    for text, one in all_texts.items():
        joined[text] = re.sub(r"[\0: ]+", " ", "\0".join(piece for piece in one.pieces if piece)).strip()
    others = set(joined.values())
    found = {}
    for text, one in all_texts.items():
        runs = list(_runs([piece for piece in one.pieces if piece]))
        alone = (
            run for run in runs if sum(" ".join(run.replace(":", " ").split()) in o for o in others) == 1
        )
        found[text] = next(alone, None) or max(runs, key=len, default="")
    return found


def _runs(pieces: list[str]) -> Iterator[str]:
    """Words that stand together, three to seven of them; all of a piece that has fewer."""
    for count in range(3, 8):
        for piece in pieces:
            words = piece.split(" ")
            for start in range(len(words) - count + 1):
                if len(run := " ".join(words[start : start + count])) >= _SHORT:
                    yield run
    yield from (piece for piece in pieces if piece.count(" ") < 2 and len(piece) > 4)


def rows(all_texts: dict[str, Template]) -> list[str]:
    """The table's lines; messages with the same words are one."""
    old = (
        {(one.fragment, name): one for one in load_nccl_messages() for name in one.files}
        if MESSAGE_TABLE.exists()
        else {}
    )
    fragments = shortest(all_texts)
    merged: dict[str, list[Template]] = defaultdict(list)
    for text, one in all_texts.items():
        merged[fragments[text] or f"\0{min(one.places)}"].append(one)
    told = []
    for key, group in merged.items():
        fragment = "" if key.startswith("\0") else key
        files = sorted({name for one in group for name in one.places})
        tags = sorted({tag for one in group for where in one.places.values() for tag in where}, key=_numbers)
        before = next((old[fragment, name] for name in files if (fragment, name) in old), None)
        told.append("\t".join([fragment, ",".join(files), *_span(tags), *_classes(group, files, before)]))
    return sorted(told)


def _span(tags: list[str]) -> tuple[str, str]:
    return tags[0][1:].partition("-")[0], tags[-1][1:].partition("-")[0]


def _classes(
    group: list[Template], files: list[str], before: NcclMessage | None
) -> tuple[str, str, str, str]:
    if before is not None:
        return before.subsystem, before.whose, before.role, before.meaning
    sample = group[0].sample
    found = explain_log_line(sample, files[0]) if sample else None
    subsystem = _subsystem(files[0], sample)
    level = found.level if found else ""
    role = level if level in ("follows", "harmless") else "cause"
    name = found.id if found else ""
    return subsystem, _OWNERS.get(name) or _whose(sample, subsystem), role, name


def _subsystem(name: str, sample: str) -> str:
    for pattern, subsystem in _BY_WORDS:
        if re.search(pattern, sample):
            return subsystem
    return next((subsystem for pattern, subsystem in _BY_FILE if re.search(pattern, name)), "internal")


def _whose(sample: str, subsystem: str) -> str:
    if re.search(
        r"NCCL_[A-Z]|[Ii]nvali[dg]|ncclGroup|NULL|pointer|requested|compiled with|ncclComm\w+:", sample
    ):
        return "ours" if subsystem not in ("proxy", "socket", "ib", "internal") else "theirs"
    if subsystem in ("argument", "environment"):
        return "ours"
    if re.search(
        r"fail|[Uu]nable|refused|not supported|no .*found|[Cc]ould not open|closed|error|async", sample
    ):
        return "system"
    return "system" if subsystem in ("cuda", "shm") else "theirs"


_OWNERS = {
    name: whose
    for whose, names in {
        "ours": "ib-merge ib-ooo ib-planes ib-subnet bootstrap-ranks comm-id no-interface network-not-found"
        " topology-file no-transport plugin-version truncated net-mismatch mem-suspend symmetric registration"
        " rma setting-clipped sock-threads collnet-off nvls-shared-gpu too-old version-mismatch",
        "theirs": "plugin-internal sock-args proxy-internal proxy-failed ib-requests setting-duplicate ras",
        "system": "status-other gid-changed stranger ib-device no-route topology accept refused peer-gone"
        " cuda-other os-socket p2p-off thread smem port-event qp-event ib-failover gid-type ibv-call gdrcopy"
        " uds imex nvml shm-full ib-fatal-follows verbs-library cuda-library nvls-bind multimem",
    }.items()
    for name in names.split()
}
_BY_WORDS = (
    (r"^(Cuda|HIP) failure|CUDA (m|c)alloc|[Dd]river", "cuda"),
    (
        r"NCCL_(ALGO|PROTO|SOCKET_N|NSOCKS|WORK_FIFO|CGA)|CTAs .*larger|User asked for|ignored|Limit|cap it",
        "environment",
    ),
)
_BY_FILE = (
    (r"bootstrap", "bootstrap"),
    (r"net_ib|ibv|mlx5dv|gdaki|gdrwrap", "ib"),
    (r"ipcsocket|transport/p2p|socket_pair", "p2p"),
    (r"socket|os/", "socket"),
    (r"nvls|mnnvl|multimem", "nvls"),
    (r"shm", "shm"),
    (r"^graph/tuning|param", "environment"),
    (r"^graph/", "topology"),
    (r"cudawrap|nvml|strongstream|checks\.h|alloc", "cuda"),
    (r"proxy|transport/(net|generic)", "proxy"),
    (r"plugin|^net\.cc|coll_net|tuner|profiler", "plugin"),
    (r"^ras", "ras"),
    (r"register|dev_runtime|symmetric|^gin|^rma|mem_manager|devcomm|ce_coll", "registration"),
    (r"argcheck|group|enqueue|init\.cc|init_nvtx|collectives", "argument"),
)


def _placed(one: Template, name: str) -> bool:
    """Whether a line of this text, from this file, is placed."""
    return find_nccl_message(one.sample, name) is not None or (
        not any(one.pieces) and subsystem_of_source(name) is not None
    )


def _judge_releases(report: harness.Report, repository: Path, all_texts: dict[str, Template]) -> None:
    worst = 1.0
    for tag in releases(repository):
        here = [(one, name) for one in all_texts.values() for name in one.places if tag in one.places[name]]
        texts = {one.text for one, _ in here}
        placed = {one.text for one, name in here if _placed(one, name)}
        alone = {one.text for one, _ in here if find_nccl_message(one.sample, "")}
        explained = {one.text for one, name in here if explain_log_line(one.sample, name)}
        worst = min(worst, len(placed) / len(texts))
        report.row(
            release=tag[1:-2],
            texts=len(texts),
            placed=len(placed),
            without_file=len(alone),
            explained=len(explained),
        )
    report.claim(
        "share of NCCL's WARN texts placed, the worst release from 2.18 on", worst, "1.0", worst == 1
    )
    count = sum(any(explain_log_line(one.sample, name) for name in one.places) for one in all_texts.values())
    report.claim(
        f"WARN texts explained with a remedy, of {len(all_texts)}", count, f"{_TARGET}", count >= _TARGET
    )
    changed = set(rows(all_texts)) ^ {
        row for row in MESSAGE_TABLE.read_text().splitlines() if not row.startswith("#")
    }
    report.claim("rows of the table that the source has otherwise", len(changed), "0", not changed)


def _judge_healthy(report: harness.Report) -> None:
    logs = sorted(_HEALTHY.rglob("*.log"))
    seen = set()
    alarms = 0
    for path in logs:
        log = parse_nccl_log(path.read_text(encoding="utf-8"))
        seen.add(log.release)
        loud = [one for one in diagnose_nccl_log(log).found if one.meaning.level != "harmless"]
        alarms += len(loud)
        for one in loud:
            print(f"# alarm in {path.name}, line {one.line}: {one.meaning.id}: {one.text}")
    what = f"false alarms on {len(logs)} healthy logs of {len(seen)} releases"
    report.claim(what, alarms, "0", not alarms and len(seen) >= 8)


def _threads(name: str) -> Iterator[tuple[str, str, list[str], str]]:
    """Thread, release, what is right to say, and text of each log of a file."""
    for part in re.split(r"(?m)^@ ", (_THREADS / f"{name}.txt").read_text(encoding="utf-8"))[1:]:
        head, _, text = part.partition("\n")
        thread, release, right = [cell.strip() for cell in f"{head}||".split("|")[:3]]
        yield thread, release, right.split(), text


def _judge_threads(report: harness.Report) -> None:
    """Logs of public threads; half of them were kept out of the rules' making."""
    for kept in ("made", "kept"):
        alarms, releases_seen, count = 0, set(), 0
        for thread, release, right, text in _threads(f"healthy-{kept}"):
            found = diagnose_nccl_log(parse_nccl_log(text)).found
            loud = [one for one in found if one.meaning.level != "harmless"]
            wrong = [one for one in loud if f"{one.meaning.id}:{one.meaning.level}" not in right]
            alarms += len(wrong)
            releases_seen.add(".".join(release.strip("~").split(".")[:2]))
            count += 1
            for one in wrong:
                print(f"# alarm in {thread}, line {one.line}: {one.meaning.id}: {one.text}")
        what = (
            f"false alarms on {count} healthy logs of public threads ({kept}), {len(releases_seen)} releases"
        )
        report.claim(what, alarms, "0", not alarms and len(releases_seen) >= 8)
        missed, count = 0, 0
        for thread, _, right, text in _threads(f"failing-{kept}"):
            told = [
                f"{one.meaning.id}:{one.meaning.level}"
                for one in diagnose_nccl_log(parse_nccl_log(text)).found
            ]
            wanted = [word for word in right if not word.startswith("!")]
            never = [word for word in right if word.startswith("!")]
            is_right = told[:1] == wanted[:1] and set(wanted) <= set(told)
            is_right = is_right and not any(word.startswith(f"{no[1:]}:") for no in never for word in told)
            missed += not is_right
            count += 1
            if not is_right:
                print(f"# misread: {thread}: {' '.join(told)}, not {' '.join(right)}")
        report.claim(f"failing logs of public threads misread, of {count} ({kept})", missed, "0", not missed)


def _judge_kin(report: harness.Report, repository: Path, macro: str, mark: str, whose: str) -> None:
    """RCCL and the plugin for libfabric: is each of their warnings told by more than whose it is?"""
    tags = [tag for tag in _git(repository, "tag").split() if re.match(r"(rocm-[67]|v1\.(?![0-6]\b))", tag)]
    found: dict[str, str] = {}
    for tag in [*tags, "HEAD"]:
        found |= dict(templates(repository, tag, macro))
    vague = []
    for text, name in sorted(found.items()):
        sample = f"{mark}{Template(text).sample}"
        meaning = explain_log_line(sample, name)
        known = meaning is not None and meaning.id != "ofi-other"
        if any(Template(text).pieces) and not known and find_nccl_message(sample, name) is None:
            vague.append(f"{name}: {sample}")
    for line in vague:
        print(f"# {line}")
    what = f"warnings of {whose} without an entry of their kind, of {len(found)} in {len(tags)} releases"
    most = len(found) // 50
    report.claim(what, len(vague), f"{most}", bool(found) and len(vague) <= most)


def _judge_environments(report: harness.Report) -> None:
    """What is said of a public environment and not proved in sources.yaml is a false alarm."""
    blocks = load_yaml(_ENVIRONMENTS / "sources.yaml").values
    alarms = errors = 0
    for name, block in blocks.items():
        layer = parse_script_exports((_ENVIRONMENTS / f"{name}.sh").read_text(encoding="utf-8"), name)
        for one in lint_layers([layer], None).findings:
            right = block["right"].get(one.subject)
            is_proved = right is not None and right["proof"] and right["level"] == one.severity
            errors += one.severity == "error"
            if one.severity != "note" and not is_proved:
                alarms += 1
                print(f"# alarm: {one}")
    repositories = len({block["repository"] for block in blocks.values()})
    what = f"false alarms on {len(blocks)} public environment blocks of {repositories} repositories"
    report.claim(what, alarms, "0", not alarms and repositories >= 10)
    report.claim("errors on them without a line of source or documentation", errors, "0", not errors)


def _judge_proofs(report: harness.Report, repository: Path) -> None:
    """Whether what proves each error of lint's stands where it is said to stand."""
    rows = [row for row in load_yaml(_ENVIRONMENTS / "errors.yaml").values["errors"] if row.get("place")]
    missing = 0
    for row in rows:
        line = int(row["proof"].partition(" ")[0].rpartition(":")[2])
        text = _git(repository, "show", f"{_PROVED_AT}:{row['place']}").split("\n")
        if row["holds"] not in text[line - 1]:
            missing += 1
            print(f"# {row['place']}:{line} at {_PROVED_AT} does not hold {row['holds']!r}")
    what = f"lint's errors whose line in NCCL's source is not there, of {len(rows)}"
    report.claim(what, missing, "0", not missing)


def _numbers(tag: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", tag))


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *words], capture_output=True, text=True, check=True
    ).stdout


def main() -> int:
    """Print a row a release, and one line a claim."""
    parser = harness.options(__doc__)
    parser.add_argument("--nccl", type=Path, metavar="DIR", help="a git checkout of NCCL with its tags")
    parser.add_argument("--rccl", type=Path, metavar="DIR", help="the same of ROCm/rccl")
    parser.add_argument("--ofi", type=Path, metavar="DIR", help="the same of aws/aws-ofi-nccl")
    parser.add_argument("--write", action="store_true", help="make the table anew")
    arguments = parser.parse_args()
    report = harness.Report("log_knowledge")
    report.header()
    if arguments.nccl is not None:
        try:
            all_texts = collect(arguments.nccl)
        except (OSError, subprocess.CalledProcessError) as error:
            return harness.fail(f"--nccl {arguments.nccl}: {error}")
        if not all_texts:
            return harness.fail(f"--nccl {arguments.nccl}: has no tag from v2.18 on; git fetch --tags")
        if arguments.write:
            head = "# fragment\tfiles\tfirst\tlast\tsubsystem\twhose\trole\tmeaning\n"
            MESSAGE_TABLE.write_text(head + "".join(f"{row}\n" for row in rows(all_texts)), encoding="utf-8")
            clear_message_cache()
        _judge_releases(report, arguments.nccl, all_texts)
        _judge_proofs(report, arguments.nccl)
    kin = (
        (arguments.rccl, "WARN", "", "RCCL"),
        (arguments.ofi, "NCCL_OFI_WARN", "NET/OFI ", "aws-ofi-nccl"),
    )
    for repository, macro, mark, whose in kin:
        if repository is not None:
            try:
                _judge_kin(report, repository, macro, mark, whose)
            except (OSError, subprocess.CalledProcessError) as error:
                return harness.fail(f"{repository}: {error}")
    _judge_healthy(report)
    _judge_threads(report)
    _judge_environments(report)
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
