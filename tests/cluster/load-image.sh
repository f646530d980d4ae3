# usage: cluster load-image ARCHIVE...   Loads docker or OCI archives into both nodes; what is loaded already is skipped.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for archive in "$@"; do
  stamp=$(stat -c %Y-%s "$archive")
  for node in $NODES; do
    mark=$STATE/$node/loaded-$(basename "$archive")
    [ "$(cat "$mark" 2>/dev/null)" = "$stamp" ] && continue
    say "loading $(basename "$archive") into $node"
    ctr -a "$STATE/$node/run/containerd.sock" -n k8s.io images import "$archive" >/dev/null
    echo "$stamp" >"$mark"
  done
done
