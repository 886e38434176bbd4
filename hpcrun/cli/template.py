"""`hpcrun template`: the sbatch templates of the site: which there are, what they say, whether they hold."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcrun.cli.findings import print_findings
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError
from hpcrun.files import write_output

if TYPE_CHECKING:
    from hpcrun.specs.cluster import ClusterSpec

SCHEMA_VERSION = 2

app = typer.Typer(
    no_args_is_help=True,
    help="The site's sbatch templates: look at them, take one to change, check it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Name = Annotated[
    str, typer.Argument(metavar="NAME|PATH", help="train, shipped/train, site/train, or the path of a file.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Profile = Annotated[Path | None, typer.Option(metavar="FILE", help="The cluster's profile.")]
_Version = Annotated[str | None, typer.Option(metavar="X", help="Slurm release, such as 23.11.")]


@app.command("list")
def list_templates(as_json: _Json = False) -> None:
    """The templates, nearest first; of several with one name the first is taken."""
    from hpcrun.slurm.template import TEMPLATE_SUFFIX, TemplateLibrary

    templates = TemplateLibrary().templates()
    taken = {one.name: one for one in reversed(templates)}
    rows = [
        {
            "name": one.name.removesuffix(TEMPLATE_SUFFIX),
            "origin": one.origin,
            "path": str(one.path),
            "taken": taken[one.name] == one,
        }
        for one in templates
    ]
    if as_json:
        _print_json({"templates": rows})
        return
    width = max((len(str(row["name"])) for row in rows), default=0)
    for row in rows:
        hidden = "" if row["taken"] else "  (hidden)"
        print(f"{row['name']:{width}}  {row['origin']:7}  {row['path']}{hidden}")


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(metavar="NAME|PATH", help="Which template.")] = None,
    context: Annotated[
        bool, typer.Option("--context", help="The values that every template gets, instead of a template.")
    ] = False,
    rendered: Annotated[bool, typer.Option("--rendered", help="The script of an invented job.")] = False,
    profile: _Profile = None,
    slurm_version: _Version = None,
    as_json: _Json = False,
) -> None:
    """The text of a template, what it extends, or the values it gets."""
    from hpcrun.slurm import contract, script_context
    from hpcrun.slurm.template import TemplateLibrary, read_template_source

    if context:
        _show_context(as_json)
        return
    if name is None:
        raise UsageError("no template given; write `hpcrun template show NAME`, or `hpcrun template list`")
    library = TemplateLibrary()
    template = library.find(name)
    layers = library.chain(template)
    if rendered:
        job = script_context.example_context(
            library, template, _load_profile(profile), _checked_version(slurm_version)
        )
        text = contract.render_script(library, template, job)
    else:
        text = read_template_source(template)
    if as_json:
        chain = [{"origin": layer.origin, "path": str(layer.path)} for layer in layers]
        _print_json({"name": template.name, "layers": chain, "text": text})
        return
    typer.echo(" -> ".join(str(layer.path) for layer in layers), err=True)
    print(text, end="")


def _show_context(as_json: bool) -> None:
    from hpcrun.slurm.script_context import describe_context

    rows = describe_context()
    if as_json:
        _print_json({"context": [{"name": n, "type": t, "meaning": m} for n, t, m in rows]})
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, kind, meaning in rows:
        print(f"{name:{widths[0]}}  {kind:{widths[1]}}  {meaning}")


@app.command()
def export(
    name: _Name,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; default: the site's directory.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="The whole text, to be kept up by hand.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a file to change: one that extends the template and overrides its blocks."""
    from hpcrun.slurm.template import TEMPLATE_BLOCKS, TemplateLibrary, read_template_source

    library = TemplateLibrary()
    template = library.find(name)
    target = (to or library.directories["site"]) / template.name
    if target.exists() and not force:
        raise UsageError(f"{target}: exists; --force replaces it, --to DIR writes elsewhere")
    if target.absolute() == template.path.absolute():
        raise UsageError(f"{target}: is the template itself; --to DIR writes elsewhere")
    if whole or template.origin == "path":  # a file outside of the directories cannot be extended by name
        text = read_template_source(template)
    else:
        blocks = [f"{{% block {block} %}}\n{{{{ super() -}}}}\n{{% endblock %}}" for block in TEMPLATE_BLOCKS]
        about = (
            "{# Change blocks, before or after super(), or without it; remove those that stay as they are. #}"
        )
        text = "\n".join([about, f'{{% extends "{template.key}" %}}', *blocks, ""])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_output(target, text)
    except OSError as error:
        raise UsageError(
            f"{target}: cannot be written: {error.strerror}; --to DIR writes elsewhere"
        ) from None
    print(target)


@app.command()
def check(
    name: _Name, profile: _Profile = None, slurm_version: _Version = None, as_json: _Json = False
) -> None:
    """Render an invented job and see that the script keeps its contract; exit code 1 if not."""
    from hpcrun.slurm import contract
    from hpcrun.slurm.template import TemplateLibrary

    library = TemplateLibrary()
    template = library.find(name)
    found = contract.check_template(
        library, template, _load_profile(profile), _checked_version(slurm_version)
    )
    if as_json:
        findings = [finding.as_json() for finding in found]
        _print_json({"path": str(template.path), "ok": not found, "findings": findings})
    else:
        print_findings(found, f"{template.path}: ok")
    if found:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command()
def diff(
    name: _Name, profile: _Profile = None, slurm_version: _Version = None, as_json: _Json = False
) -> None:
    """What a site's template changes in the script of an invented job, against the shipped one."""
    from hpcrun.slurm import contract, script_context
    from hpcrun.slurm.template import TemplateLibrary

    library = TemplateLibrary()
    template = library.find(name)
    other = contract.shipped_counterpart(library, template)
    job = script_context.example_context(
        library, template, _load_profile(profile), _checked_version(slurm_version)
    )
    before = contract.render_script(library.shipped(), other, job)
    after = contract.render_script(library, template, job)
    lines = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), str(other.path), str(template.path), lineterm=""
        )
    )
    if as_json:
        _print_json({"shipped": str(other.path), "path": str(template.path), "diff": lines})
        return
    for line in lines:
        print(line)


def _load_profile(path: Path | None) -> ClusterSpec | None:
    from hpcrun.specs.cluster import find_cluster, load_cluster

    return find_cluster() if path is None else load_cluster(path)


def _checked_version(version: str | None) -> str | None:
    from hpcrun.slurm.versions import parse_slurm_version

    if version is not None and parse_slurm_version(version) is None:
        raise UsageError(f"--slurm-version {version}: is no release of Slurm; write it as 24.05 or 24.05.8")
    return version


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=2))
