#!/bin/bash
# slime's own image: slime, Megatron-LM and SGLang are in it.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_beside
