"""Make a token file of text: streamed, so that memory stays constant, and complete or not there at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import byteorder
from typing import BinaryIO, Protocol, get_args

from hpcrun.data.corpus import (
    BYTE_VOCAB,
    TOKEN_ITEM_SIZE,
    TokenDtype,
    TokenSidecar,
    all_skipped_message,
    list_text_files,
    token_sidecar_path,
    why_not_text,
)
from hpcrun.errors import SiteError, UsageError
from hpcrun.files import check_output, temporary_name
from hpcrun.local_identity import expand_path
from hpcrun.units import format_bytes

_PIECE = 1 << 20
_BATCH = 4 << 20
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class TokenizedText:
    """A token file that was written: its path, its sidecar, and the files left out with the reason."""

    path: Path
    sidecar: TokenSidecar
    skipped: tuple[tuple[str, str], ...]


class _TokenEncoder(Protocol):
    vocab: int
    separator: int
    utf8: bool
    bytes_a_token_at_most: int

    def encode(self, pieces: Sequence[bytes], item: int) -> list[bytes]:
        """Each piece as little-endian tokens of `item` bytes."""


class _ByteEncoder:
    vocab, separator, utf8, bytes_a_token_at_most = BYTE_VOCAB, 0, False, 1

    def encode(self, pieces: Sequence[bytes], item: int) -> list[bytes]:
        encoded = []
        for piece in pieces:
            tokens = bytearray(item * len(piece))
            tokens[::item] = piece
            encoded.append(bytes(tokens))
        return encoded


class _TokenizerEncoder:
    utf8, bytes_a_token_at_most = True, 8  # a generous guess: a full disk is better foreseen than met

    def __init__(self, path: Path, eos: str | None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise SiteError(
                "a tokenizer.json needs the package tokenizers; run pip install 'hpcrun-slurm[tokenizers]'"
            ) from None
        if not path.is_file():
            raise UsageError(f"{path}: no such tokenizer file; use bytes or the path of a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the package raises nothing narrower
            raise UsageError(f"{path}: is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # in a document they are text, not the end of one
        ids = self._tokenizer.get_vocab()
        self.vocab = max(ids.values(), default=-1) + 1
        self.separator = _end_of_document(path, ids, eos)

    def encode(self, pieces: Sequence[bytes], item: int) -> list[bytes]:
        texts = [piece.decode() for piece in pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [_little_endian(encoding.ids, item) for encoding in encodings]


def _little_endian(ids: Sequence[int], item: int) -> bytes:
    tokens = array({2: "H", 4: "I"}[item], ids)
    if byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _end_of_document(path: Path, ids: dict[str, int], eos: str | None) -> int:
    names: Sequence[str] = (eos,) if eos else (*_configured_eos(path), *_END_OF_DOCUMENT)
    for name in names:
        if name in ids:
            return ids[name]
    if eos:
        raise UsageError(f"{path}: has no token {eos!r}; name one of its tokens as end of document")
    raise UsageError(f"{path}: no known end-of-document token in it; name one with --eos")


def _configured_eos(path: Path) -> list[str]:
    try:
        token = json.loads(path.with_name("tokenizer_config.json").read_bytes())["eos_token"]
        return [token if isinstance(token, str) else token["content"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the file is a convenience of others; without it the usual names are tried


def tokenize_files(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    dtype: str | None = None,
    pattern: str = "*",
    eos: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> TokenizedText:
    """Write the documents of files and directories, in their order, to a token file with its sidecar.

    `tokenizer` is bytes or the path of a tokenizer.json, whose special tokens are plain text where a
    document has them. Every document ends with the end-of-document token: 0 for bytes, else `eos` or
    the tokenizer's own. Documents above 1 MiB are encoded in pieces cut at line ends, which byte-level BPE
    does not notice. `progress` gets (bytes read, bytes in all).
    """
    for path in (out, token_sidecar_path(out)):
        if path.exists() and not force:
            raise UsageError(f"{path}: exists already; use --force to replace it, or another --out")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no directory {out.parent}; create it first")
    if tokenizer == "bytes" and eos:
        raise UsageError("--eos is for a tokenizer.json; with bytes a document ends with a 0 byte")
    encoder: _TokenEncoder = (
        _ByteEncoder() if tokenizer == "bytes" else _TokenizerEncoder(Path(expand_path(tokenizer)), eos)
    )
    item_dtype = _choose_dtype(dtype, encoder.vocab)
    documents = _documents(sources, pattern, out)
    tokens_at_least = _size(documents) // encoder.bytes_a_token_at_most + len(documents)
    skipped: list[tuple[str, str]] = []
    with _translate_os_errors(out):
        _check_room(out, tokens_at_least * TOKEN_ITEM_SIZE[item_dtype])
        with _atomic_file(out) as file:
            sidecar = _write_tokens(file, documents, encoder, item_dtype, tokenizer, skipped, progress)
            if not sidecar.documents:
                raise UsageError(all_skipped_message(" ".join(sources), skipped))
            token_sidecar_path(out).unlink(
                missing_ok=True
            )  # an old sidecar must never describe the new tokens
        with _atomic_file(token_sidecar_path(out)) as file:
            file.write(sidecar.render().encode())
    return TokenizedText(out, sidecar, tuple(skipped))


def _write_tokens(
    file: BinaryIO,
    documents: Sequence[tuple[Path, int]],
    encoder: _TokenEncoder,
    dtype: TokenDtype,
    tokenizer: str,
    skipped: list[tuple[str, str]],
    progress: Callable[[int, int], None] | None,
) -> TokenSidecar:
    item = TOKEN_ITEM_SIZE[dtype]
    end = encoder.separator.to_bytes(item, "little")
    digest = hashlib.sha256()
    total = _size(documents)
    written = ended = seen = 0
    for batch in _batches(documents, encoder.utf8, skipped):
        for tokens, (piece, last) in zip(
            encoder.encode([piece for piece, _ in batch], item), batch, strict=True
        ):
            block = tokens + end if last else tokens
            file.write(block)
            digest.update(block)
            written += len(block)
            ended += last
            seen += len(piece)
        if progress:
            progress(seen, total)
    return TokenSidecar(
        dtype=dtype,
        tokens=written // item,
        vocab=encoder.vocab,
        tokenizer=tokenizer,
        documents=ended,
        separator=encoder.separator,
        sha256=digest.hexdigest(),
    )


def _choose_dtype(dtype: str | None, vocab: int) -> TokenDtype:
    if dtype is not None and dtype not in get_args(TokenDtype):
        raise UsageError(f"--dtype {dtype}: use uint16 or uint32")
    if dtype == "uint16" and vocab > 1 << 16:
        raise UsageError(
            f"--dtype uint16 holds ids below 65536, the tokenizer's vocab is {vocab}; use uint32"
        )
    return "uint32" if dtype == "uint32" or vocab > 1 << 16 else "uint16"


def _documents(sources: Sequence[str], pattern: str, out: Path) -> list[tuple[Path, int]]:
    own = {out.resolve(), token_sidecar_path(out).resolve()}
    documents = []
    for source in sources:
        root, files = list_text_files(source, pattern)
        documents += [(root / file.path, file.size_bytes) for file in files]
    names = {path.name for path in own}
    documents = [entry for entry in documents if entry[0].name not in names or entry[0].resolve() not in own]
    if not documents:
        raise UsageError(f"{out}: the output is the only source; use another --out")
    return documents


def _size(documents: Sequence[tuple[Path, int]]) -> int:
    return sum(size for _, size in documents)


def _batches(
    documents: Sequence[tuple[Path, int]], utf8: bool, skipped: list[tuple[str, str]]
) -> Iterator[list[tuple[bytes, bool]]]:
    """Pieces of documents, each with whether its document ends, some 4 MiB at a time."""
    batch: list[tuple[bytes, bool]] = []
    size = 0
    for path, _ in documents:
        if reason := why_not_text(path, utf8=utf8):
            skipped.append((str(path), reason))
            continue
        for piece, last in _pieces(path):
            batch.append((piece, last))
            size += len(piece)
            if size >= _BATCH or len(batch) >= _BATCH >> 8:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(path: Path) -> Iterator[tuple[bytes, bool]]:
    held = b""
    try:
        with path.open("rb") as file:
            while block := file.read(_PIECE):
                held += block
                if len(held) > _PIECE:
                    cut = _cut_position(held)
                    yield held[:cut], False
                    held = held[cut:]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    yield held, True


def _cut_position(text: bytes) -> int:
    """The last place after a line end and before a word; failing that, before the last character."""
    at = len(text) - 1
    while (at := text.rfind(b"\n", 0, at)) >= 0:
        if not text[at + 1 : at + 2].isspace():
            return at + 1
    at = len(text) - 1
    while at and text[at] & 0xC0 == 0x80:
        at -= 1
    return at or len(text)


def _check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise SiteError(
            f"{out}: takes at least {format_bytes(needed)}, {out.parent} has {format_bytes(free)} free; "
            "free some or use another --out"
        )


@contextmanager
def _translate_os_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = (
                "no space or quota left while it was written, nothing is kept; free some or use another --out"
            )
        else:
            text = f"cannot be written: {error.strerror}"
        raise SiteError(f"{out}: {text}") from None


@contextmanager
def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when it is complete and on disk."""
    check_output(path)
    aside = path.with_name(temporary_name(path.name))
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
