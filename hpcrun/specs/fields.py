"""The kinds of text that specs are made of, each with the characters that it may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from hpcrun.errors import UsageError
from hpcrun.units import parse_memory, parse_time

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}$")]
"""A name that Slurm or the kernel has given: a partition, a device."""
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text without line breaks and control characters."""
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""Text that can be an argument or a value in an environment."""
Place = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$")]
"""An absolute path."""
Directory = Annotated[str, StringConstraints(pattern=r"^[/$~][^\x00-\x1f]*$")]
"""An absolute path that may begin with `~` or hold variables."""
Module = Annotated[str, StringConstraints(pattern=r"^[^-\x00-\x20\x7f][^\x00-\x1f\x7f]*$")]
"""An environment module."""
Mount = Annotated[str, StringConstraints(pattern=r"^[^,\x00-\x1f\x7f]+$")]
"""SOURCE:TARGET[:ro] of a container."""
Option = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")]
"""A long option of sbatch, without the dashes."""
Positive = Annotated[int, Field(ge=1)]


def readable(parse: Callable[[str], object]) -> AfterValidator:
    """Text that one of the unit parsers takes; kept as it was written."""

    def check(text: str) -> str:
        try:
            parse(text)
        except UsageError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return text

    return AfterValidator(check)


Time = Annotated[str, readable(parse_time)]
"""A time limit, such as 90m or 2-00:00:00."""
Memory = Annotated[str, readable(parse_memory)]
"""An amount of memory, such as 64G."""
