#!/usr/bin/env bash
# Run Slurm on three simulated hosts of this machine, to try what is submitted to it. As root, on Debian:
#
#     apt-get install --no-install-recommends slurm-wlm munge
#     examples/launch/slurm_lab.sh up      # hosts n1, n2 and n3; then: export SLURM_CONF=/tmp/slurm-lab/slurm.conf
#     examples/launch/slurm_lab.sh lose n2 # end all processes of a host at once, as if it had lost power
#     examples/launch/slurm_lab.sh join n2 # start that host again
#     examples/launch/slurm_lab.sh down
#
# Each host has its own network, name, process ids and /dev/shm. Files and the user database are shared.
set -euo pipefail
LAB=${LAB:-/tmp/slurm-lab} NET=10.88.7 NODES=(n1 n2 n3)

up() {
    mkdir -p "$LAB/state" /run/munge
    cp /etc/hosts "$LAB/hosts"
    echo "$NET.254 $(hostname)" >>"$LAB/hosts"
    ip link add slurm-lab type bridge
    ip addr add "$NET.254/24" dev slurm-lab
    ip link set slurm-lab up
    local node index=0
    for node in "${NODES[@]}"; do
        index=$((index + 1))
        echo "$NET.$index $node" >>"$LAB/hosts"
        ip netns add "$node"
        ip link add "lab-$node" type veth peer name eth0 netns "$node"
        ip link set "lab-$node" master slurm-lab up
        ip -n "$node" addr add "$NET.$index/24" dev eth0
        ip -n "$node" link set eth0 up
        ip -n "$node" link set lo up
    done
    cat >"$LAB/slurm.conf" <<EOF
ClusterName=lab
SlurmctldHost=$(hostname)($NET.254)
SlurmUser=root
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool-%n
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmdPidFile=$LAB/slurmd-%n.pid
SlurmctldLogFile=$LAB/slurmctld.log
SlurmdLogFile=$LAB/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MpiDefault=none
$(for index in 1 2 3; do echo "NodeName=n$index NodeAddr=$NET.$index CPUs=$(nproc)"; done)
PartitionName=all Nodes=n[1-3] Default=YES State=UP
EOF
    echo CgroupPlugin=cgroup/v1 >"$LAB/cgroup.conf" # without it slurmd looks for a mounted cgroup and ends
    chown munge /run/munge
    runuser -u munge -- munged --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
        --log-file=/run/munge/munged.log --seed-file=/run/munge/seed
    SLURM_CONF=$LAB/slurm.conf slurmctld
    for node in "${NODES[@]}"; do host "$node"; done
}

host() { # start slurmd as the first process of a host, so that the host ends with it
    mkdir -p "$LAB/spool-$1"
    # shellcheck disable=SC2016
    ip netns exec "$1" unshare --uts --pid --fork --mount-proc --kill-child sh -c '
        hostname "$1"
        mount --bind "$2/hosts" /etc/hosts
        mount -t tmpfs -o size=1g tmpfs /dev/shm
        SLURM_CONF=$2/slurm.conf exec slurmd -D -N "$1"' sh "$1" "$LAB" >"$LAB/host-$1.log" 2>&1 &
    echo $! >"$LAB/host-$1.pid"
}

end() { # a file with a process id
    if [ -f "$1" ]; then kill "-${2:-TERM}" "$(cat "$1")" 2>/dev/null || true; fi
    rm -f "$1"
}

down() {
    local node
    for node in "${NODES[@]}"; do end "$LAB/host-$node.pid" KILL; done
    end "$LAB/slurmctld.pid"
    end /run/munge/munged.pid
    for node in "${NODES[@]}"; do ip netns del "$node" || true; done
    ip link del slurm-lab
    rm -rf "$LAB"
}

case ${1:-} in
    up) up ;;
    lose) end "$LAB/host-$2.pid" KILL ;;
    join) host "$2" ;;
    down) down ;;
    *) sed -n "2,10p" "$0" ;;
esac
