#!/bin/bash
# verl's own CUDA image carries engines and Megatron but not verl itself.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_beside verl==0.9.1
