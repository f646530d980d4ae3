# What runs, and how to look around.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ -f "$STATE/complete" ] || { echo "no cluster: run $HERE/cluster up"; exit 1; }
export KUBECONFIG=$STATE/admin.kubeconfig
echo "KUBECONFIG=$KUBECONFIG   kubectl: $BIN/kubectl   logs: $STATE/logs"
echo "a shell that reaches Services: nsenter --net=/run/netns/$(netns node0)"
kubectl get nodes -o wide
kubectl get pods --all-namespaces
