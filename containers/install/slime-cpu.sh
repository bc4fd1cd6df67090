#!/bin/bash
# The stand-in for slime on a CPU, importable as slime's own image has it, over the pinned environment.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_locked lock.txt
echo /opt/slime > "$(/opt/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/slime.pth"
