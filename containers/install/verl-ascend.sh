#!/bin/bash
# The vendor's VeRL image: verl, torch_npu, CANN, vLLM-Ascend and MindSpeed are in it.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_beside
