# Starts the cluster: control plane and node0 in one network namespace, node1 in another. 10 s.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock
export KUBECONFIG=$STATE/admin.kubeconfig

healthy() { # every daemon lives, both nodes are Ready and have their GPUs
  [ -f "$STATE/complete" ] || return 1
  local file
  for file in "$STATE"/pids/*; do
    tr '\0' ' ' 2>/dev/null <"/proc/$(cat "$file")/cmdline" | grep -qF -- "$STATE/" || return 1
  done
  [ "$(kubectl get nodes --request-timeout=5s -o jsonpath='{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{.status.allocatable.nvidia\.com/gpu} {end}' 2>/dev/null)" = "True8 True8 " ]
}
if healthy; then
  say "the cluster is up: KUBECONFIG=$KUBECONFIG"
  exit 0
fi
bash "$HERE/down.sh"
say "starting a two-node Kubernetes $KUBERNETES"
mkdir -p "$STATE"/{pki,logs,pids,shared/weights}
mkdir -p "$STATE/before"
for name in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  [ ! -r "/proc/sys/$name" ] || echo "$name $(cat "/proc/sys/$name")"
done >"$STATE/before/sysctls" # the kubelet sets these for itself, on the machine as a whole
[ -e /var/lib/kubelet ] || touch "$STATE/before/no-kubelet-folder"
PKI=$STATE/pki

certificate() { # name subject subject-alternative-names
  openssl req -newkey rsa:2048 -nodes -keyout "$PKI/$1.key" -out "$PKI/$1.csr" -subj "$2" 2>/dev/null
  openssl x509 -req -in "$PKI/$1.csr" -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" -CAcreateserial -days 30 \
    -out "$PKI/$1.crt" -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$3") 2>/dev/null
}
kubeconfig() { # name
  local kubectl="kubectl config --kubeconfig=$STATE/$1.kubeconfig"
  $kubectl set-cluster local --server=https://$API:6443 --certificate-authority="$PKI/ca.crt" --embed-certs >/dev/null
  $kubectl set-credentials "$1" --client-certificate="$PKI/$1.crt" --client-key="$PKI/$1.key" --embed-certs >/dev/null
  $kubectl set-context local --cluster=local --user="$1" >/dev/null
  $kubectl use-context local >/dev/null
}
# nsenter and not `ip netns exec`: the latter mounts a fresh /sys, and the kubelet finds no cgroups.
start() { # node name command...
  local node=$1 name=$2
  shift 2
  setsid nohup nsenter --net="/run/netns/$(netns "$node")" "$@" >"$STATE/logs/$name.log" 2>&1 </dev/null 9>&- &
  echo $! >"$STATE/pids/$name"
}
await() { # what tries command...
  local what=$1 tries=$2
  shift 2
  for _ in $(seq "$tries"); do "$@" >/dev/null 2>&1 && return; sleep 0.2; done
  echo "$what did not come up; logs are in $STATE/logs" >&2
  exit 1
}

openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout "$PKI/ca.key" -out "$PKI/ca.crt" -subj /CN=kubernetes 2>/dev/null
certificate apiserver /CN=kube-apiserver "IP:127.0.0.1,IP:$API,IP:10.96.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
certificate admin /O=system:masters/CN=admin DNS:admin
certificate controller-manager /CN=system:kube-controller-manager DNS:controller-manager
certificate scheduler /CN=system:kube-scheduler DNS:scheduler
certificate proxy /CN=system:kube-proxy DNS:proxy
certificate kubelet-client /O=system:masters/CN=kubelet-client DNS:kubelet-client
openssl genrsa -out "$PKI/sa.key" 2048 2>/dev/null
openssl rsa -in "$PKI/sa.key" -pubout -out "$PKI/sa.pub" 2>/dev/null
for name in admin controller-manager scheduler proxy; do kubeconfig $name; done

ip link add $BRIDGE type bridge
ip link set $BRIDGE up
ip addr add $GATEWAY/24 dev $BRIDGE
for node in $NODES; do
  ns=$(netns "$node")
  ip netns add "$ns"
  ip link add "rf-$node" type veth peer name eth0 netns "$ns"
  ip link set "rf-$node" master $BRIDGE up
  ip -n "$ns" link set lo up
  ip -n "$ns" addr add "$(address "$node")/24" dev eth0
  ip -n "$ns" link set eth0 up
  ip -n "$ns" route add default via $GATEWAY
  nsenter --net="/run/netns/$ns" sysctl -qw net.ipv4.ip_forward=1
  ip route add "$(pod_range "$node")" via "$(address "$node")"
done
for node in $NODES; do
  for other in $NODES; do
    [ "$node" = "$other" ] || ip -n "$(netns "$node")" route add "$(pod_range "$other")" via "$(address "$other")"
  done
done

start node0 etcd etcd --data-dir "$STATE/etcd" --listen-client-urls http://127.0.0.1:2379 \
  --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
start node0 apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --advertise-address=$API --secure-port=6443 \
  --allow-privileged --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" \
  --client-ca-file="$PKI/ca.crt" --service-account-issuer=https://kubernetes.default.svc \
  --service-account-key-file="$PKI/sa.pub" --service-account-signing-key-file="$PKI/sa.key" \
  --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
  --kubelet-client-certificate="$PKI/kubelet-client.crt" --kubelet-client-key="$PKI/kubelet-client.key" \
  --kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP
start node0 controller-manager kube-controller-manager --kubeconfig="$STATE/controller-manager.kubeconfig" \
  --service-account-private-key-file="$PKI/sa.key" --root-ca-file="$PKI/ca.crt" --use-service-account-credentials \
  --leader-elect=false --node-monitor-grace-period=15s --node-monitor-period=3s
start node0 scheduler kube-scheduler --kubeconfig="$STATE/scheduler.kubeconfig" --leader-elect=false
await "the API server" 300 kubectl get --raw /readyz
kubectl create clusterrolebinding kube-proxy --clusterrole=system:node-proxier --user=system:kube-proxy >/dev/null

# A kubelet that starts anew sets extended resources to 0 and then refuses its own running pods (OutOfnvidia.com/gpu),
# unless it finds a checkpoint of its device plugins; an empty one will do. Its place is fixed, whatever --root-dir says.
mkdir -p /var/lib/kubelet/device-plugins
[ -e /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint ] ||
  echo '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":0}' >/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint
for node in $NODES; do
  . "$HERE/node.sh"
done
# GPUs for the scheduler: an extended resource in the node's status, as a device plugin would report it. A watch, so
# that a node that was deleted and registered anew gets them again.
cat >"$STATE/gpus.sh" <<'GPUS'
while sleep 0.3; do
  kubectl get nodes --watch --output='jsonpath={.metadata.name} {.status.allocatable.nvidia\.com/gpu}{"\n"}' |
    while read -r node gpus; do
      [ "$gpus" = 8 ] || kubectl patch node "$node" --subresource=status --type=merge \
        --patch '{"status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}}}'
    done
done
GPUS
start node0 gpus bash "$STATE/gpus.sh"
cat >"$STATE/Corefile" <<COREFILE
.:53 {
  bind $API
  kubernetes cluster.local in-addr.arpa {
    kubeconfig $STATE/admin.kubeconfig local
    ttl 2
  }
}
COREFILE
start node0 coredns coredns -conf "$STATE/Corefile"
for node in $NODES; do
  await "$node" 300 kubectl get node "$node"
  kubectl wait --for=condition=Ready "node/$node" --timeout=60s >/dev/null
done
# What pods mount from this machine, under paths that do not change with versions. Any user may write checkpoints.
ln -sfn "$ENGINE" "$STATE/shared/engine"
ln -sfn "$MODELS" "$STATE/shared/models"
chmod 1777 "$STATE/shared/weights"
touch "$STATE/complete"
await "both nodes with their GPUs" 300 healthy
say "the cluster is up: KUBECONFIG=$KUBECONFIG"
