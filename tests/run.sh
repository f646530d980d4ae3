# All tests in one go; `e2e` alone runs the end-to-end ones. A cluster that this script started is removed again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/cluster/common.sh
what=${1:-all}
dev=$CACHE/dev-$(sha256sum tests/requirements.txt | cut -c1-10)

if [ "$what" = all ]; then
  say "lint, types, layers"
  make --no-print-directory lint
  say "unit and property tests"
  make --no-print-directory unit
  say "the page of samples in a real browser"
  make --no-print-directory browser
  say "the operator dies at each of its calls, on a real API server"
  make --no-print-directory api-server
fi

if [ -n "${KUBECONFIG:-}" ]; then
  say "end-to-end tests use the cluster of KUBECONFIG=$KUBECONFIG; images and CRDs are expected there"
else
  bash tests/cluster/cluster engine-env
  say "trainer library with torch"
  PYTHONPATH=$PWD/operator:$PWD/tests "$ENGINE/bin/python" -m unittest discover -q -s tests/with_torch -t tests/with_torch
  say "the agent and one real engine"
  make --no-print-directory with-engine
  bash tests/cluster/cluster images
  # A cluster that runs already is somebody's: it stays.
  kubectl --kubeconfig="$STATE/admin.kubeconfig" get nodes --request-timeout=5s >/dev/null 2>&1 ||
    trap 'bash tests/cluster/cluster down' EXIT
  bash tests/cluster/cluster up
  export KUBECONFIG=$STATE/admin.kubeconfig
  bash tests/cluster/cluster load-image "$IMAGES"/{operator,agent,router,engine-cpu,trainer-example}.tar
fi
say "end-to-end tests"
"$dev/bin/python" -m pytest tests/e2e --durations=20
say "all tests passed"
