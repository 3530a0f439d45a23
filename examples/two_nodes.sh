#!/usr/bin/env bash
# Two nodes by torchrun. Here both are this machine; on a cluster run each torchrun on its own host.
#
# Run:  bash examples/two_nodes.sh                      digits, 2 nodes x 1 rank
#       bash examples/two_nodes.sh --train.epochs 20    further flags go to kagome train
#
# The nodes meet at one address, HOST:PORT, which must be a name of one of them.
set -euo pipefail

bin=${BIN:-.venv/bin}
meet=${MEET:-127.0.0.1:29611}
ranks=${RANKS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

node() {
    "$bin/torchrun" --nnodes 2 --nproc-per-node "$ranks" \
        --rdzv-backend c10d --rdzv-endpoint "$meet" --rdzv-id kagome \
        --local-addr 127.0.0.1 --no-python "$bin/kagome" train "$@"
}

node "$@" &
second=$!
trap 'kill "$second" 2>/dev/null || true' EXIT
node "$@"
wait "$second"
trap - EXIT
