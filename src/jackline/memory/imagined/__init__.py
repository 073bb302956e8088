"""What a program that was written for a GPU finds while it is traced without one."""
