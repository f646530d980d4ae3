# Ends all that up.sh started, by pid file, by network namespace and by state folder: a half-started cluster too.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set +e

ours() { # pids of processes in our network namespaces, or whose command line names our state folder
  local node process
  for node in $NODES; do ip netns pids "$(netns "$node")" 2>/dev/null; done
  for process in /proc/[0-9]*; do
    tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -qF -- "$STATE/" && echo "${process#/proc/}"
  done | grep -vx -e "$$" -e "$BASHPID" -e "$PPID"
}
gone() { for pid in "$@"; do [ -d "/proc/$pid" ] && return 1; done; }
await_gone() { for _ in $(seq 50); do gone "$@" && return; sleep 0.1; done; }

[ -d "$STATE" ] || ip link show $BRIDGE >/dev/null 2>&1 || [ -n "$(ip netns list | grep -E '^rf-node')" ] || exit 0
say "stopping the cluster"
# Kubelets first, so that nothing starts containers anew.
for file in "$STATE"/pids/*kubelet; do [ -f "$file" ] && kill -KILL "$(cat "$file")" 2>/dev/null; done
for _ in 1 2 3; do
  pids=$(ours | sort -u)
  [ -n "$pids" ] || break
  # shellcheck disable=SC2086
  kill -KILL $pids 2>/dev/null
  # shellcheck disable=SC2086
  await_gone $pids
done
awk -v state="$STATE/" 'index($2, state) == 1 {print $2}' /proc/self/mounts | sort -r | xargs -r -n1 umount -l
for node in $NODES; do
  ns=$(netns "$node")
  ip route del "$(pod_range "$node")" 2>/dev/null
  ip netns del "$ns" 2>/dev/null
  ip link del "rf-$node" 2>/dev/null
  find /sys/fs/cgroup/*/"$ns" -depth -type d -exec rmdir {} + 2>/dev/null
done
ip link del $BRIDGE 2>/dev/null
for ns in $(ip netns list | awk '/^cni-/ {print $1}'); do
  grep -qx "$ns" "$STATE/netns-before" 2>/dev/null || ip netns del "$ns"
done
find /var/log/containers -lname "$STATE/*" -delete 2>/dev/null
rmdir /var/log/containers /var/log/pods 2>/dev/null
rm -rf "$STATE"
say "the cluster is gone"
