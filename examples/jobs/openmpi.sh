#!/bin/bash
# HOSTS=node1:4,node2:4 bash examples/jobs/openmpi.sh examples/data_parallel/checkpoint.py --directory /shared/run
# Open MPI 4 and 5. jax finds the others by itself under Open MPI 4 alone, so this says where they meet: on the first host.
set -euo pipefail

HOSTS="${HOSTS:-localhost:2}" # host:processes, one process for each GPU
FIRST="${HOSTS%%,*}"
export JAX_COORDINATOR_ADDRESS="${FIRST%%:*}:${PORT:-61234}"

# shellcheck disable=SC2016 # each process expands these variables of its own
RANK='export JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK
export JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK # its GPU
exec python "$@"'
mpirun --host "$HOSTS" --bind-to none -x JAX_COORDINATOR_ADDRESS -x PATH -x PYTHONPATH bash -c "$RANK" bash "$@"
