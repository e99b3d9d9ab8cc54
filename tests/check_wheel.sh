#!/usr/bin/env bash
# The wheel, built and installed by the lines of notebooks/installation.md, where nothing else is: its first answer compiles
# nothing, and with its extra `headroom lab` opens the cockpit in a folder of its user's.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t lines < <(grep -oE '`(pip wheel|pipx runpip)[^`]*`' notebooks/installation.md | tr -d '`')
build_and_install=${lines[0]} add_extra=${lines[1]/\[report\]/[lab]}
work=$(mktemp -d)
trap 'rm -rf "$work" dist' EXIT
rm -rf dist
export PIPX_HOME=$work/pipx PIPX_BIN_DIR=$work/bin PATH=$work/env/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet pipx

mkdir "$work/compiled"
eval "$build_and_install"
packages=$(pipx runpip headroom-planner list --format freeze | grep -cv "^pip=")
echo "$packages packages"
((packages <= 20))
(cd "$work" && NUMBA_CACHE_DIR=$work/compiled bin/headroom plan edge-8b-24gb)
if [[ -n $(ls -A "$work/compiled") ]]; then
    echo "the wheel's first answer compiled: $(find "$work/compiled" -type f)"
    exit 1
fi

eval "$add_extra"
cd "$work"
python3 "$OLDPWD/tests/lab_answers.py" "$work/bin/headroom" lab notebooks
