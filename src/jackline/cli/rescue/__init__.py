"""`jackline rescue`: the state of a script that never saved, and the lines that load it."""
