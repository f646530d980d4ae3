# Builds every image of images/ that has changed, as archives in the cache. No registry and no daemon: buildah.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock
mkdir -p "$IMAGES"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

from_folder() { # image folder [entrypoint]
  local container mount
  container=$(buildah from scratch)
  mount=$(buildah mount "$container")
  cp -a "$2/." "$mount/"
  buildah umount "$container" >/dev/null
  [ -z "${3:-}" ] || buildah config --entrypoint "[\"$3\"]" "$container"
  buildah commit -q "$container" "$1" >/dev/null
  buildah rm "$container" >/dev/null
}
archive() { # image file
  rm -f "$2.partial"
  buildah push -q "$1" "docker-archive:$2.partial:$1"
  mv "$2.partial" "$2"
}

if [ ! -f "$IMAGES/pause.tar" ]; then
  say "making the pause image"
  mkdir "$work/pause"
  gcc -static -Os -o "$work/pause/pause" "$HERE/pause.c"
  from_folder localhost/pause:1 "$work/pause" /pause
  archive localhost/pause:1 "$IMAGES/pause.tar"
fi
if ! buildah images -q docker.io/library/debian:bookworm-slim >/dev/null 2>&1; then
  say "making debian:bookworm-slim with debootstrap (30 s, once)"
  debootstrap --variant=minbase --include=ca-certificates bookworm "$work/debian" >/dev/null
  rm -rf "$work/debian"/{var/cache/apt,var/lib/apt/lists,usr/share/{doc,man,info,locale}}/* # as the slim image has it
  from_folder docker.io/library/debian:bookworm-slim "$work/debian"
fi

digest() { # all that an image is made from
  (cd "$ROOT" && { find "images/$1" -type f; sed -n 's/^# inputs: //p' "images/$1/Dockerfile" | tr ' ' '\n' | xargs -r -I{} find {} -type f -not -name '*.pyc'; } |
    sort | xargs sha256sum | sha256sum | cut -c1-16)
}
for dockerfile in "$ROOT"/images/*/Dockerfile; do
  name=$(basename "$(dirname "$dockerfile")")
  digest=$(digest "$name")
  [ "$(cat "$IMAGES/$name.digest" 2>/dev/null)" = "$digest" ] && [ -f "$IMAGES/$name.tar" ] && continue
  say "building localhost/rolloutfleet/$name:dev"
  # The host's certificates and name servers let pip and apt inside reach the package indexes.
  buildah bud -q --layers --isolation chroot --network host --pull-never \
    -v /etc/ssl/certs:/etc/ssl/certs:ro -v /etc/resolv.conf:/etc/resolv.conf:ro \
    -t "localhost/rolloutfleet/$name:dev" -f "$dockerfile" "$ROOT" >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; exit 1; }
  archive "localhost/rolloutfleet/$name:dev" "$IMAGES/$name.tar"
  echo "$digest" >"$IMAGES/$name.digest"
done
