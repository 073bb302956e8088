"""Scripts of three frameworks, for every cell of the matrix in framework_torture.py."""
