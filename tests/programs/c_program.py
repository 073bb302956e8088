"""Not Python at all: a C program whose stdio would keep its lines to itself until the end."""
# expect: exit=0 cause=finished out="step 29" live=yes needs=gcc,libstdbuf command="sh -c 'gcc -o steps {folder}/steps.c && ./steps'"
