#!/bin/sh
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 4
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --signal TERM@120
# Two minutes before the time is over, or when the job is preempted, every rank gets SIGTERM: the run stops after its step
# with a checkpoint, its tasks end with 143, and the job is queued again. `penstock train` reads srun's environment.
srun penstock train --resume -o "${OUTPUT:-runs/launched}" "$@"
code=$?
[ "$code" -eq 143 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
