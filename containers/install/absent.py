"""Prints those requirements of a list whose distribution is not installed at all.

    python absent.py beside.txt

A package that the vendor's image has, in whatever version, is the vendor's to choose: replacing it
is how a working image is broken. Standard library only.
"""

import importlib.metadata
import pathlib
import sys


def absent(lines):
    for line in lines:
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        try:
            importlib.metadata.version(requirement.partition("==")[0])
        except importlib.metadata.PackageNotFoundError:
            yield requirement


if __name__ == "__main__":
    with pathlib.Path(sys.argv[1]).open(encoding="utf-8") as listed:
        print(" ".join(absent(listed)))
