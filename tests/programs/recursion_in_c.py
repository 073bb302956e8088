"""A function that calls itself through C code, with the limit raised: the stack overflows."""
# expect: cause=segfault signal=11 marker=HERE says="calls itself without end"

import sys

sys.setrecursionlimit(10**9)


def largest(tree: list) -> int:
    return max([tree], key=largest)  # HERE


largest([])
