"""Random states, saved and loaded by hpcrun.Checkpointer on 1 to 3 ranks, through memory and at once.

Each state is nested dicts and lists with keys of any type, tensors of every type, ties and views, DTensors in
other layouts, modules, optimizers and objects that are empty before, and plain values of every kind. It is
loaded into a fresh one. The claim is that it comes back equal, bit by bit and type by type, or is refused by
name: never different.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]


def main() -> int:
    """All worlds."""
    parser = harness.options(__doc__)
    parser.add_argument(
        "--states", type=int, metavar="N", help="so many for each world; 400, with --quick 15"
    )
    parser.add_argument("--first", type=int, default=1000, metavar="SEED", help="of the first state")
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    from tests.runtime.worlds import told_by

    count = options.states or (15 if options.quick else 400)
    report = harness.Report("saved_trees")
    report.header()
    total = different = 0
    for ranks in (1, 2, 3):
        folder, begin = Path(tempfile.mkdtemp(prefix="trees-")), time.monotonic()
        try:
            told = told_by(
                "state_world.py", folder, ranks, str(options.first), str(count), timeout_s=60 + 20 * count
            )
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            return harness.fail(f"a world of {ranks} did not come to its end: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for memory in (0, 2):
            of_mode = [(number, outcomes) for mode, number, outcomes in told if mode == memory]
            found = Counter(outcome.partition(":")[0] for _, outcomes in of_mode for outcome in outcomes)
            report.row(
                ranks=ranks,
                memory=memory,
                states=len(of_mode),
                **{kind: found[kind] for kind in ("equal", "refused", "different")},
                seconds=round(time.monotonic() - begin, 1),
            )
            for number, outcomes in of_mode:
                wrong = [outcome for outcome in outcomes if outcome.startswith("different")]
                total, different = total + 1, different + bool(wrong)
                if wrong:
                    print(f"#   seed {number}: {wrong[0]}", flush=True)
    report.claim(f"states that came back different, of {total}", different, "0", different == 0)
    report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
