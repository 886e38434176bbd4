#!/bin/bash
#SBATCH --job-name=fixture
#SBATCH --output=/scratch/user/runs/fixture-0101-120000-abcdef/submitit/%j_0_log.out
#SBATCH --error=/scratch/user/runs/fixture-0101-120000-abcdef/submitit/%j_0_log.err
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=60
#SBATCH --partition=gpu
#SBATCH --exclusive
#SBATCH --comment=two' 'words

# Slurm signals the batch shell only. Signals that arrive during the setup, or before the command handles them,
# are kept, and forwarded to the command as soon as it does.
hpcrun_child= hpcrun_early=()
hpcrun_forward() {
    hpcrun_caught=1
    if [[ -n $hpcrun_child ]]; then kill -s "$1" "$hpcrun_child" 2>/dev/null; else hpcrun_early+=("$1"); fi
}
hpcrun_listens() {
    # Before exec the process still shows the traps of this shell.
    if [[ /proc/$1/exe -ef /proc/$$/exe ]]; then return 1; fi
    local key mask seen=0
    while IFS=$' \t' read -r key mask; do
        case $key in SigBlk: | SigCgt:) (( seen |= 0x${mask: -4} )) ;; esac
    done 2>/dev/null <"/proc/$1/status"
    (( (seen & 0x4a00) == 0x4a00 ))  # USR1, USR2 and TERM are caught or blocked
}
trap 'hpcrun_forward USR1' USR1
trap 'hpcrun_forward USR2' USR2
trap 'hpcrun_forward TERM' TERM

umask 077
if ! type -t module >/dev/null; then
    for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
        if [[ -r $file ]]; then . "$file"; break; fi
    done
fi
module load gcc/12.2 || { echo "hpcrun: the module" gcc/12.2 "cannot be loaded" >&2; exit 3; }

export OMP_NUM_THREADS=8
export GREETING=two\ words
# This release's srun does not inherit --cpus-per-task from sbatch.
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
export SUBMITIT_EXECUTOR=slurm

# Lines above may have set -e; a wait that a signal interrupts is no failure.
set +e
# Bash runs traps only while it waits for a background process, so the command runs in the background.
/opt/python/bin/python -u -m submitit.core._submit /scratch/user/runs/fixture-0101-120000-abcdef/submitit &
hpcrun_started=$!
for (( tries = 600; tries > 0; tries-- )); do
    if ! kill -0 "$hpcrun_started" 2>/dev/null || hpcrun_listens "$hpcrun_started"; then break; fi
    sleep 0.1
done
hpcrun_child=$hpcrun_started
for name in ${hpcrun_early[@]+"${hpcrun_early[@]}"}; do hpcrun_forward "$name"; done
status=127
while :; do
    hpcrun_caught=0
    wait "$hpcrun_child"
    ended=$?
    # A wait that a signal interrupted does not give the command's status; 127: it was waited for before.
    if (( ended != 127 )); then status=$ended; fi
    if (( ended == 127 || ! hpcrun_caught )); then break; fi
done

exit "$status"
