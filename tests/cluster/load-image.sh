# usage: cluster load-image ARCHIVE...   Loads docker or OCI archives into both nodes; what is loaded already is skipped.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock

load() { # node archive...
  local node=$1 archive stamp mark
  shift
  for archive in "$@"; do
    stamp=$(stat -c %Y-%s "$archive")
    mark=$STATE/$node/loaded-$(basename "$archive")
    [ "$(cat "$mark" 2>/dev/null)" != "$stamp" ] || continue
    say "loading $(basename "$archive") into $node"
    ctr -a "$STATE/$node/run/containerd.sock" -n k8s.io images import "$archive" >/dev/null || return 1
    echo "$stamp" >"$mark"
  done
}
jobs=()
for node in $NODES; do
  load "$node" "$@" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
