# Sourced by every install script. Functions only.
#
#   WHEELS   directory of wheels (default /opt/rlprobe/wheels)
#   LOCKS    directory of the lists of pinned requirements (default: beside this file)
#   PREFIX   where notes for %test go (default /opt/rlprobe)

WHEELS=${WHEELS:-/opt/rlprobe/wheels}
LOCKS=${LOCKS:-$(dirname "${BASH_SOURCE[0]}")}
PREFIX=${PREFIX:-/opt/rlprobe}

say() { echo "rlprobe: $*" >&2; }

# Only from the wheelhouse, only what is named: nothing is resolved, so nothing can pull in
# another torch.
pip_install() {
    local python=$1
    shift
    "$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile \
        --no-deps --no-index --find-links "$WHEELS" "$@"
}

# Packages of the distribution that a minimal base lacks. The network is used only if some do.
debian_packages() {
    local missing=() package
    for package; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null |
            grep -qx installed || missing+=("$package")
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        say "installing ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
        rm -rf /var/lib/apt/lists/*
    fi
}

# A virtual environment holding exactly one lock and rlprobe: for images without a vendor's base.
install_locked() {
    local lock=$1
    debian_packages python3 python3-venv procps libgomp1
    python3 -m venv /opt/venv
    pip_install /opt/venv/bin/python -r "$LOCKS/$lock"
    pip_install /opt/venv/bin/python rlprobe
    # Nobody can write bytecode into an image later. Tests are never imported, and some sources
    # are for newer Pythons only.
    /opt/venv/bin/python -m compileall -qq -j 0 -x '/tests/|/torch/testing/_internal/' /opt/venv/lib ||
        say "sources for another Python were left uncompiled"
    labels /opt/venv/bin/python
}

# rlprobe and msprobe beside a vendor's framework, which stays exactly as it is.
install_beside() {
    local python
    python=$(command -v "${PYTHON:-python3}")
    mkdir -p "$PREFIX"
    "$python" "$LOCKS/inventory.py" > "$PREFIX/base.json"
    local wanted
    wanted=$("$python" "$LOCKS/absent.py" "$LOCKS/beside.txt")
    if [ -n "$wanted" ]; then
        # word splitting is meant: one requirement a word
        # shellcheck disable=SC2086
        pip_install "$python" $wanted
    fi
    for requirement in "$@" rlprobe; do
        pip_install "$python" "$requirement"
    done
    # Images that have python3 only would fail on "python -m …".
    command -v python >/dev/null || ln -s "$python" /usr/local/bin/python
    labels "$python"
}

# Labels with what is really inside, for apptainer inspect.
labels() {
    local python=$1
    if [ -n "${APPTAINER_LABELS:-}" ]; then
        "$python" "$LOCKS/inventory.py" --labels >> "$APPTAINER_LABELS"
    fi
}
