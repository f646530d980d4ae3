# usage: cluster environment FOLDER REQUIREMENTS [PIP-OPTION...]   A Python environment from a file of pinned packages.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
lock
folder=$1 requirements=$2
shift 2
[ ! -f "$folder/complete" ] || exit 0
rm -rf "$folder"
"$UVBIN" venv -q --python "$PYTHON" "$folder"
VIRTUAL_ENV=$folder "$UVBIN" pip install -q "$@" -r "$requirements"
touch "$folder/complete"
