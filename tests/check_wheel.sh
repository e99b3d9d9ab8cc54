#!/usr/bin/env bash
# The wheel, installed as README.md says, where nothing else is: its first answer compiles nothing, and
# `headroom lab` opens the cockpit in a folder of its user's.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv=("$root/.venv/bin/python" -m uv)

.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/dist" .
wheel=$(echo "$work"/dist/headroom_planner-*.whl)
"${uv[@]}" venv --quiet --python .venv/bin/python "$work/env"
"${uv[@]}" pip install --quiet --python "$work/env/bin/python" --constraint constraints.txt "$wheel"
packages=$("${uv[@]}" pip list --quiet --python "$work/env/bin/python" --format freeze | wc -l)
echo "$packages packages"
((packages <= 20))

cd "$work"
mkdir compiled
NUMBA_CACHE_DIR=$work/compiled env/bin/headroom plan edge-8b-24gb
if [[ -n $(ls -A compiled) ]]; then
    echo "the wheel's first answer compiled: $(find compiled -type f)"
    exit 1
fi

"${uv[@]}" pip install --quiet --python "$work/env/bin/python" --constraint "$root/constraints.txt" "$wheel[all]"
python3 "$root/tests/lab_answers.py" "$work/env/bin/headroom" lab notebooks
