#!/bin/bash
#SBATCH --job-name=fixture
#SBATCH --output=/scratch/user/runs/fixture-0101-120000-abcdef/submitit/%j_0_log.out
#SBATCH --error=/scratch/user/runs/fixture-0101-120000-abcdef/submitit/%j_0_log.err
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=60
#SBATCH --partition=gpu
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
# This release's srun does not take the processors of a task from sbatch.
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
export SUBMITIT_EXECUTOR=slurm

step=(srun --unbuffered --output /scratch/user/runs/fixture-0101-120000-abcdef/submitit/%j_%t_log.out)
step+=(--error /scratch/user/runs/fixture-0101-120000-abcdef/submitit/%j_%t_log.err)
step+=(--gpu-bind=none)
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then step+=(--cpus-per-task "$SLURM_CPUS_PER_TASK"); fi
"${step[@]}" /opt/python/bin/python -u -m submitit.core._submit /scratch/user/runs/fixture-0101-120000-abcdef/submitit
status=$?

exit "$status"
