#!/bin/bash
# Train on several nodes under Slurm, through requeues, from the folder that has (or gets) runs/:
#
#     sbatch examples/slurm.sh imagenet1k_small --data /data/imagenet --precision bf16
#
#SBATCH --job-name vil
#SBATCH --nodes 4
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 24:00:00
#SBATCH --requeue
#SBATCH --signal B:USR1@300
#SBATCH --open-mode append
#SBATCH --output vil-%j.out

set -eu

# Five minutes before its time is over, the job puts itself into the queue again. Slurm then sends SIGTERM to all
# processes, which save a checkpoint, and the next start resumes from it.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

# One torchrun per node. With --nnodes 1:N in place of N the run starts, and is resumed, with the nodes there are; the
# variable lets a node that was gone join again (without it torch 2.15 waits for it in vain and fails).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 20 \
  --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m vision_longformer train "$@" --output "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto &
processes=$!

status=0
wait "$processes" || status=$?
if kill -0 "$processes" 2> /dev/null; then # it was USR1 that ended the waiting
  status=0
  wait "$processes" || status=$?
fi
exit "$status"
