"""Asks a question that nobody will answer."""
# expect: verdict=STUCK|SUSPECT label=KEYBOARD marker=HERE says=keyboard stdin=silent

answer = input("Use wandb? [y/n] ")  # HERE
print(answer)
