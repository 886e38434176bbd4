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
#SBATCH --segment=2
#SBATCH --exclusive
#SBATCH --comment=two' 'words

umask 077
if ! type -t module >/dev/null; then
    for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
        if [[ -r $file ]]; then . "$file"; break; fi
    done
fi
module load gcc/12.2 || { echo "hpcrun: the module" gcc/12.2 "cannot be loaded" >&2; exit 3; }

export OMP_NUM_THREADS=8
export GREETING=two\ words
# The supervisor and its agents run outside; the step that starts the ranks gets these options.
export HPCRUN_RANK_SRUN=--container-image=/images/pytorch.sif\ --container-mounts=/scratch:/scratch,/scratch/user/runs/fixture-0101-120000-abcdef:/scratch/user/runs/fixture-0101-120000-abcdef\ --container-env=OMP_NUM_THREADS,GREETING,MASTER_ADDR,MASTER_PORT
export SUBMITIT_EXECUTOR=slurm

# Signals reach the batch shell alone. Bash runs a trap only while it waits for a background process: so the
# command runs there, and what arrives is handed on to it.
child= early=
forward() {
    caught=1
    if [[ -n $child ]]; then kill -s "$1" "$child" 2>/dev/null; else early+=" $1"; fi
}
trap 'forward USR1' USR1
trap 'forward USR2' USR2
trap 'forward TERM' TERM
/opt/python/bin/python -u -m submitit.core._submit /scratch/user/runs/fixture-0101-120000-abcdef/submitit &
child=$!
for name in $early; do forward "$name"; done
status=127
while :; do
    caught=0
    wait "$child"
    ended=$?
    # A wait that a signal has ended says nothing about the command; 127: it was waited for before.
    if (( ended != 127 )); then status=$ended; fi
    if (( ended == 127 || ! caught )); then break; fi
done

exit "$status"
