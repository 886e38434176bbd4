"""`hpcrun data`: make token files, and inspect what a job would train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpcrun.cli.options import AsJson, Force, make_app
from hpcrun.cli.output import note, print_json, show_transfer

app = make_app("Make token files, and inspect what a job would train on.")

_Pattern = Annotated[str, typer.Option(metavar="GLOB", help="Files of a directory, such as '*.txt'.")]
_Dtype = Annotated[str | None, typer.Option(metavar="TYPE", help="uint16 or uint32.")]


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Text files or directories.")],
    out: Annotated[Path, typer.Option(metavar="FILE.bin", help="Token file to write.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="bytes, or the path of a tokenizer.json.")
    ] = "bytes",
    eos: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token that ends a document; default: the tokenizer's."),
    ] = None,
    dtype: _Dtype = None,
    pattern: _Pattern = "*",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Turn text into a token file for `data.tokens`.

    Jobs map it into memory.
    """
    from hpcrun.data.tokenize import tokenize_files

    with show_transfer(str(out), log=True) as show:
        made = tokenize_files(
            sources,
            out,
            tokenizer=tokenizer,
            dtype=dtype,
            pattern=pattern,
            eos=eos,
            force=force,
            progress=show,
        )
    _print_skipped(made.skipped)
    sidecar = made.sidecar
    if as_json:
        print_json(path=str(made.path), **json.loads(sidecar.render()), skipped=made.skipped)
        return
    print(
        f"{made.path}: {sidecar.tokens} tokens of {sidecar.documents} documents, {sidecar.dtype}, "
        f"vocab {sidecar.vocab}, tokenizer {sidecar.tokenizer}"
    )


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Text file, directory or token file; or python-stdlib.")
    ],
    seq_len: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per sequence.")] = 256,
    holdout: Annotated[float, typer.Option(help="Fraction of the sequences to hold out.")] = 0.02,
    dtype: _Dtype = None,
    pattern: _Pattern = "*",
    show: Annotated[int, typer.Option(metavar="N", min=0, help="Print this many training sequences.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the documents, tokens, sequences and split of a job."""
    from pydantic import ValidationError

    from hpcrun.data.corpus import inspect_corpus, is_token_file, sample_sequences
    from hpcrun.errors import UsageError
    from hpcrun.specs.data import DataSpec

    source = {"tokens": path} if dtype or is_token_file(Path(path)) else {"text": path}
    try:
        data = DataSpec.model_validate(
            {**source, "seq_len": seq_len, "holdout": holdout, "dtype": dtype, "pattern": pattern}
        )
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc'])) or path}: {each['msg']}" for each in error.errors()]
        raise UsageError("; ".join(problems)) from None
    corpus = inspect_corpus(data)
    samples = sample_sequences(corpus, show)
    _print_skipped(corpus.skipped)
    facts = {"path": path} | corpus.facts()
    if as_json:
        print_json(**facts, skipped=corpus.skipped, samples=samples)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {'unknown' if value is None else _printable(str(value))}")
    for sample in samples:
        print(f"\nsequence {sample['sequence']}:\n{sample.get('text') or sample['ids']}")


def _print_skipped(skipped: tuple[tuple[str, str], ...]) -> None:
    for path, reason in skipped[:3]:
        note(f"left out: {_printable(path)} {reason}")
    if len(skipped) > 3:
        note(f"left out: {len(skipped) - 3} more files")


def _printable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")
