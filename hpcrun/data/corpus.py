"""What a job would train on, found without loading it: files, tokens, sequences, the split.

Text is taken byte by byte: the corpus is every file's bytes, each file followed by a 0 byte, so the
vocabulary is 256. A token file is flat little-endian uint16 or uint32, with a sidecar FILE.bin.json. Sequence
i is tokens[i*S : i*S+S+1]; its first S are the inputs, its last S the targets.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import os
import stat
import sysconfig
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from sys import byteorder
from typing import TYPE_CHECKING, Any, Literal

from hpcrun.errors import UsageError
from hpcrun.local_identity import expand_path
from hpcrun.specs.data import PYTHON_STDLIB
from hpcrun.typed_json import WrongValue, parse_typed
from hpcrun.units import format_bytes

if TYPE_CHECKING:
    from hpcrun.specs.data import DataSpec

TOKEN_FORMAT_VERSION = 1
BYTE_VOCAB = 256
TokenDtype = Literal["uint16", "uint32"]
TOKEN_ITEM_SIZE = {"uint8": 1, "uint16": 2, "uint32": 4}
TEXT_LIMIT_BYTES = 4 << 30
"""Text above this is refused: every rank would hold it in memory, every submit would read it."""

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_BLOCK = 1 << 20
_MOST_BLOCKS, _SMALLEST_BLOCK = 64, 8


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus: its path below the corpus's root, and its size."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class HoldoutSplit:
    """Which sequences train and which are held out; depends only on their number and the share.

    The held-out sequences are in equal blocks, evenly spread over the corpus, a block in the middle of every
    period of `between` training sequences. Neighbouring sequences share one token (the last target of one is
    the first input of the next), so the sequences before and after a block are not used.
    """

    sequences: int
    blocks: int
    block: int
    between: int

    @classmethod
    def of(cls, sequences: int, holdout: float) -> HoldoutSplit:
        """Hold out `holdout` of the sequences (at least one unless 0), in at most 64 blocks."""
        if holdout == 0:
            return cls(sequences, 0, 0, sequences)
        target = max(1, round(sequences * holdout))
        blocks = max(1, min(_MOST_BLOCKS, target // _SMALLEST_BLOCK, (sequences - target) // 4))
        block = target // blocks
        return cls(sequences, blocks, block, sequences // blocks - block - 2)

    @property
    def eval_sequences(self) -> int:
        """How many sequences are held out."""
        return self.blocks * self.block

    @property
    def train_sequences(self) -> int:
        """How many sequences are trained on; below one when the share is too large."""
        return self.sequences - self.blocks * (self.block + 2) if self.blocks else self.sequences

    def train(self, index: int) -> int:
        """The sequence that is training sequence `index`, counted from 0 in the order of the corpus."""
        passed = min((index + self.between // 2) // self.between, self.blocks)
        return index + passed * (self.block + 2)

    def held_out(self, index: int) -> int:
        """The sequence that is held-out sequence `index`, counted from 0 in the order of the corpus."""
        block, within = divmod(index, self.block)
        return block * (self.between + self.block + 2) + self.between - self.between // 2 + 1 + within


@dataclass(frozen=True)
class Corpus:
    """What there is to train on. `vocab`, `documents` and `tokenizer` are None if they are not recorded."""

    kind: Literal["text", "tokens"]
    root: Path
    files: tuple[CorpusFile, ...]
    dtype: str
    tokens: int
    vocab: int | None
    documents: int | None
    tokenizer: str | None
    seq_len: int
    split: HoldoutSplit
    skipped: tuple[tuple[str, str], ...]
    fingerprint: str

    @property
    def sequences(self) -> int:
        """How many whole sequences there are."""
        return self.split.sequences

    @property
    def train_sequences(self) -> int:
        """How many sequences are trained on."""
        return self.split.train_sequences

    @property
    def eval_sequences(self) -> int:
        """How many sequences are held out."""
        return self.split.eval_sequences

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)

    def facts(self) -> dict[str, Any]:
        """What a person or program wants to know of it, by name."""
        names = (
            *("kind", "files", "size_bytes", "documents", "tokens", "dtype", "vocab", "tokenizer"),
            *("seq_len", "sequences", "train_sequences", "eval_sequences", "fingerprint"),
        )
        return {name: getattr(self, name) for name in names} | {"files": len(self.files)}

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where every file begins in the corpus, in tokens."""
        starts, begin = [], 0
        for file in self.files:
            starts.append(begin)
            begin += file.size_bytes + 1
        return tuple(starts)

    def locate(self, position: int) -> tuple[Path, int]:
        """Return the file that holds a token of the corpus, and its position in the file, in tokens."""
        index = bisect_right(self.starts, position) - 1
        return self.root / self.files[index].path, position - self.starts[index]

    def read(self, begin: int, count: int) -> list[int]:
        """Read a few tokens, to show them."""
        item, tokens = (
            TOKEN_ITEM_SIZE[self.dtype],
            array({"uint8": "B", "uint16": "H", "uint32": "I"}[self.dtype]),
        )
        while len(tokens) < count:
            path, offset = self.locate(begin + len(tokens))
            try:
                with path.open("rb") as file:
                    file.seek(offset * item)
                    block = file.read((count - len(tokens)) * item)
            except OSError as error:
                raise _unreadable_error(path, error) from None
            tokens.frombytes(block[: len(block) // item * item])
            if len(tokens) < count:
                if self.kind == "tokens":
                    raise UsageError(
                        f"{path}: ends before token {begin + count}; it changed while it was read"
                    )
                tokens.append(0)
        if byteorder == "big":
            tokens.byteswap()
        return tokens.tolist()


@dataclass(frozen=True)
class _SidecarHeader:
    format_version: int


@dataclass(frozen=True)
class TokenSidecar:
    """The contents of FILE.bin.json, which describes a token file; None for what a hand-written one leaves
    out."""

    dtype: TokenDtype
    tokens: int
    vocab: int
    tokenizer: str | None = None
    documents: int | None = None
    separator: int | None = None
    sha256: str | None = None

    def render(self) -> str:
        """The JSON text of the sidecar."""
        return json.dumps({"format_version": TOKEN_FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"


def token_sidecar_path(tokens: Path) -> Path:
    """Return the path of a token file's sidecar."""
    return Path(f"{tokens}.json")


def is_token_file(path: Path) -> bool:
    """Whether a path that may be text or tokens is a token file: by its sidecar or the suffix .bin."""
    return path.suffix == ".bin" or token_sidecar_path(path).is_file()


def load_token_sidecar(tokens: Path) -> TokenSidecar | None:
    """The sidecar of a token file, or None where there is none; UsageError for one that cannot be used."""
    path = token_sidecar_path(tokens)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable_error(path, error) from None
    except ValueError as error:
        raise UsageError(
            f"{path}: is not JSON ({error}); write it again with `hpcrun data prepare`"
        ) from None
    try:
        header = parse_typed(_SidecarHeader, content, allow_extra=True)
        if header.format_version > TOKEN_FORMAT_VERSION:
            raise UsageError(
                f"{path}: format_version {header.format_version} was written by a newer hpcrun, this one"
                f" reads up to {TOKEN_FORMAT_VERSION}; upgrade hpcrun"
            )
        sidecar = parse_typed(TokenSidecar, content, allow_extra=True)
    except WrongValue as error:
        raise UsageError(
            f"{path}: {error}; correct it, or write it again with `hpcrun data prepare`"
        ) from None
    most = 1 << (8 * TOKEN_ITEM_SIZE[sidecar.dtype])
    if not 0 < sidecar.vocab <= most:
        raise UsageError(f"{path}: vocab is {sidecar.vocab}; {sidecar.dtype} allows 1 to {most}")
    return sidecar


def inspect_corpus(data: DataSpec) -> Corpus:
    """Inspect a job's data; UsageError, in one line, if it cannot be trained on."""
    if data.tokens is not None:
        return _inspect_tokens(data, Path(expand_path(data.tokens)))
    assert data.text is not None
    return _inspect_text(data, data.text)


def _inspect_tokens(data: DataSpec, path: Path) -> Corpus:
    size = _regular_file_size(path)
    sidecar = load_token_sidecar(path)
    if sidecar is None and data.dtype is None:
        name = token_sidecar_path(path).name
        raise UsageError(f"{path}: no {name} next to it; set dtype: uint16 or uint32")
    if sidecar and data.dtype not in (None, sidecar.dtype):
        raise UsageError(
            f"{path}: dtype {data.dtype} was asked for, its sidecar says {sidecar.dtype}; remove dtype"
        )
    dtype = sidecar.dtype if sidecar else str(data.dtype)
    tokens, rest = divmod(size, TOKEN_ITEM_SIZE[dtype])
    if rest or (sidecar and tokens != sidecar.tokens):
        expected = (
            f"its sidecar says {sidecar.tokens} tokens" if sidecar else "that is not a whole number of tokens"
        )
        raise UsageError(
            f"{path}: {size} bytes of {dtype}, but {expected}; the file is truncated or not of that "
            "type, copy or prepare it again"
        )
    files = (CorpusFile(path.name, size),)
    digest = sidecar.sha256 if sidecar and sidecar.sha256 else ""
    return Corpus(
        kind="tokens",
        root=path.parent,
        files=files,
        dtype=dtype,
        tokens=tokens,
        vocab=sidecar.vocab if sidecar else None,
        documents=sidecar.documents if sidecar else None,
        tokenizer=sidecar.tokenizer if sidecar else None,
        seq_len=data.seq_len,
        split=_split_corpus(str(path), tokens, data),
        skipped=(),
        fingerprint=_fingerprint(f"tokens {dtype} {digest}", files),
    )


def _inspect_text(data: DataSpec, text: str) -> Corpus:
    root, listed = list_text_files(text, data.pattern)
    size = sum(file.size_bytes for file in listed)
    if size > TEXT_LIMIT_BYTES:
        raise UsageError(
            f"{text}: {format_bytes(size)} of text, more than the {format_bytes(TEXT_LIMIT_BYTES)} that are "
            f"read into memory; run `hpcrun data prepare {text} --out FILE.bin` once and use tokens: FILE.bin"
        )
    files, skipped = [], []
    for file in listed:
        reason = why_not_text(root / file.path)
        if reason:
            skipped.append((file.path, reason))
        else:
            files.append(file)
    if not files:
        raise UsageError(all_skipped_message(text, skipped))
    tokens = sum(file.size_bytes + 1 for file in files)
    return Corpus(
        kind="text",
        root=root,
        files=tuple(files),
        dtype="uint8",
        tokens=tokens,
        vocab=BYTE_VOCAB,
        documents=len(files),
        tokenizer="bytes",
        seq_len=data.seq_len,
        split=_split_corpus(text, tokens, data),
        skipped=tuple(skipped),
        fingerprint=_fingerprint("text uint8", files),
    )


def _split_corpus(name: str, tokens: int, data: DataSpec) -> HoldoutSplit:
    sequences = (tokens - 1) // data.seq_len
    if sequences < 1:
        raise UsageError(
            f"{name}: {tokens} tokens, a sequence of seq_len {data.seq_len} takes {data.seq_len + 1}; "
            "use more data or a smaller seq_len"
        )
    split = HoldoutSplit.of(sequences, data.holdout)
    if split.train_sequences < 1:
        raise UsageError(
            f"{name}: holdout {data.holdout:g} of {sequences} sequences leaves none to train on (the "
            "neighbours of held-out ones are dropped); use more data, a smaller seq_len or holdout: 0"
        )
    return split


def _fingerprint(kind: str, files: Sequence[CorpusFile]) -> str:
    digest = hashlib.sha256(kind.encode())
    for file in files:
        digest.update(b"\0" + os.fsencode(file.path) + b"\0" + str(file.size_bytes).encode())
    return digest.hexdigest()[:32]


def list_text_files(text: str, pattern: str) -> tuple[Path, list[CorpusFile]]:
    """The documents of a text file or directory, sorted by path, and the directory they are below.

    Hidden and empty files are left out; a directory that links lead back to is entered once.
    """
    ignored: frozenset[str] = frozenset()
    patterns = [pattern]
    if text == PYTHON_STDLIB:
        root, ignored = Path(sysconfig.get_path("stdlib")), _NOT_STDLIB
        patterns.append("*.py")
    else:
        root = Path(expand_path(text))
    if not stat.S_ISDIR(_stat_file(root).st_mode):
        return root.parent, [CorpusFile(root.name, _regular_file_size(root))]
    files = [
        CorpusFile(path, size)
        for path, size in _walk_files(root, ignored)
        if size and all(PurePosixPath(path).match(glob) for glob in patterns)
    ]
    if not files:
        raise UsageError(f"{text}: no file that matches {pattern!r} has anything in it")
    return root, sorted(files, key=lambda file: os.fsencode(file.path))


def _walk_files(root: Path, ignored: frozenset[str]) -> Iterator[tuple[str, int]]:
    entered: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        below = pending.pop()
        at = root / below
        try:
            here = at.stat()
            if (here.st_dev, here.st_ino) in entered:
                continue
            entered.add((here.st_dev, here.st_ino))
            for name in sorted(os.listdir(at), reverse=True):  # noqa: PTH208 - names alone are wanted
                path = f"{below}/{name}" if below else name
                if name.startswith(".") or name in ignored:
                    continue
                at = root / path
                try:
                    status = at.stat()
                except OSError as error:
                    if error.errno == errno.ELOOP:  # a link to itself holds no text
                        continue
                    raise
                if stat.S_ISDIR(status.st_mode):
                    pending.append(path)
                elif stat.S_ISREG(status.st_mode):
                    yield path, status.st_size
        except OSError as error:
            raise _unreadable_error(at, error) from None


def _stat_file(path: Path) -> os.stat_result:
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            with path.open("rb"):  # a job that cannot read its data is refused before it queues
                pass
    except OSError as error:
        raise _unreadable_error(path, error) from None
    return status


def _regular_file_size(path: Path) -> int:
    status = _stat_file(path)
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path}: is a directory; tokens names one file, use text for a directory of text")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is neither a file nor a directory")
    if status.st_size == 0:
        raise UsageError(f"{path}: is empty")
    return status.st_size


def why_not_text(path: Path, *, utf8: bool = False) -> str | None:
    """Return why a file cannot be a document (NUL separates documents), or None; reads all of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                if b"\0" in block:
                    return "has NUL bytes, which separate documents"
                if utf8:
                    decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "is not UTF-8"
    except OSError as error:
        raise _unreadable_error(path, error) from None
    return None


def all_skipped_message(name: str, skipped: Sequence[tuple[str, str]]) -> str:
    """The message for a corpus of which every file was left out."""
    path, reason = skipped[0]
    rest = f", and {len(skipped) - 1} more files were left out" if len(skipped) > 1 else ""
    return f"{name}: no text in it; {path} {reason}{rest}"


def _unreadable_error(path: Path, error: OSError) -> UsageError:
    if isinstance(error, FileNotFoundError):
        return UsageError(f"{path}: {'is a link to nothing' if path.is_symlink() else 'does not exist'}")
    return UsageError(f"{path}: cannot be read: {error.strerror}")


def sample_sequences(corpus: Corpus, count: int) -> list[dict[str, Any]]:
    """Training sequences, evenly spread: text where a token is a byte, else ids."""
    count = min(count, corpus.train_sequences)
    samples: list[dict[str, Any]] = []
    for index in range(count):
        sequence = corpus.split.train(index * corpus.train_sequences // count)
        ids = corpus.read(sequence * corpus.seq_len, corpus.seq_len)
        if corpus.tokenizer == "bytes" and max(ids) < 256:
            text = bytes(ids).decode(errors="replace").replace("\0", "␀")
            samples.append({"sequence": sequence, "text": text})
        else:
            samples.append({"sequence": sequence, "ids": ids})
    return samples
