"""Two functions call each other without end."""


# expect: slow=yes cause=own_exception exit=1 says=recursion
def even(n):
    return odd(n - 1)


def odd(n):
    return even(n - 1)


even(10)
