"""What is installed: names, versions, and a digest of each distribution's own list of files.

    python inventory.py             JSON on stdout
    python inventory.py --labels    lines "NAME VERSION" of what a person asks an image about

Standard library only; runs in any image.
"""

import hashlib
import importlib.metadata
import json
import sys

_LABELLED = (
    "rlprobe",
    "mindstudio-probe",
    "torch",
    "torch_npu",
    "numpy",
    "ray",
    "verl",
    "slime",
    "megatron-core",
    "vllm",
    "sglang",
    "transformers",
)


def installed():
    """Distribution -> [version, digest of its RECORD, or of its metadata where it has none]."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if not name or name.lower().replace("_", "-") in found:
            continue  # a second copy is shadowed by the first
        listed = distribution.read_text("RECORD") or distribution.read_text("METADATA") or ""
        digest = hashlib.sha256(listed.encode()).hexdigest()
        found[name.lower().replace("_", "-")] = [distribution.version, digest]
    return found


def main():
    found = installed()
    if "--labels" not in sys.argv:
        json.dump(found, sys.stdout, indent=1, sort_keys=True)
        return
    print(f"org.rlprobe.python {sys.version.split()[0]}")
    for name in _LABELLED:
        version = found.get(name.replace("_", "-"))
        if version:
            print(f"org.rlprobe.{name} {version[0]}")


if __name__ == "__main__":
    main()
