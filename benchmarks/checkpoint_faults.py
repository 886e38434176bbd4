"""Faults injected into saves, and what training goes on from after each.

Every case does to real files, processes or nodes what its name says, and then restores as training does.
What is loaded is compared with what was saved, bit by bit. A fault may cost the newest save, but not
silently: the claim is that nothing else than a saved state is ever loaded. Nodes are pretended: each has
files, a server on loopback and a worker of its own. In whole runs of `hpcrun train` ranks and workers are
killed, and every loss is compared with that of an undisturbed run. Where one rank raises, is killed or sees
what the others do not see, and where storage hangs, it counts as silent too when the others are not told
within a minute, when a good save is renamed, or when training stops in a mode that promises not to.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Play all cases."""
    parser = harness.options(__doc__)
    parser.add_argument("--only", metavar="WORD", help="cases whose name has it")
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    import hpcrun.runtime.direct_checkpoint  # noqa: F401 - before the clock runs
    from tests.checkpoint.descent_faults import DESCENT_CASES
    from tests.checkpoint.faults import CASES, SkippedError
    from tests.checkpoint.hung_faults import HUNG_CASES
    from tests.checkpoint.node_faults import NODE_CASES
    from tests.checkpoint.rank_faults import RANK_CASES
    from tests.checkpoint.run_faults import RUN_CASES
    from tests.checkpoint.view_faults import VIEW_CASES

    report = harness.Report("checkpoint_faults")
    report.header()
    faults = silent = 0
    skipped = []
    every = {
        **CASES,
        **DESCENT_CASES,
        **NODE_CASES,
        **RUN_CASES,
        **RANK_CASES,
        **VIEW_CASES,
        **HUNG_CASES,
    }
    for name, case in every.items():
        if options.only and options.only not in name:
            continue
        root, begin = Path(tempfile.mkdtemp(prefix="faults-")), time.monotonic()
        try:
            told = case(root, options.quick)
        except SkippedError as reason:
            skipped.append(f"{name}: {reason}")
            continue
        finally:
            shutil.rmtree(root, ignore_errors=True)
        recovered = ", ".join(f"{count} x {what}" for what, count in told.recovered.items())
        seconds = round(time.monotonic() - begin, 1)
        report.row(case=name, faults=told.faults, recovered=recovered, silent=told.silent, seconds=seconds)
        happened = told.happened.replace(f"{root}/", "").splitlines()
        print(f"#   {happened[0] if happened else ''}", flush=True)
        faults, silent = faults + told.faults, silent + told.silent
    for line in skipped:
        print(f"# skipped: {line}")
    if not faults:
        return harness.fail("no case could be played here")
    report.claim(f"silent loads after {faults} injected faults", silent, "0", silent == 0)
    report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
