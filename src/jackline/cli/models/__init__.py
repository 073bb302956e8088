"""Commands that make a recipe, or runs out of a recipe or another run: init, fork, sweep."""
