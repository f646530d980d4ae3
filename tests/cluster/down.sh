# Ends all that up.sh started: by name, by network namespace and by cgroup, for after a crash any of them may be all
# that is left. What it changed of the machine is put back.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock
set +e

daemons() { # pids of our daemons. By name too: a user's `kubectl --kubeconfig=$STATE/...` is none of them
  local process words
  for process in /proc/[0-9]*; do
    words=$(tr '\0' ' ' 2>/dev/null <"$process/cmdline") || continue
    [[ $words == *"$STATE/"* ]] || continue
    words=${words%% *}
    case ${words##*/} in
    etcd | kube-apiserver | kube-controller-manager | kube-scheduler | kubelet | kube-proxy | coredns | containerd*) echo "${process#/proc/}" ;;
    esac
  done
}
cgroups() { # the two nodes' cgroup roots
  local node
  for node in $NODES; do
    find /sys/fs/cgroup -maxdepth 2 -type d -name "$(netns "$node")" 2>/dev/null
  done
}
ours() { # all pids of ours, but never this command and those that called it
  local node folder pid=$$ mine=" "
  while [ "${pid:-0}" -gt 1 ]; do
    mine+="$pid "
    pid=$(awk '/^PPid:/ {print $2}' "/proc/$pid/status" 2>/dev/null)
  done
  {
    daemons
    for node in $NODES outside; do ip netns pids "$(netns "$node")" 2>/dev/null; done
    for folder in $(cgroups); do find "$folder" -name cgroup.procs -exec cat {} + 2>/dev/null; done
  } | sort -u | while read -r pid; do [[ $mine == *" $pid "* ]] || echo "$pid"; done
}

[ -d "$STATE" ] || ip link show $BRIDGE >/dev/null 2>&1 || [ -n "$(cgroups)" ] || [ -n "$(ip netns list | grep -E '^rf-node')" ] || exit 0
say "stopping the cluster"
# Kubelets first, so that nothing starts containers anew.
for file in "$STATE"/pids/*kubelet; do
  pid=$(cat "$file" 2>/dev/null)
  # A pid from before a reboot may be anyone's by now.
  [ -n "$pid" ] && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$STATE/" && kill -KILL "$pid"
done
for _ in $(seq 100); do
  pids=$(ours)
  [ -n "$pids" ] || break
  # shellcheck disable=SC2086
  kill -KILL $pids 2>/dev/null
  sleep 0.1
done
# Shims listen, and the network plugins note their results, outside the state folder.
for file in "$STATE"/node*/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/address; do
  [ -f "$file" ] && address=$(cat "$file") && rm -f "${address#unix://}"
done
for folder in "$STATE"/node*/containerd/io.containerd.grpc.v1.cri/sandboxes/*/; do
  rm -f /var/lib/cni/results/*-"$(basename "$folder")"-*
done
for _ in 1 2 3; do # mounts may lie on each other
  awk -v state="$STATE/" 'index($2, state) == 1 {print $2}' /proc/self/mounts | sort -r | xargs -r -n1 umount -l
done
ip netns del "$(netns outside)" 2>/dev/null # a host beside the cluster, of a test that was killed
for node in $NODES; do
  ip route del "$(pod_range "$node")" 2>/dev/null
  ip netns del "$(netns "$node")" 2>/dev/null
  ip link del "rf-$node" 2>/dev/null
done
ip link del $BRIDGE 2>/dev/null
# `ip netns add` makes this folder a mount; where nobody has a namespace there, it is not needed.
[ -d /run/netns ] && [ -z "$(ls -A /run/netns)" ] && umount /run/netns 2>/dev/null
for _ in $(seq 30); do # a killed process leaves its cgroup a little later
  [ -n "$(cgroups)" ] || break
  for folder in $(cgroups); do find "$folder" -depth -type d -exec rmdir {} + 2>/dev/null; done
  sleep 0.1
done
find /var/log/containers -lname "$STATE/*" -delete 2>/dev/null
[ -f "$STATE/before/no-kubelet-folder" ] && rm -rf /var/lib/kubelet
while read -r name value; do # what the kubelet set on the machine as a whole
  [ "$(cat "/proc/sys/$name")" = "$value" ] || echo "$value" >"/proc/sys/$name"
done < <(cat "$STATE/before/sysctls" 2>/dev/null)
rmdir /var/log/containers /var/log/pods /var/lib/cni/results /var/lib/cni /run/containerd/s /run/containerd 2>/dev/null
left=$(ours) left+=$(cgroups) left+=$(awk -v state="$STATE/" 'index($2, state) == 1' /proc/self/mounts)
rm -rf "$STATE"
[ -z "$left" ] || { echo "left behind: $left" >&2; exit 1; }
say "the cluster is gone"
