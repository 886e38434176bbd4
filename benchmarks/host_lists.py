"""Host lists as a real Slurm folds and unfolds them, against hpcrun.hostlist, over random sets of hosts.

    host_lists.py [--quick]

Needs root and the lab's Slurm (make lab-deps). A set counts as read back when what scontrol folded gives the
same hosts in the order in which scontrol unfolds them, and what we folded gives the same hosts to scontrol.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Ask the lab's scontrol about every set."""
    options = harness.options(__doc__).parse_args()
    sys.path.append(str(ROOT))
    from tests.lab.cluster import Lab
    from tests.lab.hostlists import differences
    from tests.lab.packages import NoLabError

    report = harness.Report("host_lists")
    report.header()
    count = 500 if options.quick else 5000
    try:
        with Lab() as lab, tempfile.TemporaryDirectory(prefix="host-lists-") as folder:
            wrong = list(differences(lab, Path(folder), count))
    except NoLabError as reason:
        return harness.fail(str(reason))
    for line in wrong:
        print(f"# {line}")
    report.row(sets=count, differences=len(wrong))
    report.claim(f"random sets of {count} that Slurm folds, read back otherwise", len(wrong), "0", not wrong)
    report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
