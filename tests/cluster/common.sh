# Names, versions and paths that all scripts of the local cluster share. Sourced, never run.
# shellcheck shell=bash
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
CACHE=${ROLLOUTFLEET_CACHE:-$HOME/.cache/rolloutfleet}
STATE=${ROLLOUTFLEET_CLUSTER:-/var/lib/rolloutfleet-cluster}

KUBERNETES=1.34.4 # the newest line whose kubelet takes cgroup v1 by default
ETCD=v3.6.16
COREDNS=v1.14.4
UV=0.13.9
PYTHON=/usr/bin/python3.11 # the Python of Debian bookworm: environments made here run inside images made from it

BIN=$CACHE/kubernetes-$KUBERNETES
ENGINE=$CACHE/engine-$(sha256sum "$HERE/engine-requirements.txt" | cut -c1-10)
MODELS=$CACHE/models-$(sha256sum "$HERE/tiny_model.py" | cut -c1-10)
IMAGES=$CACHE/images
UVBIN=$CACHE/uv-$UV/bin/uv

BRIDGE=rfbr0
GATEWAY=10.89.0.1
API=10.89.0.10
NODES="node0 node1"
export PATH=$BIN:/usr/local/go/bin:/usr/sbin:$PATH

netns() { echo "rf-$1"; }
address() { echo "10.89.0.1${1#node}"; }
pod_range() { echo "10.244.${1#node}.0/24"; }
say() { printf '\033[1m[%4ds]\033[0m %s\n' "$SECONDS" "$*" >&2; }

# One at a time of those that change the cache or the cluster: two first runs at once took each other's half-built
# files. Outside the state folder, which `down` removes; daemons close it (9>&-).
# What runs inside another of them has the lock already.
lock() {
  [ -z "${ROLLOUTFLEET_LOCKED:-}" ] || return 0
  mkdir -p "$CACHE"
  exec 9>"$CACHE/cluster.lock"
  flock -n 9 || { say "another cluster command runs: waiting for it"; flock 9; }
  export ROLLOUTFLEET_LOCKED=1
}
