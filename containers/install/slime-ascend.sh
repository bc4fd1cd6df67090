#!/bin/bash
# An image made with the Ascend port's quick_install.sh (slime v0.2.2, Megatron-LM, MindSpeed).
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_beside
