"""Fails if anything that the vendor's image held before was changed or removed.

    python untouched.py base.json

Standard library only.
"""

import json
import pathlib
import sys

from inventory import installed


def main():
    before = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    now = installed()
    changed = [
        f"{name} {version} is now {now[name][0] if name in now else 'gone'}"
        for name, (version, digest) in sorted(before.items())
        if now.get(name) != [version, digest]
    ]
    if changed:
        sys.exit("the vendor's packages were touched: " + "; ".join(changed))
    watched = ("torch", "torch-npu", "numpy")
    kept = [f"{name} {before[name][0]}" for name in watched if name in before]
    print("untouched:", ", ".join(kept) or "nothing was there", f"({len(before)} in all)")


if __name__ == "__main__":
    main()
