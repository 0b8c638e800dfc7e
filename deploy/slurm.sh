#!/usr/bin/env bash
# An island over two hosts with eight GPUs each, as one node of a swarm. Not run: no Slurm was at hand.
#
#   ATOLL_DIR=$HOME/node atoll join        # once, on a login node; the folder is on a file system of all hosts
#   ATOLL_DIR=$HOME/node sbatch deploy/slurm.sh
#
# Two minutes before the time is up Slurm signals this script, and the node leaves with its work; the next job
# goes on with the same identity. Write the processors of a host in the place of 64: without that line all eight
# ranks would share one.
#SBATCH --job-name=atoll
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

: "${ATOLL_DIR:?set it to the folder of the node, on a file system that all hosts see}"
export ATOLL_DIR
# Of an earlier job: it would lead followers to where nobody listens.
rm -f "$ATOLL_DIR/island.token"

# The script runs on the first host, and so does the leader: the first task.
trap 'atoll node drain --within 100s || true' TERM

# In single quotes: the tasks fill it in.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -euc '
    if [ "$SLURM_PROCID" = 0 ]; then
        address=$(hostname --all-ip-addresses | cut --delimiter=" " --fields=1)
        exec atoll node start --hosts "$SLURM_NNODES" --shard $((SLURM_NNODES * 8)) \
            --device cuda --island-listen "$address:7720" --drain-within 90s
    fi
    until [ -s "$ATOLL_DIR/island.token" ]; do sleep 1; done
    exec atoll node follow "$ATOLL_DIR/island.token" --device cuda \
        --checkpoints "$ATOLL_DIR/inner-$(hostname)"
' &
# A trap ends the first wait, and the tasks are waited for until they have ended.
while kill -0 $! 2>/dev/null; do wait $! && code=0 || code=$?; done
exit "${code:-0}"
