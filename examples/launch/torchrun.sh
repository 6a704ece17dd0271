#!/usr/bin/env bash
# Train on several hosts by torchrun. Run the same command on every host, within a minute of each other:
#
#     HEAD=node1 HOSTS=2 RANKS=8 examples/launch/torchrun.sh examples/launch/train.py --out /shared/run
#
# HEAD   name or address of one of the hosts, as all know it     HOSTS  number of hosts
# RANKS  ranks on each host                                      PORT   two free ports on HEAD: this and the next
# ADDRESS  this host's address, where others do not resolve its name
# RESTARTS  restarts of all ranks after a rank has failed, from the newest checkpoint
# DOCTOR=no  leave out the check of the hosts before
set -euo pipefail
HOSTS=${HOSTS:-2} RANKS=${RANKS:-2} PORT=${PORT:-29500} RESTARTS=${RESTARTS:-3}

start() { # the endpoint's port, then the arguments of torchrun
    local endpoint=$HEAD:$1
    shift
    python -m torch.distributed.run --nnodes "$HOSTS" --nproc-per-node "$RANKS" --rdzv-backend c10d \
        --rdzv-id "${JOB:-launch}" --rdzv-endpoint "$endpoint" ${ADDRESS:+--local-addr "$ADDRESS"} "$@"
}

# A name may become known only once its host has started, as in Kubernetes. torchrun does not wait for that.
timeout 120 bash -c 'until getent hosts "$1" >/dev/null; do sleep 1; done' bash "$HEAD" ||
    { echo "torchrun.sh: $HEAD is not resolved after 120 s" >&2 && exit 1; }

# The first run checks the hosts, interfaces and ports. It has a port of its own, since the store ends with the run.
[ "${DOCTOR:-yes}" = no ] || start "$((PORT + 1))" -m composable_fsdp doctor --timeout 60

# Every attempt has its own store. Otherwise ranks connect to the addresses of processes that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
start "$PORT" --max-restarts "$RESTARTS" "$@"
