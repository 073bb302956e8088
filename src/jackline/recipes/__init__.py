"""The built-in recipes, each a package of its own."""
