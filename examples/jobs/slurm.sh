#!/bin/bash
# Slurm: sbatch examples/jobs/slurm.sh examples/data_parallel/checkpoint.py --directory /shared/run
# jax finds the other processes by itself; a job that is requeued goes on from its last checkpoint.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=train_%j.log
# One process for each GPU. No --gpus-per-task: each process has to see all GPUs of its node, as jax gives it that of its rank there.
set -euo pipefail

export NCCL_DEBUG=WARN
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 --label python "$@"
