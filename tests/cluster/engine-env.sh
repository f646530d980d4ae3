# The real SGLang with torch (7 GB) as an environment that pods mount, and tiny random models.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock

if [ ! -f "$ENGINE/complete" ]; then
  say "installing SGLang and torch into $ENGINE (7 GB, once)"
  rm -rf "$ENGINE"
  "$UVBIN" venv -q --python "$PYTHON" "$ENGINE"
  VIRTUAL_ENV=$ENGINE "$UVBIN" pip install -q --no-deps -r "$HERE/engine-requirements.txt"
  # Pods mount it read-only: without byte code made here, every process of every engine compiles its imports again.
  PYTHONDONTWRITEBYTECODE='' "$ENGINE/bin/python" -m compileall -qq -j 0 "$ENGINE/lib" >/dev/null 2>&1 || true # templates in packages are no Python
  touch "$ENGINE/complete"
fi
if [ ! -f "$MODELS/vl/model.safetensors" ]; then
  say "making tiny random models"
  rm -rf "$MODELS.partial"
  "$ENGINE/bin/python" "$HERE/tiny_model.py" "$MODELS.partial" >/dev/null
  rm -rf "$MODELS"
  chmod -R a+rX "$MODELS.partial" # safetensors makes files that only their owner may read
  mv "$MODELS.partial" "$MODELS"
fi
