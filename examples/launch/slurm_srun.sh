#!/usr/bin/env bash
# Start one rank in each task of srun, without torchrun. Nothing restarts them, except that Slurm can requeue the job:
#
#     srun --nodes 2 --ntasks-per-node 8 --kill-on-bad-exit=1 \
#         examples/launch/slurm_srun.sh examples/launch/train.py --out /shared/run
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*} # "8(x2)" on two hosts
MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + (SLURM_JOB_ID * 20 + SLURM_STEP_ID * 2) % 10000))
export MASTER_ADDR MASTER_PORT

MASTER_PORT=$((MASTER_PORT + 1)) python -m composable_fsdp doctor --timeout 60
exec python "$@"
