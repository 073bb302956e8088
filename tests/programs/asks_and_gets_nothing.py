"""Asks a question while standard input is empty: EOFError."""
# expect: cause=keyboard_input exit=1 marker=HERE

answer = input("Use wandb? [y/n] ")  # HERE
