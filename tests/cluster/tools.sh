# Debian packages and Kubernetes' own binaries, built from Go modules: about 10 minutes cold on 2 cores, then nothing.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock

PACKAGES="containerd runc containernetworking-plugins iptables conntrack iproute2 debootstrap buildah gcc libc6-dev
  chromium-headless-shell fonts-dejavu-core openssl procps python3 python3-venv ca-certificates postgresql-15
  libibverbs1 libnuma1 liburing2 librdmacm1 libcurl4"
missing=$(for package in $PACKAGES; do dpkg -s "$package" >/dev/null 2>&1 || echo "$package"; done)
if [ -n "$missing" ]; then
  say "installing Debian packages:" $missing
  apt-get update -qq
  # PostgreSQL's binaries are wanted, for tests; not the server that Debian would set up and start.
  mkdir -p /etc/postgresql-common/createcluster.d
  echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/rolloutfleet.conf
  # What packages start would keep the lock.
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null 9>&-
fi

if [ ! -x "$UVBIN" ]; then
  say "installing uv $UV"
  rm -rf "$CACHE/uv-$UV"
  mkdir -p "$CACHE"
  "$PYTHON" -m venv "$CACHE/uv-$UV"
  "$CACHE/uv-$UV/bin/pip" install -q "uv==$UV"
fi

[ -x "$BIN/etcd" ] && [ -x "$BIN/coredns" ] && exit 0
command -v go >/dev/null || { echo "Go is missing: install Go 1.24 or newer" >&2; exit 1; }
say "building Kubernetes $KUBERNETES, etcd $ETCD and CoreDNS $COREDNS (about 10 minutes, once)"
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
work=$(mktemp -d) out=$BIN.partial
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out" "$work/kubernetes"
cd "$work/kubernetes"
printf 'module kubernetes-binaries\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v%s\n' "$KUBERNETES" >go.mod
source=$(go mod download -json "k8s.io/kubernetes@v$KUBERNETES" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
# k8s.io/kubernetes requires its staging modules at v0.0.0: each needs a replace to the release of the same minor.
awk '/^\t?k8s\.io\/[a-z-]+ v0\.0\.0( |$)/ {print $1}' "$source/go.mod" | sort -u |
  sed "s#.*#replace & => & v0.${KUBERNETES#1.}#" >>go.mod
components="kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl"
for component in $components; do echo "tool k8s.io/kubernetes/cmd/$component"; done >>go.mod
go mod tidy 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
version="-s -w -X k8s.io/component-base/version.gitVersion=v$KUBERNETES -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=34"
for component in $components; do
  say "  $component"
  go build -trimpath -ldflags "$version" -o "$out/" "k8s.io/kubernetes/cmd/$component"
done
build_module() { # version import-path binary
  say "  $3"
  mkdir "$work/$3"
  cd "$work/$3"
  printf 'module tools\n\ngo 1.24\n' >go.mod
  go get "$2@$1" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  go build -trimpath -ldflags '-s -w' -o "$out/$3" "$2"
}
build_module $ETCD go.etcd.io/etcd/server/v3 etcd
build_module $COREDNS github.com/coredns/coredns coredns
rm -rf "$BIN"
mv "$out" "$BIN"
