"""What moved, what that means, and the file about it."""
