"""Lines of code of the package, by room: no blank lines, comments or docstrings.

python -m tests.code_lines [DIRECTORY]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """How many lines hold code; texts that stand alone, as docstrings do, count for nothing."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def main(package: Path) -> None:
    """Print a line a room, and the sum."""
    rooms = Counter[str]()
    for path in package.rglob("*.py"):
        rooms[path.relative_to(package).parts[0].removesuffix(".py")] += code_lines(path.read_text("utf-8"))
    for room, count in sorted(rooms.items(), key=lambda one: -one[1]):
        print(f"{count:6} {room}")
    print(f"{rooms.total():6} in all")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "hpcrun"))
