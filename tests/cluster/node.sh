# One node: containerd, kubelet, kube-proxy. Sourced by up.sh with $node set.
# shellcheck shell=bash
folder=$STATE/$node
mkdir -p "$folder"/{containerd,run,kubelet,cni,pod-logs}
certificate "$node" "/O=system:nodes/CN=system:node:$node" "DNS:$node,IP:$(address "$node")"
kubeconfig "$node"

cat >"$folder/containerd.toml" <<TOML
version = 2
root = "$folder/containerd"
state = "$folder/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "$folder/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true # not in /run/netns, where down.sh could not tell them from others'
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "/usr/sbin/runc"
        Root = "$folder/run/runc"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$folder/cni"
TOML

cat >"$folder/cni/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$(pod_range "$node")"}]],
            "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "$folder/ipam"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON

# One cgroup root a node: a kubelet removes every pod cgroup under its root that it does not know.
for controller in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do
  [ -d "/sys/fs/cgroup/$controller" ] && mkdir -p "/sys/fs/cgroup/$controller/$(netns "$node")"
done
for file in cpus mems; do
  [ -f "/sys/fs/cgroup/cpuset/cpuset.$file" ] &&
    cat "/sys/fs/cgroup/cpuset/cpuset.$file" >"/sys/fs/cgroup/cpuset/$(netns "$node")/cpuset.$file"
done

cat >"$folder/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/$node.crt
tlsPrivateKeyFile: $PKI/$node.key
cgroupDriver: cgroupfs
cgroupRoot: /$(netns "$node")
failSwapOn: false
failCgroupV1: false
localStorageCapacityIsolation: false
containerRuntimeEndpoint: unix://$folder/run/containerd.sock
featureGates: {KubeletInUserNamespace: true}
clusterDomain: cluster.local
clusterDNS: [$API]
maxPods: 100
# A folder of its own: a kubelet removes the logs of pods that it does not know.
podLogsDir: $folder/pod-logs
nodeStatusUpdateFrequency: 3s
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
YAML

cat >"$folder/proxy.yaml" <<YAML
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: $STATE/proxy.kubeconfig}
mode: iptables
clusterCIDR: 10.244.0.0/16
hostnameOverride: $node
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
YAML

start "$node" "$node-containerd" containerd -c "$folder/containerd.toml"
await "containerd of $node" 100 test -S "$folder/run/containerd.sock"
await "containerd of $node" 100 ctr -a "$folder/run/containerd.sock" version
ctr -a "$folder/run/containerd.sock" -n k8s.io images import "$IMAGES/pause.tar" >/dev/null
start "$node" "$node-kubelet" kubelet --config="$folder/kubelet.yaml" --kubeconfig="$STATE/$node.kubeconfig" \
  --root-dir="$folder/kubelet" --hostname-override="$node" --node-ip="$(address "$node")"
start "$node" "$node-proxy" kube-proxy --config="$folder/proxy.yaml"
