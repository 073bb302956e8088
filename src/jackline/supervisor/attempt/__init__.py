"""One attempt of a run: watching it, stopping it, and what is found out at its end."""
