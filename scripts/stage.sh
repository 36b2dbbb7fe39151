# Sourced by the stage scripts from the repository's root: sets `target` from their first
# argument, or prints how they are called and ends.
own=$(basename "$(dirname "$0")")/$(basename "$0")
usage="usage: scripts/$own TARGET"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
[[ -x .venv/bin/python ]] || { echo "${0##*/}: no .venv here; run ./setup.sh first" >&2; exit 2; }
target=$1
