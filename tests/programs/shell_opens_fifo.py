"""No Python at all: a shell that reads from a FIFO without writer."""
# expect: slow=yes verdict=STUCK|SUSPECT command="sh -c 'mkfifo f; cat f'"
