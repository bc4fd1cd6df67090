#!/bin/bash
# VeRL on a CPU, with everything that make align uses: the pinned environment of the project.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_locked lock.txt
