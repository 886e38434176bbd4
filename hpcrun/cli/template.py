"""`hpcrun template`: list the sbatch templates of the site, show, export, check and compare them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrun.cli.options import AsJson, Force, SlurmVersion, make_app
from hpcrun.cli.output import print_findings, print_json, print_lines, print_table, write_file
from hpcrun.errors import EXIT_CHECK_FAILED, UsageError

if TYPE_CHECKING:
    from hpcrun.slurm.script_context import ScriptContext
    from hpcrun.slurm.template import BatchTemplate, TemplateLibrary
    from hpcrun.specs.cluster import ClusterSpec

app = make_app("List the site's sbatch templates, show, export, check and compare them.")

_Name = Annotated[
    str, typer.Argument(metavar="NAME|PATH", help="train, shipped/train, site/train, or a file.")
]
_Profile = Annotated[Path | None, typer.Option(metavar="FILE", help="Cluster profile.")]


@app.command("list")
def list_templates(as_json: AsJson = False) -> None:
    """List the templates; of several with one name the first is used."""
    from hpcrun.slurm.template import TEMPLATE_SUFFIX, TemplateLibrary

    templates = TemplateLibrary().templates()
    used = {template.name: template for template in reversed(templates)}
    rows = [
        {
            "name": template.name.removesuffix(TEMPLATE_SUFFIX),
            "origin": template.origin,
            "path": str(template.path),
            "taken": used[template.name] == template,
        }
        for template in templates
    ]
    if as_json:
        print_json(templates=rows)
    else:
        print_table(
            [(row["name"], row["origin"], row["path"], "" if row["taken"] else "(hidden)") for row in rows]
        )


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(metavar="NAME|PATH", help="Template.")] = None,
    context: Annotated[
        bool, typer.Option("--context", help="Print the values that every template gets instead.")
    ] = False,
    rendered: Annotated[bool, typer.Option("--rendered", help="Print the script of an example job.")] = False,
    profile: _Profile = None,
    slurm_version: SlurmVersion = None,
    as_json: AsJson = False,
) -> None:
    """Print a template, what it extends, or the values it gets."""
    from hpcrun.slurm import contract
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
        text = contract.render_script(library, template, _example(library, template, profile, slurm_version))
    else:
        text = read_template_source(template)
    if as_json:
        chain = [{"origin": layer.origin, "path": str(layer.path)} for layer in layers]
        print_json(name=template.name, layers=chain, text=text)
        return
    typer.echo(" -> ".join(str(layer.path) for layer in layers), err=True)
    print(text, end="")


def _show_context(as_json: bool) -> None:
    from hpcrun.slurm.script_context import describe_context

    rows = describe_context()
    if as_json:
        print_json(context=[dict(zip(("name", "type", "meaning"), row, strict=True)) for row in rows])
    else:
        print_table(rows)


@app.command()
def export(
    name: _Name,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Target directory; default: the site's.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Copy the whole text, instead of extending it.")
    ] = False,
    force: Force = False,
) -> None:
    """Write a file that extends a template, to be edited.

    It overrides each block of the template and calls the original.
    """
    from hpcrun.slurm.template import TemplateLibrary, read_template_source, render_extension

    library = TemplateLibrary()
    template = library.find(name)
    target = (to or library.directories["site"]) / template.name
    if target.exists() and not force:
        raise UsageError(f"{target}: exists; --force replaces it, --to DIR writes elsewhere")
    if target.absolute() == template.path.absolute():
        raise UsageError(f"{target}: is the template itself; --to DIR writes elsewhere")
    # A file outside of the directories cannot be extended by name.
    is_copy = whole or template.origin == "path"
    text = read_template_source(template) if is_copy else render_extension(template)
    write_file(target, text, "--to DIR writes elsewhere", parents=True)
    print(target)


@app.command()
def check(
    name: _Name, profile: _Profile = None, slurm_version: SlurmVersion = None, as_json: AsJson = False
) -> None:
    """Check that the script of an example job keeps its contract.

    Exits with 1 if it does not.
    """
    from hpcrun.slurm import contract
    from hpcrun.slurm.template import TemplateLibrary

    library = TemplateLibrary()
    template = library.find(name)
    problems = contract.check_template(
        library, template, _load_profile(profile), _checked_version(slurm_version)
    )
    if as_json:
        findings = [finding.as_json() for finding in problems]
        print_json(path=str(template.path), ok=not problems, findings=findings)
    else:
        print_findings(problems, f"{template.path}: ok")
    if problems:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command()
def diff(
    name: _Name, profile: _Profile = None, slurm_version: SlurmVersion = None, as_json: AsJson = False
) -> None:
    """Compare the script of an example job with the shipped template's."""
    from hpcrun.slurm import contract
    from hpcrun.slurm.template import TemplateLibrary

    library = TemplateLibrary()
    template = library.find(name)
    shipped = contract.shipped_counterpart(library, template)
    job = _example(library, template, profile, slurm_version)
    before = contract.render_script(library.shipped(), shipped, job).splitlines()
    after = contract.render_script(library, template, job).splitlines()
    paths = str(shipped.path), str(template.path)
    lines = list(difflib.unified_diff(before, after, *paths, lineterm=""))
    if as_json:
        print_json(shipped=paths[0], path=paths[1], diff=lines)
    else:
        print_lines(lines)


def _example(
    library: TemplateLibrary, template: BatchTemplate, profile: Path | None, slurm_version: str | None
) -> ScriptContext:
    from hpcrun.slurm.script_context import example_context

    return example_context(library, template, _load_profile(profile), _checked_version(slurm_version))


def _load_profile(path: Path | None) -> ClusterSpec | None:
    from hpcrun.specs.cluster import find_cluster, load_cluster

    return find_cluster() if path is None else load_cluster(path)


def _checked_version(version: str | None) -> str | None:
    from hpcrun.slurm.versions import parse_slurm_version

    if version is not None and parse_slurm_version(version) is None:
        raise UsageError(
            f"--slurm-version {version}: is not a release of Slurm; write it as 24.05 or 24.05.8"
        )
    return version
