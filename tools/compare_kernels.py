"""Compares two folders of kernels, each with its source and machine code, as `tools/compare_kernels` makes them.

Kernels are paired by their code, so that their order and names may differ. Those that are left over are printed.
"""

import collections
import hashlib
import pathlib
import re
import sys


def kernels(folder):
    """Names of kernels by the digest of their machine code."""
    by_code = collections.defaultdict(list)
    for path in sorted(pathlib.Path(folder).glob("*.cubin")):
        with open(path.with_suffix(".cu")) as source:
            name = source.readline().removeprefix("// ").strip()
        # What is the same for all kernels: their arguments are not known yet.
        name = re.sub(r"\w+: (\(\)|BufferCompilationArg \{ inplace: None \})(, )?", "", name)
        by_code[hashlib.sha256(path.read_bytes()).hexdigest()].append(f"{path.stem} {name}")
    return by_code


def main():
    before, after = (kernels(folder) for folder in sys.argv[1:3])
    counts = [sum(map(len, each.values())) for each in (before, after)]
    if 0 in counts:
        sys.exit(f"{counts[0]} and {counts[1]} kernels: nothing to compare")
    different = 0
    for sign, these, others in (("-", before, after), ("+", after, before)):
        for code, names in these.items():
            for name in names[len(others.get(code, ())) :]:
                print(f"{sign} {name}")
                different += sign == "+"
    print(f"{counts[0]} and {counts[1]} kernels, {different} of them different")
    sys.exit(different > 0)


main()
