"""A forgotten breakpoint(): the debugger waits for a person."""
# expect: verdict=STUCK|SUSPECT label=KEYBOARD marker=HERE says=keyboard stdin=silent


def step() -> None:
    loss = 0.7
    breakpoint()
    print(loss)  # HERE


step()
