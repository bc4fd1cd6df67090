"""Fails if anything that the vendor's image held before was changed or removed.

    python untouched.py base.json

Standard library only.
"""

import json
import sys

from inventory import installed


def main():
    with open(sys.argv[1], encoding="utf-8") as noted:
        before = json.load(noted)
    now = installed()
    changed = [
        f"{name} {version} is now {now[name][0] if name in now else 'gone'}"
        for name, (version, digest) in sorted(before.items())
        if now.get(name) != [version, digest]
    ]
    if changed:
        sys.exit("the vendor's packages were touched: " + "; ".join(changed))
    kept = [f"{name} {before[name][0]}" for name in ("torch", "torch-npu", "numpy") if name in before]
    print("untouched:", ", ".join(kept) or "nothing was there", f"({len(before)} in all)")


if __name__ == "__main__":
    main()
