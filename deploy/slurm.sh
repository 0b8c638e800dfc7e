#!/usr/bin/env bash
# An island over two hosts with eight GPUs each, as one node of a swarm. Slurm 22.05 ran it with one host and its
# processor. Not run: no cluster of two hosts, nor one with GPUs.
#
#   ATOLL_DIR=$HOME/node atoll join        # once, on a login node; the folder is on a file system of all hosts
#   ATOLL_DIR=$HOME/node sbatch deploy/slurm.sh
#
# Two minutes before the time is up Slurm signals this script, and the node leaves with its work; the next job
# goes on with the same identity. Where jobs are preempted the cluster needs preempt_send_user_signal in
# SlurmctldParameters. Else Slurm signals ranks and p2pd as well, and no work is handed in. It does not queue a
# preempted job again that has ended in time: type sbatch again.
#
# Write the processors of a host in the place of 64: without that line all eight ranks would share one.
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
# A trap ends a wait with a code of its own. So only the last one counts, for tasks that have ended.
while kill -0 $! 2>/dev/null; do wait $! || true; done
wait $!
