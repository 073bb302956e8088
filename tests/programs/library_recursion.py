"""A library calls itself too often, for a list that the script made too deep: Python prints a thousand frames."""
# expect: cause=own_exception exit=1 marker=HERE says=RecursionError says="condition that ends the recursion"

import copy


class Node:
    def __init__(self, following):
        self.following = following


head = None
for _ in range(5_000):
    head = Node(head)
best = copy.deepcopy(head)  # HERE
