# make bench-scale: what is needed, then the measurement in namespaces of its own. There it is PID 1, and its files are
# on a tmpfs: when it ends, however it ends, the kernel ends all that it started and nothing is left behind.
. "$(dirname "${BASH_SOURCE[0]}")/../../cluster/common.sh"
KWOK=v0.7.0
kwok=$CACHE/kwok-$KWOK
operator=$CACHE/operator-$(sha256sum "$ROOT/images/operator/requirements.txt" | cut -c1-10)
dev=$CACHE/dev-$(sha256sum "$ROOT/tests/requirements.txt" | cut -c1-10)

if [ ! -x "$kwok/kwok" ]; then
  say "building kwok $KWOK (a minute, once)"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  cd "$work"
  printf 'module tools\n\ngo 1.24\n' >go.mod
  export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
  { go get "sigs.k8s.io/kwok/cmd/kwok@$KWOK" && go build -trimpath -ldflags '-s -w' -o kwok sigs.k8s.io/kwok/cmd/kwok; } 2>log ||
    { cat log >&2; exit 1; }
  mkdir -p "$kwok"
  mv kwok "$kwok/kwok"
  cd "$ROOT"
  rm -rf "$work"
fi
if [ ! -f "$operator/complete" ]; then # what the operator's image has, and nothing else: imports are half of its memory
  say "installing the operator's requirements"
  rm -rf "$operator"
  "$UVBIN" venv -q --python "$PYTHON" "$operator"
  VIRTUAL_ENV=$operator "$UVBIN" pip install -q --no-deps -r "$ROOT/images/operator/requirements.txt"
  touch "$operator/complete"
fi
asked=
for word; do
  if [ "$asked" = --lws ]; then # the module proxy does not serve it, so from a checkout; here, since there is no network below
    say "building LWS in $word"
    (cd "$word" && GOFLAGS=-buildvcs=false CGO_ENABLED=0 go build -o bin/manager ./cmd)
  fi
  asked=$word
done

cd "$ROOT"
export PATH=$kwok:$PATH PYTHONPATH=operator:tests OPERATOR_PYTHON=$operator/bin/python
setpriv --pdeathsig KILL unshare --net --mount --pid --fork --kill-child --mount-proc \
  "$dev/bin/python" -B -m bench.scale "$@" &
bench=$! # unshare itself ignores both signals while it waits
trap 'kill -KILL $bench 2>/dev/null; exit 130' INT
trap 'kill -KILL $bench 2>/dev/null; exit 143' TERM
wait $bench
