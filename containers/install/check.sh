#!/bin/bash
# %test of every image: what a run needs is there and loads.
#
#   check.sh MODULE…      modules that must be importable
set -eu
here=$(dirname "$0")
PREFIX=${PREFIX:-/opt/rlprobe}
python=${PYTHON:-python}
if [ -f "$PREFIX/base.json" ]; then
    "$python" "$here/untouched.py" "$PREFIX/base.json"
fi
for module; do
    "$python" -c "import $module"
done
# Capture must reach processes that the framework starts: the .pth file is what does it.
"$python" - <<'PY'
import pathlib, site, sys
places = [*site.getsitepackages(), site.getusersitepackages()]
if not any(pathlib.Path(place, "rlprobe.pth").is_file() for place in places):
    sys.exit(f"rlprobe.pth is in none of {places}; hooks would not reach the framework's processes")
PY
"$python" "$here/inventory.py" --labels
