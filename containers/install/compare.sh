#!/bin/bash
# Compare, diagnose and report: neither torch nor a framework.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_locked compare.txt
