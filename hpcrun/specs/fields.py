"""What specs are made of: the base of their sections, and kinds of text with the characters each may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from hpcrun.errors import UsageError
from hpcrun.units import parse_memory, parse_time


class SpecSection(BaseModel):
    """A section of a YAML file: types are exact, unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""
SystemName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}$")]
"""A name that Slurm or the kernel has given: a partition, a device."""
SingleLineText = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text without line breaks and control characters."""
NoNulText = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""Text that can be an argument or a value in an environment."""
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$")]
"""An absolute path."""
ExpandablePath = Annotated[str, StringConstraints(pattern=r"^[/$~][^\x00-\x1f]*$")]
"""An absolute path that may begin with `~` or hold variables."""
ModuleName = Annotated[str, StringConstraints(pattern=r"^[^-\x00-\x20\x7f][^\x00-\x1f\x7f]*$")]
"""An environment module."""
ContainerMount = Annotated[str, StringConstraints(pattern=r"^[^,\x00-\x1f\x7f]+$")]
"""SOURCE:TARGET[:ro] of a container."""
SbatchOptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")]
"""A long option of sbatch, without the dashes."""
PositiveInt = Annotated[int, Field(ge=1)]
REQUIRED_VARIABLES = ("PATH", "HOME", "USER", "SLURM_CONF")
"""Variables that no job does without."""


def _spares_required_variables(pattern: str) -> str:
    taken = [name for name in REQUIRED_VARIABLES if fnmatchcase(name, pattern)]
    if taken:
        raise ValueError(f"{pattern} would take {', '.join(taken)} away, which jobs need; write it narrower")
    return pattern


VariablePattern = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_*?\[\]!-]+$"), AfterValidator(_spares_required_variables)
]
"""Names of environment variables, as a shell's pattern: TRITON_CACHE_DIR, *_CACHE_PATH."""


def keep_required_variables(env: dict[str, str | None]) -> dict[str, str | None]:
    """Validator of an `env`: what no job does without is not unset."""
    for name in unset_variables(env):
        if name in REQUIRED_VARIABLES:
            raise ValueError(f"{name}: jobs need it, it cannot be null; give a value, or leave it out")
    return env


def matches_any_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of these patterns names a variable."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def set_variables(env: Mapping[str, str | None]) -> dict[str, str]:
    """The variables that an `env` sets."""
    return {name: value for name, value in env.items() if value is not None}


def unset_variables(env: Mapping[str, str | None]) -> list[str]:
    """The variables that an `env` unsets."""
    return [name for name, value in env.items() if value is None]


def parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Text that one of the unit parsers takes; kept as it was written."""

    def check(text: str) -> str:
        try:
            parse(text)
        except UsageError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return text

    return AfterValidator(check)


TimeText = Annotated[str, parsed_by(parse_time)]
"""A time limit, such as 90m or 2-00:00:00."""
MemoryText = Annotated[str, parsed_by(parse_memory)]
"""An amount of memory, such as 64G."""
