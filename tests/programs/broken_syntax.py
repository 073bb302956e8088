"""A line that Python cannot read."""
# expect: cause=syntax_error exit=1 marker=HERE

for step in range(10)  # HERE
    print(step)
