"""A thousand frames of the same line: the place is the person's, the text stays short."""
# expect: cause=own_exception exit=1 marker=HERE says=RecursionError


def depth(tree) -> int:
    return 1 + depth([tree])  # HERE


depth([])
